"""Marks of tensors whose numbers all lie on a grid: their nodes may read and write them as bytes.

Owns the analysis: where grids begin, and which ops keep them. Must not know which implementations compute with bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fmtprop.ir import Bytes, Category, Graph, Grid, linear_of, opdef, result_names
from fmtprop.ir.node import NO_GRIDS, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Dequantize, DynamicQuantize, FakeQuantize
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import constant, viewed_grid


@dataclass(frozen=True)
class MarkGrids(Pass):
    """Mark the operands and results of which all numbers lie on a grid.

    A grid begins at a rounding (a node or the last post-op) and at a quantized constant. Views keep it, and so do ops
    that give back numbers of their sources, such as maximum pooling, if these have the same grid.

    Requires a well-formed graph without formats. Replaces all earlier marks but those of constants.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the marked graph."""
        found = grids_of(graph)

        def marked(node: Node) -> Node:
            if node.op == "constant":
                grid = found.get(Value(node.name))
                return node.with_(grids={"dst": grid} if grid is not None else NO_GRIDS) if node.grids else node
            grids = _at(graph, node, found) if found and node.op != "input" else NO_GRIDS
            return node.with_(grids=grids) if grids or node.grids else node

        return graph.map_nodes(marked)


def grids_of(graph: Graph) -> dict[Value, Grid]:
    """Return the grid of each tensor that lies on one."""
    nodes = graph.nodes()
    found = _found(graph, nodes, frozenset())
    signed = {source for node in nodes for source in _second_factors(graph, node, found)}
    return _found(graph, nodes, signed) if signed else found


def _found(graph: Graph, nodes: list[Node], signed: Collection[Value]) -> dict[Value, Grid]:
    """Return the grid of each tensor; those of some values, and of all that have their numbers, are of signed bytes."""
    found: dict[Value, Grid] = {}
    for node in nodes:
        value = Value(node.name)
        grid = node.grids.get("dst") if node.op == "constant" else _grid(graph, node, found)
        if grid is not None and not grid.shifts:
            found[value] = replace(grid, signed=True) if value in signed else grid
    return found


def _second_factors(graph: Graph, node: Node, found: Mapping[Value, Grid]) -> Iterator[Value]:
    """Yield what makes a node's second factor, a rounding or a constant, if its bytes are unsigned.

    oneDNN takes signed ones.
    """
    inputs = {} if linear_of(node) is None else graph.inputs(node.name)
    values = [inputs["weights"]] if "weights" in inputs else []  # a gradient by weights has none
    while values:
        value = values.pop()
        producer = graph.node(value.node)
        if value not in found or found[value].stored is DataType.S8:
            continue
        if producer.is_boundary:
            yield value
        elif keeps_numbers(producer) and not producer.post_ops:
            values += graph.inputs(producer.name).values()
        else:
            yield value


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
    if isinstance(last, FakeQuantize | DynamicQuantize):
        return last.grid if last.high - last.low < 256 else None
    if node.post_ops or not keeps_numbers(node):
        return _of_integers(graph, node)
    declaration, sources = opdef(node.op), graph.inputs(node.name)
    if declaration.category is Category.VIEW:
        source = found.get(sources["src"])
        dims = graph.type_of(sources["src"]).dims
        return None if source is None else viewed_grid(source, dims, lambda src: evaluate_node(node, {"src": src})[0])
    grids = {found.get(value) for value in sources.values()}
    (grid, *others) = grids
    return None if others or grid is None or grid.varies else grid


def keeps_numbers(node: Node) -> bool:
    """Return whether each number of an op's result is one of its sources' numbers."""
    declaration = opdef(node.op)
    return declaration.category is Category.VIEW or declaration.numbers.bytes(node.attrs) is Bytes.MOVED


def is_rounded(graph: Graph, value: Value) -> bool:
    """Return whether a value is a rounding's result, or has numbers of such results alone."""
    node = graph.node(value.node)
    if node.is_boundary:
        return False
    if isinstance((node.post_ops[-1] if node.post_ops else node).attrs, FakeQuantize):
        return True
    sources = graph.inputs(node.name).values()
    return not node.post_ops and keeps_numbers(node) and all(is_rounded(graph, source) for source in sources)


#: limits of integers of a byte
LIMITS = {DataType.U8: (0, 255), DataType.S8: (-128, 127)}


def _of_integers(graph: Graph, node: Node) -> Grid | None:
    """Return the grid of dequantized bytes, such as the caller's, or those that a scale of the same run made."""
    if not isinstance(node.attrs, Dequantize) or node.post_ops:
        return None
    limits, found = LIMITS.get(graph.type_of(graph.inputs(node.name)["src"]).dtype), scale_and_zero(graph, node)
    if limits is None or found is None or not limits[0] <= found[1] <= limits[1]:
        return None
    scale, zero = found
    return Grid((scale,), limits[0] - zero, limits[1] - zero)


def scale_and_zero(graph: Graph, node: Node) -> tuple[float, int] | None:
    """Return the one scale and zero point of a node; None if it has several, or if they are computed."""
    found = scales_and_zeros(graph, node)
    if found is None or found[0].numel() != 1:
        return None
    scales, zeros = found
    return float(scales.item()), int(zeros.item())


def scales_and_zeros(graph: Graph, node: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the scales and the zero points of a quantization or dequantization; None if they are computed."""
    inputs = graph.inputs(node.name)
    scales = constant(graph, inputs["scale"])
    zeros = torch.zeros(1, dtype=torch.int64) if "zero_point" not in inputs else constant(graph, inputs["zero_point"])
    if scales is None or zeros is None:
        return None
    return scales.float().flatten(), zeros.to(torch.int64).flatten().expand(scales.numel())
