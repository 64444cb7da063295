"""Quantization and dequantization become facts about real numbers: roundings, and constants on a grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmtprop.errors import GraphError, ScaleError, ShapeError
from fmtprop.ir import Graph, Grid, Node, TensorType, Value
from fmtprop.ir.deferred import SMALL_NBYTES, Deferred
from fmtprop.ir.tensors import materialise
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Dequantize, DynamicQuantize, FakeQuantize, Quantize
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.host_call import is_conversion
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, constant, insert, is_constant, new_constant
from fmtprop.passes.precision.mark_grids import LIMITS, grids_of, keeps_numbers, scale_and_zero, scales_and_zeros


@dataclass(frozen=True)
class PairQuantization(Pass):
    """Make a rounding of each pair of a quantization and a dequantization, and real constants of quantized ones.

    A rounding of numbers that lie on its grid already, such as one behind a pooling between two others, is removed.

    Requires a well-formed graph without formats. Quantizations of another scale, or of more than 8 bits, stay nodes. A
    dequantization is moved before views, maxima and concats of integers.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        quantized = [node for node in graph.nodes() if isinstance(node.attrs, Quantize | Dequantize)]
        if not quantized:
            return graph
        for node in quantized:
            _check_scales(graph, node)
        reals = _Reals(graph)
        for node in graph.nodes():
            if isinstance(node.attrs, Dequantize):
                _rewrite(graph, node, reals)
        graph.remove_dead()
        return _without_effectless(graph)


def _check_scales(graph: Graph, node: Node) -> None:
    """Refuse a scale that is no positive number."""
    scales = constant(graph, graph.inputs(node.name)["scale"])
    if scales is None:
        return
    wrong = ~((scales > 0) & scales.isfinite())
    if wrong.any():
        where = f" from {node.origin}" if node.origin else ""
        raise ScaleError(
            f"{node.label}{where}: its scale is {scales[wrong].flatten()[0].item()}, but must be positive and finite: "
            "quantize the model again with data that vary"
        )


def _rewrite(graph: Graph, node: Node, reals: _Reals) -> None:
    """Replace a dequantization."""
    source = graph.inputs(node.name)["src"]
    producer = graph.node(source.node)
    if isinstance(producer.attrs, Quantize):
        source = _quantized_constant(graph, producer, node) or source
    if is_constant(graph, source):
        _dequantize_constant(graph, node, source)
        return
    value = reals.of(source, node)
    if value is not None:
        bypass(graph, node, [value])


