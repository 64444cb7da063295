"""Plans that can only be timed: numbers stand in for their packed weights, the same memory for all of them.

How long oneDNN takes does not depend on the numbers, so plans can be run against each other before any weights are
packed: memory never holds the weights of all contestants, and what loses is never packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fmtprop.ir.aliasing import is_view
from fmtprop.ir.graph import Graph
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.node import Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Target
from fmtprop.runtime.build import build_plan
from fmtprop.runtime.constants import ConstantStore
from fmtprop.runtime.plan import Plan
from fmtprop.targets.memory import ALIGNMENT, numbers

__all__ = ["can_rehearse", "rehearse"]


def can_rehearse(graph: Graph) -> bool:
    """Say whether a formatted graph can run on any numbers: no PyTorch operator sees what oneDNN makes of them.

    An operator may refuse numbers that it does not expect, read them as indices, or take longer over some.
    """
    stirred: set[str] = set()  # what depends on the numbers
    for node in graph.nodes():
        target = node.choice.target if node.choice is not None else ""
        reads = {value.node for value in graph.inputs(node.name).values()} & stirred
        if target == "onednn" or reads:
            stirred.add(node.name)
        if reads and not (target == "onednn" or node.is_boundary or is_view(graph, node.name) or target == "view"):
            return False
    return True


def rehearse(graphs: Sequence[Graph], target: Target) -> list[Plan]:
    """Freeze formatted graphs into plans whose outputs mean nothing.

    Parameters
    ----------
    graphs : sequence of Graph
        Each of which `can_rehearse`.
    target : Target
        See :func:`fmtprop.runtime.build_plan`.

    Returns
    -------
    list of Plan
        Their packed weights share memory, which goes with the last of them.
    """
    block = numbers(max(map(_packed_nbytes, graphs), default=0))
    return [build_plan(graph, target, constants=_StandIns(block)) for graph in graphs]


class _StandIns(ConstantStore):
    """Takes what oneDNN would pack from a block of numbers."""

    def __init__(self, block: torch.Tensor) -> None:
        super().__init__()
        self._rest = block

    def add(self, data: torch.Tensor | Initialiser, type_: TensorType, desc: MemoryDesc, *, packed: bool) -> int:
        """Store a parameter, unless it would only be packed."""
        if packed:
            return self._append(torch.empty(0, dtype=torch.uint8))
        return super().add(data, type_, desc, packed=False)

    def compute(self, node: Node, operands: Mapping[str, tuple[torch.Tensor, MemoryDesc]]) -> list[torch.Tensor]:
        """Return numbers for what oneDNN would compute."""
        if node.choice is None or node.choice.target != "onednn":
            return super().compute(node, operands)
        results = []
        for desc in node.descs:
            results.append(self._rest[: desc.nbytes])
            self._rest = self._rest[_room(desc) :]
        return results

    def keep(self, flat: torch.Tensor) -> int:
        """Store flat bytes: equal ones are to be as far apart as the real ones."""
        return self._append(flat)


def _packed_nbytes(graph: Graph) -> int:
    """Return the bytes of what oneDNN packs."""
    varying: set[str] = set()
    total = 0
    for node in graph.nodes():
        if node.op == "input" or any(value.node in varying for value in graph.inputs(node.name).values()):
            varying.add(node.name)
        elif node.choice is not None and node.choice.target == "onednn":
            total += sum(map(_room, node.descs))
    return total


def _room(desc: MemoryDesc) -> int:
    return -(-desc.nbytes // ALIGNMENT) * ALIGNMENT
