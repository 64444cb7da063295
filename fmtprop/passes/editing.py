"""Helpers of several rewrites: reading constants, replacing a node, finding a value's only reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from fmtprop.ir import Attrs, Graph, Grid, Node, Value
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.node import NO_GRIDS
from fmtprop.ir.op import Category, op_of, opdef
from fmtprop.ir.tensors import materialise, tensor_type, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops import Eltwise, Reorder, Slice, emit


def is_constant(graph: Graph, value: Value) -> bool:
    """Return whether a value is a constant of the graph."""
    return graph.node(value.node).op == "constant"


def constant(graph: Graph, value: Value) -> torch.Tensor | None:
    """Return the tensor behind a constant value, None where the value is computed; no gradient flows to it."""
    node = graph.node(value.node)
    return materialise(graph.constants[node.name], node.results[0]).detach() if node.op == "constant" else None


def insert(graph: Graph, before: Node, attrs: Attrs, **inputs: Value) -> Value:
    """Add a node of the op that has such attributes right before another node, with its origin; return its result."""
    return emit(graph, op_of(attrs), inputs, attrs, origin=before.origin, before=before.name)


def window(graph: Graph, before: Node, value: Value, axis: int, start: int, size: int) -> Value:
    """Return a window along one axis of a value, by a new node; the value itself if it is the whole axis."""
    dims = graph.type_of(value).dims
    return value if size == dims[axis] else insert(graph, before, Slice.along(dims, axis, start, size), src=value)


def new_constant(
    graph: Graph, data: torch.Tensor | Deferred, before: Node, origin: str = "", grid: Grid | None = None
) -> Value:
    """Add a constant right before a node, so that the order of execution is kept; its numbers may lie on a grid."""
    type_ = data.type_ if isinstance(data, Deferred) else tensor_type(data)
    node = Node(graph.fresh_name(f"{before.name}_constant"), "constant", Attrs(), (type_,), origin=origin)
    grids = NO_GRIDS if grid is None else {"dst": grid}
    (value,) = graph.insert(node.with_(grids=grids), {}, before=before.name)
    graph.constants[value.node] = data
    return value


def viewed_constant(
    graph: Graph, value: Value, view: Callable[[torch.Tensor], torch.Tensor], before: Node, origin: str
) -> Value:
    """Add a view of a constant: it shares the constant's memory, or is deferred like the constant."""
    node, data = graph.node(value.node), graph.constants[value.node]
    grid = viewed_grid(node.grids["dst"], node.results[0].dims, view) if node.grids else None
    if isinstance(data, Deferred):
        dtype = torch_dtype(data.type_.dtype)
        shown = view(torch.empty_strided(data.shape, data.stride(), dtype=dtype, device="meta"))
        return new_constant(graph, data.viewed(view, tensor_type(shown), shown.stride()), before, origin, grid)
    return new_constant(graph, view(materialise(data, node.results[0])), before, origin, grid)


def widened(graph: Graph, value: Value, before: Node) -> Value:
    """Return a value in f32, by a conversion that is there or a new one."""
    if graph.type_of(value).dtype is DataType.F32:
        return value
    for name, _ in graph.readers(value):
        if graph.node(name).attrs == Reorder(DataType.F32.value):
            return Value(name)
    return insert(graph, before, Reorder(DataType.F32.value), src=value)


def viewed_grid(grid: Grid, dims: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]) -> Grid | None:
    """Return the grid of a view of a tensor; None if it would need a scale for each number of an axis that it joins."""
    if not grid.varies:
        return Grid(grid.scales, grid.low, grid.high, signed=grid.signed)
    scales = view(torch.tensor(grid.scales, dtype=torch.float64).reshape(grid.shape).expand(dims))
    constant_along = [stride == 0 or size == 1 for stride, size in zip(scales.stride(), scales.shape, strict=True)]
    shape = tuple(1 if same else size for same, size in zip(constant_along, scales.shape, strict=True))
    if prod(shape) > len(grid.scales):
        return None
    kept = tuple(slice(0, 1) if same else slice(None) for same in constant_along)
    shifts: tuple[int, ...] = ()
    if grid.shifts:
        shifts = tuple(view(torch.tensor(grid.shifts).reshape(grid.shape).expand(dims))[kept].flatten().tolist())
    return Grid(tuple(scales[kept].flatten().tolist()), grid.low, grid.high, shape, grid.signed, shifts)


