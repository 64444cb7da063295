"""Quantization and dequantization become facts about real numbers: roundings, and constants on a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fmtprop.errors import GraphError, ShapeError
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import Node, Value
from fmtprop.ir.tensors import materialise
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.quantization import Dequantize, FakeQuantize, Quantize
from fmtprop.passes.editing import bypass, constant, insert, is_constant, new_constant
from fmtprop.passes.precision.mark_grids import grids_of

#: types of quantized numbers that fit into a byte, with their limits
_BYTES = {DataType.U8: (0, 255), DataType.S8: (-128, 127)}


@dataclass(frozen=True)
class PairQuantization:
    """Make a rounding of each pair of a quantization and a dequantization, and real constants of quantized ones.

    A rounding of numbers that lie on its grid already, such as one behind a pooling between two others, is removed.

    Notes
    -----
    Requires a well-formed graph without formats. Quantizations of another scale, or of more than 8 bits, stay nodes.
    """

    name: ClassVar[str] = "pair-quantization"

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        for node in graph.nodes():
            if isinstance(node.attrs, Quantize | Dequantize):
                _check_scales(graph, node)
        made: dict[tuple[Value, FakeQuantize], Value] = {}
        for node in graph.nodes():
            if isinstance(node.attrs, Dequantize):
                _rewrite(graph, node, made)
        graph.remove_dead()
        return _without_effectless(graph) if made else graph


def _check_scales(graph: Graph, node: Node) -> None:
    """Refuse a scale that is no positive number.

    Raises
    ------
    ShapeError
        One is 0, negative, infinite or NaN.
    """
    scales = constant(graph, graph.inputs(node.name)["scale"])
    if scales is None:
        return
    wrong = ~((scales > 0) & scales.isfinite())
    if wrong.any():
        raise ShapeError(
            f"{node.label}: its scale is {scales[wrong].flatten()[0].item()}, but must be positive and finite: "
            "quantize the model again with data that vary"
        )


def _rewrite(graph: Graph, node: Node, made: dict[tuple[Value, FakeQuantize], Value]) -> None:
    """Replace a dequantization."""
    source = graph.inputs(node.name)["src"]
    producer = graph.node(source.node)
    if is_constant(graph, source):
        _dequantize_constant(graph, node, source)
    elif isinstance(producer.attrs, Quantize):
        rounding = _rounding(graph, producer, node)
        if rounding is None:
            return
        src = graph.inputs(producer.name)["src"]
        if (src, rounding) not in made:
            made[src, rounding] = insert(graph, producer, rounding, src=src)
        bypass(graph, node, [made[src, rounding]])


def _rounding(graph: Graph, quantize: Node, dequantize: Node) -> FakeQuantize | None:
    """Return the attributes of a pair with one scale; None for any other pair."""
    attrs, source = quantize.attrs, graph.inputs(quantize.name)["src"]
    if not isinstance(attrs, Quantize) or graph.type_of(source).dtype is not DataType.F32:
        return None
    first, second = (_scale_and_zero(graph, node) for node in (quantize, dequantize))
    if first is None or first != second or not attrs.low <= first[1] <= attrs.high:
        return None
    scale, zero = first
    return FakeQuantize(scale, attrs.low - zero, attrs.high - zero)


def _scale_and_zero(graph: Graph, node: Node) -> tuple[float, int] | None:
    """Return the one scale and zero point of a node; None if it has several, or if they are computed."""
    found = _scales_and_zeros(graph, node)
    if found is None or found[0].numel() != 1:
        return None
    scales, zeros = found
    return float(scales.item()), int(zeros.item())


def _scales_and_zeros(graph: Graph, node: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    inputs = graph.inputs(node.name)
    scales = constant(graph, inputs["scale"])
    zeros = torch.zeros(1, dtype=torch.int64) if "zero_point" not in inputs else constant(graph, inputs["zero_point"])
    if scales is None or zeros is None:
        return None
    return scales.float().flatten(), zeros.to(torch.int64).flatten().expand(scales.numel())


def _dequantize_constant(graph: Graph, node: Node, source: Value) -> None:
    """Replace a dequantized constant by one of real numbers, which are made when they are packed."""
    parameters, type_ = _scales_and_zeros(graph, node), graph.type_of(source)
    if parameters is None or type_.dtype not in _BYTES or not type_.size:
        return
    scales, zeros = parameters
    if not (zeros == zeros[0]).all():
        return
    zero, (low, high) = int(zeros[0]), _BYTES[type_.dtype]
    axis = node.attrs.axis if isinstance(node.attrs, Dequantize) else 0
    shape = tuple(size if place == axis else 1 for place, size in enumerate(type_.dims)) if len(scales) > 1 else ()
    try:
        grid = Grid(tuple(scales.tolist()), low - zero, high - zero, shape)
    except GraphError as error:
        raise ShapeError(f"{node.label}: {error}") from error
    inputs = graph.inputs(node.name)
    vectors = {name: constant(graph, one) for name, one in inputs.items() if name != "src"}
    tensors = {name: vector for name, vector in vectors.items() if vector is not None}
    data, real = graph.constants[source.node], TensorType(type_.dims, DataType.F32)

    def make() -> torch.Tensor:
        return evaluate_node(node, {"src": materialise(data, type_), **tensors})[0].contiguous()

    later = Deferred(real, MemoryDesc(real.dims, real.dtype).strides, make, fresh=True, largest=_largest(grid))
    value = new_constant(graph, make() if real.nbytes <= SMALL_NBYTES else later, node, node.origin)
    graph.replace(graph.node(value.node).with_(grids={"dst": grid}))
    bypass(graph, node, [value])


def _largest(grid: Grid) -> float:
    """Return the largest magnitude of a grid's numbers."""
    return max(grid.scales) * max(-grid.low, grid.high)


def _without_effectless(graph: Graph) -> Graph:
    """Remove roundings of numbers on their own grid."""
    grids = grids_of(graph)
    for node in graph.nodes():
        if isinstance(node.attrs, FakeQuantize):
            source = graph.inputs(node.name)["src"]
            if grids.get(source) == grids.get(Value(node.name)) is not None:
                bypass(graph, node, [source])
    return graph