class _Reals:
    """The real numbers for which computed integers stand, made once for all their readers.

    Views, maxima and other ops that keep numbers give the integers of their sources, so real sources give real
    results.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[tuple[Value, float, int], Value] = {}

    def of(self, source: Value, dequantize: Node) -> Value | None:
        """Return real numbers without a dequantization; None if there are none."""
        found = scale_and_zero(self.graph, dequantize)
        if found is None:
            return None
        key = (source, *found)
        if key not in self._made:
            value = self._new(source, found, dequantize)
            if value is None:
                return None
            self._made[key] = value
        return self._made[key]

    def _new(self, source: Value, found: tuple[float, int], dequantize: Node) -> Value | None:
        producer, graph = self.graph.node(source.node), self.graph
        if producer.is_boundary:
            return None
        sources = graph.inputs(producer.name)
        if isinstance(producer.attrs, Quantize):
            rounding = _rounding(graph, producer, found)
            return None if rounding is None else insert(graph, dequantize, rounding, src=sources["src"])
        if graph.type_of(source).dtype not in LIMITS:
            return None
        if is_conversion(producer.attrs):
            whole = _unconverted(graph, producer, found)
            return self._moved(producer, dequantize) if whole is None else whole
        if not keeps_numbers(producer):
            return None
        parts = {name: self._part(value, dequantize) for name, value in sources.items()}
        return insert(graph, dequantize, producer.attrs, **parts)

    def _moved(self, conversion: Node, dequantize: Node) -> Value | None:
        """Return the real numbers of integers that an op moved as real ones, since PyTorch moves no others."""
        (value,) = self.graph.inputs(conversion.name).values()
        node = self.graph.node(value.node)
        sources = {} if node.is_boundary else self.graph.inputs(node.name)
        if sources.keys() != {"src"} or not keeps_numbers(node):
            return None
        widening = self.graph.node(sources["src"].node)
        if not is_conversion(widening.attrs):
            return None
        (source,) = self.graph.inputs(widening.name).values()
        if self.graph.type_of(source).dtype is not conversion.results[0].dtype:
            return None
        return insert(self.graph, dequantize, node.attrs, src=self._part(source, dequantize))

    def _part(self, source: Value, dequantize: Node) -> Value:
        """Return the real numbers of one source, by another dequantization if need be."""
        value = self.of(source, dequantize)
        if value is None:
            parameters = {name: one for name, one in self.graph.inputs(dequantize.name).items() if name != "src"}
            value = insert(self.graph, dequantize, Dequantize(), src=source, **parameters)
        return value


def _rounding(graph: Graph, quantize: Node, found: tuple[float, int]) -> FakeQuantize | None:
    """Return the attributes of a pair with one scale; None for any other pair."""
    attrs, source = quantize.attrs, graph.inputs(quantize.name)["src"]
    if not isinstance(attrs, Quantize) or graph.type_of(source).dtype is not DataType.F32:
        return None
    scale, zero = found
    if scale_and_zero(graph, quantize) != found or not attrs.low <= zero <= attrs.high:
        return None
    return FakeQuantize(scale, attrs.low - zero, attrs.high - zero)


def _unconverted(graph: Graph, conversion: Node, found: tuple[float, int]) -> Value | None:
    """Return the whole numbers (f32) that a conversion makes bytes of, which stand for them; None for any others."""
    (source,) = graph.inputs(conversion.name).values()
    attrs, (low, high) = graph.node(source.node).attrs, LIMITS[conversion.results[0].dtype]
    is_whole = isinstance(attrs, DynamicQuantize) and source.index == 0 and low <= attrs.low and attrs.high <= high
    return source if is_whole and found == (1.0, 0) else None


def _quantized_constant(graph: Graph, quantize: Node, reader: Node) -> Value | None:
    """Return the integers of a quantized constant, such as weights in training's form; None if it is computed."""
    tensors = {name: constant(graph, value) for name, value in graph.inputs(quantize.name).items()}
    known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if len(known) < len(tensors):
        return None
    return new_constant(graph, evaluate_node(quantize, known)[0], reader, quantize.origin)


def _dequantize_constant(graph: Graph, node: Node, source: Value) -> None:
    """Replace a dequantized constant by one of real numbers, which are made when they are packed."""
    parameters, type_ = scales_and_zeros(graph, node), graph.type_of(source)
    if parameters is None or type_.dtype not in LIMITS or not type_.size:
        return
    scales, zeros = parameters
    low, high = LIMITS[type_.dtype]
    shifts: tuple[int, ...] = ()
    if not (zeros == zeros[0]).all():
        shifts = tuple((low + 128 - zeros).tolist())
    zero = low + 128 if shifts else int(zeros[0])
    axis = node.attrs.axis if isinstance(node.attrs, Dequantize) else 0
    shape = tuple(size if place == axis else 1 for place, size in enumerate(type_.dims)) if len(scales) > 1 else ()
    try:
        grid = Grid(tuple(scales.tolist()), low - zero, high - zero, shape, shifts=shifts)
    except GraphError as error:
        raise ShapeError(f"{node.label}: {error}") from error
    inputs = graph.inputs(node.name)
    vectors = {name: constant(graph, one) for name, one in inputs.items() if name != "src"}
    tensors = {name: vector for name, vector in vectors.items() if vector is not None}
    data, real = graph.constants[source.node], TensorType(type_.dims, DataType.F32)

    def make() -> torch.Tensor:
        return evaluate_node(node, {"src": materialise(data, type_), **tensors})[0].contiguous()

    strides, same = MemoryDesc(real.dims, real.dtype).strides, ("dequantised", grid)
    later = Deferred(real, strides, make, fresh=True, largest=_largest(grid), source=(data, same))
    held = make() if real.nbytes <= SMALL_NBYTES else later
    bypass(graph, node, [new_constant(graph, held, node, node.origin, grid)])


def _largest(grid: Grid) -> float:
    """Return the largest magnitude of a grid's numbers."""
    return max(grid.scales) * (max(-grid.low, grid.high) + max(map(abs, grid.shifts), default=0))


def _without_effectless(graph: Graph) -> Graph:
    """Remove roundings of numbers on their own grid."""
    grids = grids_of(graph)
    for node in graph.nodes():
        if isinstance(node.attrs, FakeQuantize):
            source = graph.inputs(node.name)["src"]
            if grids.get(source) == grids.get(Value(node.name)) is not None:
                bypass(graph, node, [source])
    return graph
