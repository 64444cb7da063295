"""Interface between an op's declaration and the ONNX export: the nodes that an op becomes.

Values of the ONNX graph are their names. The writer is :mod:`fmtprop.onnx.model.writing`; this module and the
declarations do without the package ``onnx``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fmtprop.ir.types import TensorType


class Writing(Protocol):
    """The ONNX graph while it is written."""

    def __call__(self, op_type: str, *inputs: str | None, **attributes: Any) -> str:
        """Add a node of the domain ``ai.onnx`` and return its result; an absent optional input is None.

        An attribute that is None is left out.
        """

    def type(self, value: str) -> TensorType:
        """Return the type of an operand."""

    def constant(self, numbers: Any, dtype: str | None = None) -> str:
        """Add a constant of a number or nested lists; by default, of the data type of the node's first operand."""

    def reshaped(self, value: str, dims: tuple[int, ...]) -> str:
        """Return the value with other dimensions; the value itself if it has them already."""

    def transposed(self, value: str, order: Sequence[int]) -> str:
        """Return the value with its axes in another order, as torch's ``permute`` counts it."""

    def cast(self, value: str, dtype: str) -> str:
        """Return the value in a data type; the value itself if it has it already."""


#: ``(attrs, writing, operands by name) -> name of the result``
Write = Callable[[Any, Writing, Mapping[str, str]], str]


@dataclass(frozen=True)
class Onnx:
    """An op as ONNX nodes."""

    #: ``(attrs, writing, names of the operands) -> name of the result``. The operands' types are those of the graph.
    write: Write
    #: whether the op only moves numbers. Other ops get 16-bit floats as f32, and their result is rounded once, as
    #: oneDNN does; ONNX Runtime has no kernels for 16-bit floats on CPUs.
    moves: bool = False
