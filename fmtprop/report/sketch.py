"""The plan's graph and memory for pictures: nodes with places, edges with formats, buffers with lifetimes.

Owns the places of nodes: layers of equal distance from the inputs, in columns from left to right. The nodes are the
formatted graph's without constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt

from fmtprop.ir import Graph, Node
from fmtprop.passes.assignment.formats import describe
from fmtprop.runtime.plan import Home, Plan

#: width over height of the picture, in nodes
_ASPECT = 1.6
#: layers that a column has room for, at least
_LAYERS = 12


@dataclass(frozen=True)
class NodeRow:
    """A node that a run executes, or an input or output.

    Parameters
    ----------
    name, op, impl, target, origin : str
        As in a step; views have no implementation.
    format : str
        Format of its first result, or of an output's operand.
    x, y : float
        Place in the picture, in nodes.
    computes_in : str
        Data type of its first source.
    """

    name: str
    op: str
    impl: str
    target: str
    origin: str
    format: str
    x: float
    y: float
    computes_in: str = ""


@dataclass(frozen=True)
class EdgeRow:
    """A tensor between its producer and one reader.

    Parameters
    ----------
    producer, reader, operand : str
        The nodes that write and read it, and the reader's operand.
    format : str
        Its format in memory.
    nbytes : int
        Its size in this format.
    """

    producer: str
    reader: str
    operand: str
    format: str
    nbytes: int


@dataclass(frozen=True)
class BufferRow:
    """A range of the arena.

    Parameters
    ----------
    offset_nbytes, nbytes : int
        Its offset in the arena, and its size.
    first_step, last_step : int
        The first and the last step of its lifetime.
    """

    offset_nbytes: int
    nbytes: int
    first_step: int
    last_step: int


def nodes_of(graph: Graph) -> tuple[NodeRow, ...]:
    """Return the nodes of a formatted graph that depend on an input."""
    nodes = computed(graph)
    found = places(graph, nodes)
    return tuple(_node_row(graph, node, *found[node.name]) for node in nodes.values())


def edges_of(graph: Graph) -> tuple[EdgeRow, ...]:
    """Return the tensors between these nodes."""
    nodes = computed(graph)
    return tuple(
        EdgeRow(value.node, name, operand, describe(graph.desc_of(value)), graph.desc_of(value).nbytes)
        for name in nodes
        for operand, value in graph.inputs(name).items()
        if value.node in nodes
    )


def buffers_of(plan: Plan) -> tuple[BufferRow, ...]:
    """Return the arena's buffers, sorted by their first steps."""
    arena = [buffer for buffer in plan.buffers if buffer.home is Home.ARENA and buffer.nbytes]
    rows = [BufferRow(buffer.offset, buffer.nbytes, buffer.first, buffer.last) for buffer in arena]
    return tuple(sorted(rows, key=lambda row: (row.first_step, row.offset_nbytes)))


def computed(graph: Graph) -> dict[str, Node]:
    """Return the inputs, and the nodes that depend on one: no constants, and nothing that is packed once."""
    dependent = graph.dependents()
    return {node.name: node for node in graph.nodes() if node.op == "input" or node.name in dependent}


def _node_row(graph: Graph, node: Node, x: float, y: float) -> NodeRow:
    choice = node.choice
    desc = node.descs[0] if node.descs else graph.desc_of(graph.inputs(node.name)["src"])
    impl, target = (choice.impl, choice.target) if choice is not None else ("", "")
    return NodeRow(node.name, op_with_tail(node), impl, target, node.origin, describe(desc), x, y, computes_in(node))


def op_with_tail(node: Node) -> str:
    """Return the op and its fused tail, ``convolution+sum+relu``, or the function that is called, ``aten.sort``."""
    call = ".".join(getattr(node.attrs, "target", "").split(".")[:2])
    names = [call or (node.op if node.op != "eltwise" else getattr(node.attrs, "alg", node.op))]
    names += [getattr(p.attrs, "alg", p.op) if p.op != "sum" else "sum" for p in node.post_ops]
    return "+".join(names)


def computes_in(node: Node) -> str:
    """Return the data type of the first source that a formatted node reads; of its result if it reads none."""
    read = node.choice.operands if node.choice is not None else {}
    for desc in (*read.values(), *node.descs):
        return str(desc.dtype)
    return ""


def places(graph: Graph, nodes: Mapping[str, Node]) -> dict[str, tuple[float, float]]:
    """Return each node's place. Layers follow each other downwards; the next column begins after a full one."""
    layers: list[list[str]] = []
    depth: dict[str, int] = {}
    for name in nodes:
        before = [depth[value.node] for value in graph.inputs(name).values() if value.node in depth]
        depth[name] = max(before, default=-1) + 1
        if depth[name] == len(layers):
            layers.append([])
        layers[depth[name]].append(name)
    width = max(map(len, layers), default=1)
    columns = max(1, round(len(layers) / max(_LAYERS, sqrt(len(layers) * width / _ASPECT))))
    height = max(1, ceil(len(layers) / columns))  # a graph may have no nodes
    found: dict[str, tuple[float, float]] = {}
    left = 0.0
    for start in range(0, len(layers), height):
        column = layers[start : start + height]
        room = max(map(len, column))
        for row, names in enumerate(column):
            names = sorted(names, key=lambda name: _above(graph, name, found))
            for index, name in enumerate(names):
                found[name] = (left + (room - len(names)) / 2 + index, float(row))
        left += room + 1
    return found


def _above(graph: Graph, name: str, places: Mapping[str, tuple[float, float]]) -> float:
    """Return the mean place of a node's sources, so a node is drawn below them."""
    found = [places[value.node][0] for value in graph.inputs(name).values() if value.node in places]
    return sum(found) / len(found) if found else 0.0
