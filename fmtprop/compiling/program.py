"""The program of a model for several shapes, and what its plans share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fmtprop.capture.torch_export import Exported
from fmtprop.compiling.shapes import Shapes


@dataclass(frozen=True)
class SharedProgram:
    """A model that was exported once for several shapes."""

    exported: Exported

    @cached_property
    def shapes(self) -> Shapes:
        """The packed weights and the choices of its plans."""
        program = self.exported.program
        return Shapes((*program.state_dict.values(), *program.constants.values()))
