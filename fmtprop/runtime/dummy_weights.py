"""Plans that can only be timed: instead of packed weights, they read arbitrary numbers from one shared block.

oneDNN's time does not depend on the numbers, only on the level of memory that they come from. So plans can be raced
before any weights are packed, and with less memory than the weights need: bytes that were last read two cache sizes
ago come from main memory, and it does not matter which bytes were read in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch

from fmtprop.ir import Graph, Node, TensorType, Value
from fmtprop.ir.aliasing import is_in_place, is_view
from fmtprop.ir.tensors import Constant
from fmtprop.layout import MemoryDesc
from fmtprop.runtime.build import Draft
from fmtprop.runtime.constants import (
    ConstantStore,
    Operands,
    any_numbers_do,
    computed_nodes,
    is_indifferent,
    readers_behind_views,
)
from fmtprop.runtime.plan import Plan
from fmtprop.system.machine import last_level_cache_nbytes
from fmtprop.targets.memory import align, numbers


def runs_on_any_numbers(graph: Graph) -> bool:
    """Return whether a formatted graph can run on any numbers: no PyTorch operator reads results that depend on them.

    An operator may refuse unexpected numbers, read them as indices, or take longer for some numbers.
    """
    stirred: set[str] = set()  # nodes that depend on the numbers
    for node in graph.nodes():
        reads = {value.node for value in graph.inputs(node.name).values()} & stirred
        indifferent = is_indifferent(node)
        if indifferent or reads:
            stirred.add(node.name)
        moves_nothing = node.is_boundary or is_view(graph, node.name) or is_in_place(node)
        if reads and not (indifferent or moves_nothing):
            return False
    return True


def with_dummy_weights(drafts: Mapping[str, Draft]) -> dict[str, Callable[[], Plan]]:
    """Return functions that complete drafts to plans for timing; the plans' outputs are meaningless.

    Result: the functions by name. All plans share one block in place of oneDNN's weights; it is freed with the last
    plan. The graphs' other constants are borrowed.
    """
    sizes = [list(_stand_in_sizes(draft.graph)) for draft in drafts.values()]
    enough = max(2 * last_level_cache_nbytes(), max((size for some in sizes for size in some), default=0))
    block = numbers(min(max(map(sum, sizes), default=0), enough))
    return {name: partial(draft.pack, _StandIns(block)) for name, draft in drafts.items()}


class _StandIns(ConstantStore):
    """A store that takes packed constants from a block of arbitrary numbers, again and again from its start."""

    def __init__(self, block: torch.Tensor) -> None:
        super().__init__()
        self._block, self._next = block, 0

    def add(self, data: Constant, type_: TensorType, desc: MemoryDesc, *, packed: bool, native: bool) -> torch.Tensor:
        """Return arbitrary numbers for a parameter of oneDNN, nothing if it is only packed; others without a copy."""
        if native:
            return torch.empty(0, dtype=torch.uint8) if packed else self._take(desc)
        return super().add(data, type_, desc, packed=True, native=native)

    def compute(self, node: Node, operands: Operands, threads: int, unread: Collection[int] = ()) -> list[torch.Tensor]:
        """Return arbitrary numbers for a node that accepts any."""
        if not is_indifferent(node):
            return super().compute(node, operands, threads, unread)
        return [self._take(desc) for desc in node.descs]

    def _take(self, desc: MemoryDesc) -> torch.Tensor:
        if self._next + desc.nbytes > self._block.numel():
            self._next = 0
        start = self._next
        self._next += align(desc.nbytes)
        return self._block[start : start + desc.nbytes]

    def keep(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the bytes; equal ones are not merged, to keep the distances of real weights."""
        return flat


def _stand_in_sizes(graph: Graph) -> Iterator[int]:
    """Yield the sizes in bytes of all constants that oneDNN packs or reads."""
    computed = computed_nodes(graph)
    for node in graph.nodes():
        if node.op == "constant":
            readers = readers_behind_views(graph, Value(node.name))
            is_read = any_numbers_do(graph, node.name) and not computed.isdisjoint(readers)
        else:
            is_read = node.name not in computed and is_indifferent(node)
        if is_read:
            yield from (align(desc.nbytes) for desc in node.descs)
