"""Arena planning: buffers with lifetimes get offsets, so that buffers that are never alive together share bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fmtprop.targets.memory import ALIGNMENT


class Lifetime(NamedTuple):
    """A buffer that needs a place.

    ``first`` and ``last`` are the first and last step that use it, inclusive.
    """

    nbytes: int
    first: int
    last: int


class Layout(NamedTuple):
    """Where the buffers lie: an offset for each, the arena's size and its lower bound, in bytes."""

    offsets: tuple[int, ...]
    nbytes: int
    peak_nbytes: int


def align(nbytes: int) -> int:
    """Round up to the alignment.

    Examples
    --------
    >>> align(1), align(64), align(65)
    (64, 64, 128)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_arena(lifetimes: Sequence[Lifetime]) -> Layout:
    """Place buffers greedily, largest first, each in the lowest gap that fits.

    Parameters
    ----------
    lifetimes : sequence of Lifetime
        The buffers.

    Returns
    -------
    Layout
        Offsets in the order given.

    Examples
    --------
    >>> plan_arena([Lifetime(100, 0, 1), Lifetime(64, 1, 2), Lifetime(100, 2, 3)])
    Layout(offsets=(0, 128, 0), nbytes=192, peak_nbytes=192)

    References
    ----------
    Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020: greedy by size.
    """
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, lifetimes[i].first, i)):
        buffer = lifetimes[index]
        size = align(buffer.nbytes)
        taken = sorted((a, b) for a, b, other in placed if other.first <= buffer.last and buffer.first <= other.last)
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + size, buffer))
    nbytes = max((end for _, end, _ in placed), default=0)
    return Layout(tuple(offsets), nbytes, _peak(lifetimes))


def _peak(lifetimes: Sequence[Lifetime]) -> int:
    steps = {buffer.first for buffer in lifetimes}
    return max((sum(align(b.nbytes) for b in lifetimes if b.first <= step <= b.last) for step in steps), default=0)
