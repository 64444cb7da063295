"""Tensors that are made inside other tensors' buffers: sources of concats in place, and residuals of their sums.

Owns this decision, which is made from the formatted graph before any buffer is placed. The builder and the arena place
the buffers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from fmtprop.errors import PlanError
from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.aliasing import is_in_place, overwrite_hazard, parts_of, storage
from fmtprop.targets.executable import implementation


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
