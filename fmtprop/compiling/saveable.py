"""What models that can be in a plan file have in common: they are saved, pickled and copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmtprop.compiling.saving import Saved


class Saveable(ABC):
    """A model that a plan file may hold."""

    @abstractmethod
    def _saved(self) -> Saved:
        """Return what its plan file has."""

    def save(self, path: str | PathLike[str], weights: Any = None) -> None:
        """Write the model to a plan file, which :func:`fmtprop.load_plan` reads in any process.

        The file has the packed weights, the formatted graph and all choices: the same machine and library run it with
        the same implementations and equal bits, without a search, a race or a measurement. It has no code in it.

        Parameters
        ----------
        path : str or path
            The file; usually it ends in ``.fmtplan``. Only a plan file is replaced.
        weights : str, path or sequence of them, optional
            Files that have the model's weights already: ``.safetensors``, ``.onnx`` (with its external data), ``.pt2``
            or ``.pt``. The plan file refers to their numbers, and has only what is not in them. It is loaded where
            these files are beside it, or named; their weights are packed then.

        Raises
        ------
        PlanError
            The model cannot be in a file, the file cannot be written, or `weights` has none of the model's.
        """
        self._saved().write(path, weights)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as the bytes of a plan file; where they are loaded, they are planned again if they do not fit."""
        return self._saved().reduced(protocol)

    def __reduce__(self) -> Any:
        """Be pickled as :meth:`__reduce_ex__` does."""
        return self.__reduce_ex__(2)

    @abstractmethod
    def __copy__(self) -> Any:
        """Return a model with contexts of its own; plans and constants, which never change, are shared."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a model as a copy is."""
        return self.__copy__()