def scaled_grid(grid: Grid, factors: torch.Tensor) -> Grid:
    """Return the grid of numbers that positive factors multiply, of the rank of the tensor."""
    own = grid.shape or (1,) * factors.ndim
    scales = (torch.tensor(grid.scales, dtype=torch.float64).reshape(own) * factors).float()
    shifts = torch.tensor(grid.shifts).reshape(own).expand(scales.shape).flatten().tolist() if grid.shifts else ()
    return replace(grid, scales=tuple(scales.flatten().tolist()), shape=tuple(scales.shape), shifts=tuple(shifts))


def unused_name(stem: str, out: Graph, source: Graph) -> str:
    """Return an unused name for a new node of graph `out`, which no node of graph `source` has either."""
    while True:
        name = out.fresh_name(stem)
        if name not in source:
            return name


def only_reader(graph: Graph, value: Value) -> Node | None:
    """Return the only node that reads a value; None if there are several, or if it reads the value twice."""
    return graph.node(graph.readers(value)[0][0]) if graph.reader_count(value) == 1 else None


def own_producer(graph: Graph, value: Value) -> Node | None:
    """Return the node that makes a value; None if the value has several readers, or comes from the caller."""
    node = graph.node(value.node)
    return None if node.is_boundary or only_reader(graph, value) is None else node


def source_of(graph: Graph, node: Node | None, op: str = "") -> Node | None:
    """Return the node that makes another node's source, of which it is the only reader; None for other nodes.

    `node`: the reader; None for the end of a chain that is another one.
    """
    if node is None or (op and node.op != op):
        return None
    return own_producer(graph, graph.inputs(node.name)["src"])


def is_square(graph: Graph, node: Node, src: Value) -> bool:
    """Return whether a node computes the squares of a value, however a model writes them."""
    attrs = node.attrs
    is_power = isinstance(attrs, Eltwise) and (attrs.alg, attrs.alpha, attrs.beta) == ("pow", 1.0, 2.0)
    named = (node.op, getattr(attrs, "alg", "")) in (("binary", "mul"), ("eltwise", "square"))
    return set(graph.inputs(node.name).values()) == {src} and (named or is_power)


def shown(graph: Graph, value: Value) -> Node:
    """Return the node of which a value shows the numbers, directly or through views."""
    node = graph.node(value.node)
    while not node.is_boundary and opdef(node.op).category is Category.VIEW:
        node = graph.node(graph.inputs(node.name)["src"].node)
    return node


def way_from_compute(graph: Graph, value: Value) -> list[Node]:
    """Return a value's compute-intensive op and the views between, if these can write f32: nothing else reads them."""
    path: list[Node] = []
    while graph.reader_count(value) == 1 and value.index == 0:
        node = graph.node(value.node)
        path.append(node)
        category = None if node.is_boundary else opdef(node.op).category
        if category is Category.COMPUTE:
            # a sum adds into the residual's own buffer, which has the narrow type; so has the state of a layer
            return path if node.residual is None and len(node.results) == 1 else []
        if category is not Category.VIEW:
            return []
        value = graph.inputs(node.name)["src"]
    return []


def bypass(graph: Graph, node: Node, values: Sequence[Value]) -> None:
    """Make the readers of a node's results read other values instead, and remove the node."""
    for index, value in enumerate(values):
        graph.replace_uses(Value(node.name, index), value)
    graph.remove(node.name)
