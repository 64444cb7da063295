"""Element-wise nodes between two grids as one function by a table.

Owns the pattern: which nodes are together a function of one quantized tensor. Must not know whether the table pays: the
choice among plans decides.
"""

from __future__ import annotations

import torch

from fmtprop.ir import Graph, Grid, opdef, result_names
from fmtprop.ir.node import NO_GRIDS, Node, Value
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.host_call import HostCall, is_elementwise
from fmtprop.ops.lookup import Lookup, numbers_of
from fmtprop.passes.editing import constant, is_constant
from fmtprop.passes.variants.depthwise_fusion import Fused

#: most nodes of a function: x · (1 + erf(x / sqrt(2))) / 2, each with a rounding, are ten
_MOST_NODES = 12


def tabulated(graph: Graph, node: Node) -> Fused | None:
    """Return one node that looks the results of element-wise nodes up: as many as make one function.

    Result: None if the node's result is on no grid, or if it is no function of one tensor on a grid. The pattern: all
    nodes are element-wise, their other operands are single numbers, and no other node reads what is between.
    """
    grid = _grid_of(graph, Value(node.name)) if _is_elementwise(node) else None
    if grid is None:
        return None
    covers, whole = [node.name], None
    outside = _variables(graph, node)
    while outside is not None and len(covers) <= _MOST_NODES:
        if len(outside) == 1:
            (source,) = outside
            if _grid_of(graph, source) is not None and graph.type_of(source) == node.results[0]:
                whole = source, tuple(covers)
        inner = [value for value in outside if _is_between(graph, value, node, covers)]
        if not inner:
            break
        latest = _latest(graph, inner)
        covers.append(latest.node)
        more = _variables(graph, graph.node(latest.node))
        outside = None if more is None else (outside - {latest}) | more
    return None if whole is None else _lookup(graph, node, grid, *whole)


def _lookup(graph: Graph, last: Node, grid: Grid, source: Value, covers: tuple[str, ...]) -> Fused:
    """Return the table of nodes, the last one first."""
    read = _grid_of(graph, source)
    assert read is not None
    attrs = Lookup.of(read, grid, _results(graph, covers, source, read))
    node = Node(last.name, "lookup", attrs, last.results, origin=last.origin, grids={"src": read, "dst": grid})
    return Fused(node, {"src": source}, covers[::-1])


def _is_elementwise(node: Node) -> bool:
    if node.is_boundary or len(node.results) != 1 or node.exact:
        return False
    return is_elementwise(node.attrs) if isinstance(node.attrs, HostCall) else opdef(node.op).elementwise


def _latest(graph: Graph, values: list[Value]) -> Value:
    """Return the value that is made last: none of the others is made of it."""
    if len(values) == 1:
        return values[0]
    rank = {node.name: index for index, node in enumerate(graph.nodes())}
    return max(values, key=lambda value: rank[value.node])


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


def _results(graph: Graph, covers: tuple[str, ...], source: Value, grid: Grid) -> torch.Tensor:
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
