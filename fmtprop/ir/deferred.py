"""Constants that nobody holds: made when they are asked for, from a file, a seed or another constant.

A model is planned by the types of its weights alone; their numbers are made when they are packed, one constant after
the other, so that memory holds the packed ones and a single original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType

if TYPE_CHECKING:
    import torch

__all__ = ["SMALL_NBYTES", "Deferred"]

#: bytes up to which it is not worth while: passes ask for vectors again and again
SMALL_NBYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that is made anew at each request.

    Parameters
    ----------
    type_ : TensorType
        What it is.
    strides : tuple of int
        How it lies in memory, in elements.
    make : callable
        Gives it, the same numbers each time.
    fresh : bool
        Whether its memory is nobody else's. Otherwise it may be a file's, or a module's: whoever keeps it copies it.
    largest : float, optional
        A magnitude that none of its numbers exceeds, where that is known without making it.
    """

    type_: TensorType
    strides: tuple[int, ...]
    make: Callable[[], torch.Tensor] = field(repr=False)
    fresh: bool = False
    largest: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, under PyTorch's name."""
        return self.type_.dims

    @property
    def dtype(self) -> DataType:
        """Its data type, under PyTorch's name."""
        return self.type_.dtype

    def stride(self) -> tuple[int, ...]:
        """Return its strides, under PyTorch's name."""
        return self.strides

    def then(self, function: Callable[[torch.Tensor], torch.Tensor], *, fresh: bool, largest: float | None) -> Deferred:
        """Return what a function makes of it, just as late; of the same type, and in the same places.

        Parameters
        ----------
        function : callable
            Leaves its argument as it is, unless that is fresh.
        fresh, largest
            Of the result.
        """
        return Deferred(self.type_, self.strides, lambda: function(self.make()), fresh, largest)

    def viewed(
        self, view: Callable[[torch.Tensor], torch.Tensor], type_: TensorType, strides: tuple[int, ...]
    ) -> Deferred:
        """Return a view of it, just as late.

        Parameters
        ----------
        view : callable
            Makes it.
        type_ : TensorType
            Of the view.
        strides : tuple of int
            How the view lies in memory, in elements.
        """
        return Deferred(type_, strides, lambda: view(self.make()), self.fresh, self.largest)
