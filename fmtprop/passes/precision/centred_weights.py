"""Products with quantized weights that have zero points, as those with signed bytes and sums of the source.

``(q - z) · s`` is ``k · s + d · s``, with signed bytes ``k`` and one number ``d`` for all weights of an output. Their
products with a window of the source are its sum, once for all outputs. oneDNN's convolutions read weights without zero
points; its matrix products know one for all of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from fmtprop.ir import Attrs, Graph, Grid, Node, Value, linear_of
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.tensors import materialise
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Conv, InnerProduct, MatMul
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, insert, new_constant
from fmtprop.passes.precision.in_bytes import in_bytes
from fmtprop.passes.precision.mark_grids import grids_of
from fmtprop.passes.target import Target, free_request

#: half of the numbers of a byte
_HALF = 128

#: fewest products of a result's number for which bytes save more than the correction takes. MNASNet-small (AVX-512 with
#: VNNI, one thread): 1.31 ms; 1.40 from 128 on, 1.99 with all layers, 1.46 with none
_LEAST_PRODUCTS = 256

#: the grid of a source that stands for any: what a primitive lacks for its zero point, other passes see to
_USUAL = Grid((1.0,), 0, 255)


@dataclass(frozen=True)
class CentredWeights(Pass):
    """Take zero points out of the weights of sums of products of bytes.

    Layers that sum few products stay in floats. Requires folded constants, and no post-ops.
    """

    #: whether it computes such a node in bytes, if it is known; otherwise all are rewritten
    target: Target | None = None
    #: fewest products of a number of the result
    least: int = _LEAST_PRODUCTS

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        found = grids_of(graph)
        shifted = {node.name: grid for node in graph.nodes() if (grid := _shifted(graph, node, found)) is not None}
        if not shifted:
            return graph
        graph = graph.copy()
        for name, grid in shifted.items():
            node = graph.node(name)
            if _products(graph, node) < self.least:
                continue
            centred = Grid(grid.scales, -_HALF, grid.high - grid.low - _HALF, grid.shape)
            if self._in_bytes(graph, node.with_(grids={"src": _USUAL, "weights": centred})):
                _rewrite(graph, node, grid, centred)
        graph.remove_dead()
        return graph

    def _in_bytes(self, graph: Graph, node: Node) -> bool:
        if self.target is None:
            return True
        types = {name: graph.type_of(value) for name, value in graph.inputs(node.name).items()}
        requests = in_bytes(node, free_request(node, types))
        return any(not way.is_ref for request in requests for way in self.target.candidates(node, request))


def _products(graph: Graph, node: Node) -> float:
    linear, inputs = linear_of(node), graph.inputs(node.name)
    assert linear is not None
    types = [graph.type_of(inputs["src"]), graph.type_of(inputs["weights"]), node.results[0]]
    return linear.products(*(type_.dims for type_ in types)) / max(types[-1].size, 1)


def _shifted(graph: Graph, node: Node, found: Mapping[Value, Grid]) -> Grid | None:
    """Return the grid of a node's weights, if they have zero points that its primitive does not take."""
    inputs = graph.inputs(node.name)
    if not isinstance(node.attrs, Conv | InnerProduct | MatMul) or inputs["src"] not in found:
        return None
    weights = graph.node(inputs["weights"].node)
    grid = weights.grids.get("dst") if weights.op == "constant" else None
    if grid is None or grid.shifts:
        return grid
    is_centred = grid.zero == 0 and grid.stored is DataType.S8
    of_rows = isinstance(node.attrs, MatMul) or prod(graph.type_of(inputs["src"]).dims[2:]) == 1
    return None if is_centred or (of_rows and not isinstance(node.attrs, Conv)) else grid


def _rewrite(graph: Graph, node: Node, grid: Grid, centred: Grid) -> None:
    """Replace a node."""
    attrs, inputs, linear = node.attrs, graph.inputs(node.name), linear_of(node)
    assert linear is not None
    type_, ndim = graph.type_of(inputs["weights"]), node.results[0].ndim
    per_output = linear.factor_dims(type_.dims, ndim)
    scales = torch.tensor(grid.scales, dtype=torch.float32).reshape(grid.shape or (1,) * type_.ndim)
    shifts = torch.tensor(grid.shifts or [grid.low - centred.low]).reshape(grid.shape if grid.shifts else ())
    factors = scales * shifts
    if any(size not in (1, wide) for size, wide in zip(factors.shape, per_output, strict=True)):
        return  # they vary within the weights of an output
    grouped = linear.channels_per_group(type_.dims, ndim) > 0
    single = tuple(
        1 if wide > 1 and (place or not grouped) else size
        for place, (size, wide) in enumerate(zip(type_.dims, per_output, strict=True))
    )
    outer: Attrs = Conv.make(len(attrs.strides), groups=attrs.groups) if isinstance(attrs, Conv) else attrs
    ones = new_constant(graph, torch.ones(single), node, node.origin, Grid((1.0,), -_HALF, _HALF - 1))
    sums = insert(graph, node, attrs, src=inputs["src"], weights=ones)
    wide = factors.expand(per_output).contiguous()
    if isinstance(attrs, InnerProduct):
        wide = wide.flatten(1)  # of sums without places
    rest = insert(graph, node, outer, src=sums, weights=new_constant(graph, wide, node, node.origin))
    weights = _centred(graph, node, inputs["weights"], shifts, scales, centred)
    alone = insert(graph, node, attrs, **{**inputs, "weights": weights})
    bypass(graph, node, [insert(graph, node, Binary("add"), src_0=alone, src_1=rest)])


def _centred(graph: Graph, node: Node, weights: Value, shifts: torch.Tensor, scales: torch.Tensor, grid: Grid) -> Value:
    type_, data = graph.type_of(weights), graph.constants[weights.node]

    def make() -> torch.Tensor:
        return (torch.round(materialise(data, type_) / scales) - shifts) * scales

    strides = MemoryDesc(type_.dims, type_.dtype).strides
    later = Deferred(type_, strides, make, fresh=True, largest=max(grid.scales) * _HALF)
    return new_constant(graph, make() if type_.nbytes <= SMALL_NBYTES else later, node, node.origin, grid)
