"""Detection of changed parameters after a plan packed them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from fmtprop.jit import Words, no_code

_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr

#: numbers of a tensor that are compared, and candidates for them
_COMPARED, _CANDIDATES = 8, 64


class Weights:
    """The state of tensors when a plan was made from them.

    `tensors`: the tensors; they are kept alive, so that no other tensor can get the memory of one.

    PyTorch counts the changes of a tensor, and another tensor has other memory. A change in place through ``.data`` or
    through NumPy is not counted: it is detected if it changes one of eight numbers of the tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._state = [*map(_VERSION, self._tensors), *map(_ADDRESS, self._tensors)]
        words = () if no_code() else [word for tensor in self._tensors for word in _words(tensor.detach())]
        self._watch = Words(words) if words else None

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the same tensors with the same numbers."""
        same = all(map(is_, self._tensors, tensors))
        same = same and [*map(_VERSION, tensors), *map(_ADDRESS, tensors)] == self._state
        return same and (self._watch is None or not self._watch.has_changed)


def _words(tensor: torch.Tensor) -> list[int]:
    """Return addresses of some numbers, of which none is zero if possible: a factor does not change zeros."""
    count = tensor.numel()
    places = sorted({place * (count - 1) // (_CANDIDATES - 1) for place in range(_CANDIDATES)}) if count else []
    axes = list(zip(tensor.shape, tensor.stride(), strict=True))[::-1]
    offsets = [_offset(place, axes) for place in places]
    values = tensor.as_strided((max(offsets, default=-1) + 1,), (1,))[offsets]
    ordered = sorted(zip((values == 0).tolist(), offsets, strict=True), key=lambda one: one[0])
    known = [offset for _, offset in ordered][: max(_COMPARED, int((values != 0).sum()))]
    step = -(-len(known) // _COMPARED) or 1
    return [(tensor.data_ptr() + offset * tensor.element_size()) & ~3 for offset in known[::step]]


def _offset(place: int, axes: Sequence[tuple[int, int]]) -> int:
    """Return an element's distance from the first one; axes are (size, stride), the last one first."""
    offset = 0
    for size, stride in axes:
        place, index = divmod(place, size)
        offset += index * stride
    return offset
