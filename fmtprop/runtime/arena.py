"""Arena planning: buffers get offsets by their lifetimes; buffers that are never alive together may share bytes.

Before any buffer is placed, the formatted graph decides which tensors are made inside others' buffers: sources of
concats in place, and residuals of their sums.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from fmtprop.errors import PlanError
from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.aliasing import is_in_place, overwrite_hazard, parts_of, storage
from fmtprop.targets.executable import implementation
from fmtprop.targets.memory import align


class Position(NamedTuple):
    """A tensor's position inside the buffer of another tensor, which may have a slot itself.

    ``start`` counts elements from the first element of the outer tensor.
    """

    outer: Value
    start: int


@dataclass
class Placement:
    """The slots of all tensors that are made inside others."""

    #: tensor that a step makes -> its slot
    slots: dict[Value, Position] = field(default_factory=dict)
    #: (node in place, operand) if the operand is written to its slot; all other operands are copied
    written: set[tuple[str, str]] = field(default_factory=set)
    #: nodes with a slot that also holds the residual of their sum
    added_to: set[str] = field(default_factory=set)


def sum_operand(node: Node) -> str | None:
    """Return the residual that the node's sum overwrites, or None."""
    return None if node.choice is None or node.choice.handle is None else implementation(node).residual(node)


def place_parts(graph: Graph, computed: Set[str]) -> Placement:
    """Give slots to the sources of concats in place; a source gets its slot from its first such reader."""
    placement = Placement()
    for node in graph.nodes():
        if not is_in_place(node):
            continue
        parts = parts_of(graph, node)
        if parts is None:
            raise PlanError(f"{node.label} cannot be in place: its sources are not dense parts of {node.descs[0]}")
        for operand, value in graph.inputs(node.name).items():
            made = _made_whole(graph, value, computed)
            if made is not None and made not in placement.slots:
                placement.slots[made] = Position(Value(node.name), parts[operand].offset0)
                placement.written.add((node.name, operand))
                _place_residuals(graph, made, computed, placement)
    return placement


def _makes_results(node: Node) -> bool:
    """Return whether a step allocates its results; a view is no step."""
    return node.choice is not None and node.choice.handle is not None and implementation(node).makes_results


def _made_whole(graph: Graph, value: Value, computed: Set[str]) -> Value | None:
    """Return the tensor that a step makes and of which the value is a complete view; otherwise None."""
    made = storage(graph, value)
    node = graph.node(made.node)
    if node.is_boundary or made.node not in computed or _makes_results(node):
        return None
    stored, seen = graph.desc_of(made), graph.desc_of(value)
    return made if stored.is_dense and seen.is_dense and stored.nbytes == seen.nbytes else None


def _place_residuals(graph: Graph, value: Value, computed: Set[str], placement: Placement) -> None:
    """Give the sum's slot to its residual, if the sum may overwrite it, and repeat this for the residual's own sum."""
    while True:
        node = graph.node(value.node)
        operand = sum_operand(node)
        if operand is None or value.index:
            return
        residual = graph.inputs(node.name)[operand]
        made = _made_whole(graph, residual, computed)
        if made is None or made in placement.slots or overwrite_hazard(graph, residual, node.name, operand):
            return
        placement.slots[made] = Position(value, 0)
        placement.added_to.add(node.name)
        value = made


#: limits the search for a good order: pairs of overlapping lifetimes that are compared before the best order so far is
#: taken. This many take about 50 ms
_WORK_PAIRS = 150_000


class Lifetime(NamedTuple):
    """A buffer that needs an offset.

    ``first`` and ``last`` are the first and last step that use it, inclusive.
    """

    nbytes: int
    first: int
    last: int


