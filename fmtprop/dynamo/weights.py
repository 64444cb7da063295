"""Whether parameters are still what a plan has packed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

__all__ = ["Weights"]

_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr


class Weights:
    """Tensors as they were when a plan was made of them.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        They are kept, so that no other tensor can take the place of one in memory.

    Notes
    -----
    PyTorch counts the changes of a tensor, and gives another tensor other memory. A change in place through ``.data``
    or through NumPy is not counted: nobody sees it, PyTorch's own freezing no more than this.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._state = _state_of(self._tensors)

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Say whether these are the same tensors with the same numbers."""
        same = all(map(_is, self._tensors, tensors))
        return same and _state_of(tensors) == self._state


def _is(a: object, b: object) -> bool:
    return a is b


def _state_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [*map(_VERSION, tensors), *map(_ADDRESS, tensors)]
