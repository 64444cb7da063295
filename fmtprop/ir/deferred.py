"""Constants that are not in memory: made on request from a file, a seed or another constant.

A model is planned only by the types of its weights. Their numbers are made when they are packed, one constant after
the other, so memory holds the packed constants and one original.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType

if TYPE_CHECKING:
    import torch

#: smaller constants stay in memory: passes read vectors again and again
SMALL_NBYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that is made again at each request.

    Parameters
    ----------
    type_ : TensorType
        Logical type of the tensor.
    strides : tuple of int
        Its strides in elements.
    make : callable
        Makes the tensor, with the same numbers each time.
    fresh : bool
        Whether the made tensor owns its memory. Otherwise the memory may belong to a file or a module, and a tensor to
        keep must be copied.
    largest : float, optional
        A bound of the numbers' magnitudes, if it is known without making the tensor.
    source : (Deferred, hashable), optional
        The tensor that it is a function of, and an identity of this function.
    lent : bool
        Whether the memory, which belongs to a module, may be read for as long as the numbers are wanted: no plan needs
        a copy. Whoever lends it has the plan made again after a change.
    """

    type_: TensorType
    strides: tuple[int, ...]
    make: Callable[[], torch.Tensor] = field(repr=False)
    fresh: bool = False
    largest: float | None = None
    source: tuple[Deferred, Hashable] | None = field(default=None, repr=False)
    lent: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions (PyTorch's name)."""
        return self.type_.dims

    @property
    def dtype(self) -> DataType:
        """Its data type (PyTorch's name)."""
        return self.type_.dtype

    def stride(self) -> tuple[int, ...]:
        """Return its strides (PyTorch's name)."""
        return self.strides

    def then(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        identity: Hashable,
        fresh: bool,
        largest: float | None,
    ) -> Deferred:
        """Return the deferred result of a function of this tensor, with the same type and strides.

        Parameters
        ----------
        function : callable
            Must not change its argument, unless that is fresh.
        identity : hashable
            Equal for functions with equal results.
        """
        return Deferred(self.type_, self.strides, lambda: function(self.make()), fresh, largest, (self, identity))

    def viewed(
        self, view: Callable[[torch.Tensor], torch.Tensor], type_: TensorType, strides: tuple[int, ...]
    ) -> Deferred:
        """Return a deferred view of it.

        Parameters
        ----------
        strides : tuple of int
            Strides of the view in elements.
        """
        return Deferred(type_, strides, lambda: view(self.make()), self.fresh, self.largest, lent=self.lent)
