"""Element-wise nodes between two grids as one function by a table.

Owns the pattern: which nodes are together a function of one quantized tensor. Must not know whether the table pays: the
choice among plans decides.
"""

from __future__ import annotations

import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import NO_GRIDS, Node, Value
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.lookup import Lookup, numbers_of
from fmtprop.passes.editing import constant, is_constant
from fmtprop.passes.variants.depthwise_fusion import Fused

#: most nodes of a function: x · clip(x + 3, 0, 6) / 6, each with a rounding, are eight
_MOST_NODES = 8


def tabulated(graph: Graph, node: Node) -> Fused | None:
    """Return one node that looks the results of a few element-wise nodes up.

    Result: None if the node's result is on no grid, or if it is no function of one tensor on a grid. The pattern: all
    nodes are element-wise, their other operands are single numbers, and no other node reads what is between.
    """
    grid = _grid_of(graph, Value(node.name)) if _is_elementwise(node) else None
    if grid is None:
        return None
    covers, found = [node.name], _variables(graph, node)
    while found is not None and len(covers) <= _MOST_NODES:
        if len(found) == 1:
            (source,) = found
            read = _grid_of(graph, source)
            if read is not None and graph.type_of(source) == node.results[0]:
                attrs = Lookup.of(read, grid, _results(graph, covers, source, read))
                grids = {"src": read, "dst": grid}
                whole = Node(node.name, "lookup", attrs, node.results, origin=node.origin, grids=grids)
                return Fused(whole, {"src": source}, tuple(reversed(covers)))
        inner = next((value for value in found if _is_between(graph, value, node, covers)), None)
        if inner is None:
            return None
        covers.append(inner.node)
        more = _variables(graph, graph.node(inner.node))
        found = None if more is None else (found - {inner}) | more
    return None


def _is_elementwise(node: Node) -> bool:
    return not node.is_boundary and opdef(node.op).elementwise and len(node.results) == 1 and not node.exact


def _is_between(graph: Graph, value: Value, last: Node, covers: list[str]) -> bool:
    """Return whether an element-wise node makes a value that only covered nodes read."""
    node = graph.node(value.node)
    readers = {name for name, _ in graph.readers(value)}
    return _is_elementwise(node) and node.results == last.results and readers <= set(covers)


def _variables(graph: Graph, node: Node) -> set[Value] | None:
    """Return the operands of a node that are no single constant numbers; None if one is another constant."""
    values = set(graph.inputs(node.name).values())
    constants = {value for value in values if is_constant(graph, value)}
    return None if any(graph.type_of(value).size != 1 for value in constants) else values - constants


def _grid_of(graph: Graph, value: Value) -> Grid | None:
    """Return the grid of a value, with one scale."""
    node = graph.node(value.node)
    if node.is_boundary:
        return None
    grid = node.grids.get(result_names(node)[value.index])
    return None if grid is None or grid.varies else grid


def _results(graph: Graph, covers: list[str], source: Value, grid: Grid) -> torch.Tensor:
    """Return the results of nodes for all numbers of their source."""
    known = {source: numbers_of(grid).reshape((1,) * (graph.type_of(source).ndim - 1) + (-1,))}
    for name in reversed(covers):
        node, tensors = graph.node(name), dict[str, torch.Tensor]()
        for operand, value in graph.inputs(name).items():
            tensor = known.get(value)
            tensor = constant(graph, value) if tensor is None else tensor
            assert tensor is not None  # a single number
            tensors[operand] = tensor
        known[Value(name)] = evaluate_node(node.with_(grids=NO_GRIDS), tensors)[0]
    return known[Value(covers[0])]
