"""Marks of tensors whose numbers all lie on a grid: their nodes may read and write them as bytes.

Owns the analysis: where grids begin, and which ops keep them. Must not know which implementations compute with bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fmtprop.ir.facets import Bytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import NO_GRIDS, Node, Value
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.ports import result_names
from fmtprop.layout import DataType
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.editing import viewed_grid


@dataclass(frozen=True)
class MarkGrids:
    """Mark the operands and results of which all numbers lie on a grid.

    A grid begins at a rounding (a node or the last post-op) and at a quantized constant. Views keep it, and so do ops
    that give back numbers of their sources, such as maximum pooling, if these have the same grid.

    Notes
    -----
    Requires a well-formed graph without formats. Replaces all earlier marks but those of constants.
    """

    name: ClassVar[str] = "mark-grids"

    def run(self, graph: Graph) -> Graph:
        """Return the marked graph."""
        found = grids_of(graph)

        def marked(node: Node) -> Node:
            if node.op == "constant":
                return node
            grids = _at(graph, node, found) if found and node.op != "input" else NO_GRIDS
            return node.with_(grids=grids) if grids or node.grids else node

        return graph.map_nodes(marked)


def grids_of(graph: Graph) -> dict[Value, Grid]:
    """Return the grid of each tensor that lies on one."""
    found: dict[Value, Grid] = {}
    for node in graph.nodes():
        grid = node.grids.get("dst") if node.op == "constant" else _grid(graph, node, found)
        if grid is not None:
            found[Value(node.name)] = grid
    return found


def _at(graph: Graph, node: Node, found: Mapping[Value, Grid]) -> Mapping[str, Grid]:
    """Return the grids of a node's operands and results by name."""
    results = () if node.is_boundary else result_names(node)
    ports = {**graph.inputs(node.name), **{name: Value(node.name, index) for index, name in enumerate(results)}}
    return {name: found[value] for name, value in ports.items() if value in found} or NO_GRIDS


def _grid(graph: Graph, node: Node, found: Mapping[Value, Grid]) -> Grid | None:
    """Return the grid of a node's first result; None without one."""
    if node.is_boundary or node.results[0].dtype is not DataType.F32:
        return None
    last = node.post_ops[-1].attrs if node.post_ops else node.attrs
    if isinstance(last, FakeQuantize):
        return last.grid if last.high - last.low < 256 else None
    if node.post_ops:
        return None
    declaration, sources = opdef(node.op), graph.inputs(node.name)
    if declaration.category is Category.VIEW:
        source = found.get(sources["src"])
        dims = graph.type_of(sources["src"]).dims
        return None if source is None else viewed_grid(source, dims, lambda src: evaluate_node(node, {"src": src})[0])
    if declaration.bytes(node.attrs) is not Bytes.MOVED:
        return None
    grids = {found.get(value) for value in sources.values()}
    (grid, *others) = grids
    return None if others or grid is None or grid.varies else grid