class ArenaLayout(NamedTuple):
    """The offset of each buffer, the arena's size and its lower bound, in bytes."""

    offsets: tuple[int, ...]
    nbytes: int
    peak_nbytes: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> ArenaLayout:
    """Place buffers in the best of several orders, each in the lowest gap that fits.

    A buffer that fits no gap goes on top: above the highest neighbour, or right below the lower bound, which keeps the
    space between them in one piece. Both are tried. An order that exceeds the bound is tried again with the buffers
    beyond the bound first, until a fixed amount of work is done.

    >>> plan_arena([Lifetime(100, 0, 1), Lifetime(64, 1, 2), Lifetime(100, 2, 3)])
    ArenaLayout(offsets=(0, 128, 0), nbytes=192, peak_nbytes=192)

    Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020: greedy by size, and the bound.
    """
    load = _load(lifetimes)
    peak = max(load.values(), default=0)
    neighbours = _neighbours(lifetimes)
    ways = [(order, ceiling) for order in _orders(lifetimes, load) for ceiling in (0, peak)]
    attempts = 1 + _WORK_PAIRS // (len(lifetimes) + sum(map(len, neighbours)) or 1)
    best: tuple[int, list[int]] | None = None
    for attempt in range(attempts):
        order, ceiling = ways[attempt % len(ways)]
        offsets, nbytes = _first_fit(lifetimes, neighbours, order, ceiling)
        if best is None or nbytes < best[0]:
            best = nbytes, offsets
        if nbytes == peak:
            break
        beyond = {i for i in order if offsets[i] + align(lifetimes[i].nbytes) > peak}
        others = [i for i in order if i not in beyond]
        ways[attempt % len(ways)] = [*(i for i in order if i in beyond), *others], ceiling
    nbytes, offsets = best or (0, [])
    return ArenaLayout(tuple(offsets), nbytes, peak)


def peak_nbytes(lifetimes: Sequence[Lifetime]) -> int:
    """Return the largest sum of bytes alive at one step."""
    return max(_load(lifetimes).values(), default=0)


def _load(lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """Return the bytes alive at each step at which a buffer begins; the maximum is at one of these steps."""
    change: dict[int, int] = {}
    for buffer in lifetimes:
        change[buffer.first] = change.get(buffer.first, 0) + align(buffer.nbytes)
        change[buffer.last + 1] = change.get(buffer.last + 1, 0) - align(buffer.nbytes)
    steps = sorted(change)
    alive = dict(zip(steps, accumulate(change[step] for step in steps), strict=True))
    return {buffer.first: alive[buffer.first] for buffer in lifetimes}


def _neighbours(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """Return, for each buffer, the buffers that are alive together with it."""
    found: list[list[int]] = [[] for _ in lifetimes]
    alive: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        alive = [other for other in alive if lifetimes[other].last >= lifetimes[index].first]
        for other in alive:
            found[index].append(other)
            found[other].append(index)
        alive.append(index)
    return found


def _orders(lifetimes: Sequence[Lifetime], load: Mapping[int, int]) -> list[list[int]]:
    """Return the first orders to try: by size, by size times span, by span, by first step, by the fullest step."""
    everything = range(len(lifetimes))
    span = [buffer.last - buffer.first + 1 for buffer in lifetimes]
    size = [align(buffer.nbytes) for buffer in lifetimes]
    steps = sorted(load)
    busiest = [
        max((load[s] for s in steps[bisect_left(steps, b.first) : bisect_right(steps, b.last)]), default=0)
        for b in lifetimes
    ]
    return [
        sorted(everything, key=lambda i: (-size[i], lifetimes[i].first)),
        sorted(everything, key=lambda i: -size[i] * span[i]),
        sorted(everything, key=lambda i: (-span[i], -size[i])),
        sorted(everything, key=lambda i: (lifetimes[i].first, -size[i])),
        sorted(everything, key=lambda i: (-busiest[i], -span[i])),
    ]


def _first_fit(
    lifetimes: Sequence[Lifetime], neighbours: Sequence[Sequence[int]], order: Sequence[int], ceiling: int
) -> tuple[list[int], int]:
    """Place buffers one after another, each at the lowest free offset; return offsets and size.

    A buffer that fits no gap ends at the ceiling, if the ceiling is high enough.
    """
    offsets, end = [-1] * len(lifetimes), 0
    size = [align(buffer.nbytes) for buffer in lifetimes]
    for index in order:
        offset = 0
        for start, stop in sorted((offsets[i], offsets[i] + size[i]) for i in neighbours[index] if offsets[i] >= 0):
            if offset + size[index] <= start:
                break
            offset = max(offset, stop)
        else:
            if offset:
                offset = max(offset, ceiling - size[index])
        offsets[index] = offset
        end = max(end, offset + size[index])
    return offsets, end
