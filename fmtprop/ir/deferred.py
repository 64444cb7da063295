"""Constants that are not in memory: made on request from a file, a seed or another constant.

A model is planned only by the types of its weights. Their numbers are made when they are packed, one constant after
the other, so memory holds the packed constants and one original.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType

if TYPE_CHECKING:
    import torch

#: smaller constants stay in memory: passes read vectors again and again
SMALL_NBYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Deferred:
    """A tensor that is made again at each request."""

    type_: TensorType
    strides: tuple[int, ...]
    #: makes the tensor, with the same numbers each time
    make: Callable[[], torch.Tensor] = field(repr=False)
    #: whether the made tensor owns its memory. Otherwise the memory may belong to a file or a module, and a tensor to
    #: keep must be copied.
    fresh: bool = False
    #: a bound of the numbers' magnitudes, if it is known without making the tensor
    largest: float | None = None
    #: the constant that it is a function of, and an identity of this function
    source: tuple[Any, Hashable] | None = field(default=None, repr=False)
    #: whether the memory, which belongs to a module, may be read for as long as the numbers are wanted: no plan needs a
    #: copy. Whoever lends it has the plan made again after a change.
    lent: bool = False
    #: identity of the numbers, where a plan has them already
    identity: Hashable = field(default=None, repr=False)

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

        `function`: must not change its argument, unless that is fresh.
        """
        return Deferred(self.type_, self.strides, lambda: function(self.make()), fresh, largest, (self, identity))

    def viewed(
        self, view: Callable[[torch.Tensor], torch.Tensor], type_: TensorType, strides: tuple[int, ...]
    ) -> Deferred:
        """Return a deferred view of it."""
        return Deferred(type_, strides, lambda: view(self.make()), self.fresh, self.largest, lent=self.lent)
