"""Detection of changed parameters after a plan packed them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

__all__ = ["Weights"]

_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr


class Weights:
    """The state of tensors when a plan was made from them.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        The tensors; they are kept alive, so that no other tensor can get the memory of one.

    Notes
    -----
    PyTorch counts the changes of a tensor, and another tensor has other memory. A change in place through ``.data`` or
    through NumPy is not counted, so it is not detected (nor does PyTorch's own freezing detect it).
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._state = [*map(_VERSION, self._tensors), *map(_ADDRESS, self._tensors)]

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the same tensors with the same numbers."""
        same = all(map(is_, self._tensors, tensors))
        return same and [*map(_VERSION, tensors), *map(_ADDRESS, tensors)] == self._state
