"""Quantization by the range of each row, as libraries write it out, becomes one op.

The pattern is the rounding: ``clip(round(src · 1/scale) + zero)``. How scale and zero come from the least and
the largest numbers, each library writes in its own way, so this is recognised by values, on ranges of all magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import torch

from fmtprop.ir import Graph, Node, Value, opdef
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Eltwise, Reduction, Reorder, Reshape
from fmtprop.ops.dynamic_quantization import DynamicQuantize, rounded
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.host_call import HostCall, arguments_of, is_conversion, is_elementwise
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, constant, insert, shown
from fmtprop.passes.precision.mark_grids import LIMITS

#: most nodes between the ranges and a scale or a zero; torchao's asymmetric rows have 11
_MOST_NODES = 24

#: most numbers of a constant that is looked at
_MOST_ROWS = 1 << 16

#: ranges that are tried: of both signs and of one, of all magnitudes
_TRIED = 64

#: relative difference of two equal scales: a factor in place of a divisor rounds elsewhere
_TOLERANCE = 2.0**-22


@dataclass(frozen=True)
class RecogniseDynamic(Pass):
    """Make one op of the quantization of rows, or of a tensor, by the range of its numbers.

    Requires a well-formed graph without formats. Runs before :class:`IntegerProducts`, which reads the whole numbers.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        found = {node.name: match for node in graph.nodes() if (match := _match(graph, node)) is not None}
        if not found and not any(isinstance(node.attrs, DynamicQuantize) for node in graph.nodes()):
            return graph
        graph = graph.copy()
        for name, match in found.items():
            node = graph.node(name)
            src = match.src
            if graph.type_of(src).dtype is not DataType.F32:
                src = insert(graph, node, Reorder("f32"), src=src)
            made = insert(graph, node, match.attrs, src=src)
            graph.replace_uses(Value(name), made)
            for value, index in match.same.items():
                result, dims = Value(made.node, index), graph.type_of(value).dims
                if graph.type_of(result).dims != dims:
                    result = insert(graph, node, Reshape(dims), src=result)
                graph.replace_uses(value, result)
        for node in graph.nodes():
            if is_conversion(node.attrs) and node.results[0].dtype is DataType.F32:
                _read_zeros(graph, node)
        graph.remove_dead()
        return graph


def _read_zeros(graph: Graph, conversion: Node) -> None:
    """Let the readers of zeros that became bytes and f32 again read them as they are."""
    (value,), dims = graph.inputs(conversion.name).values(), conversion.results[0].dims
    low, high = LIMITS.get(graph.type_of(value).dtype, (0, 0))
    node = shown(graph, value)
    if not is_conversion(node.attrs):
        return
    (value,) = graph.inputs(node.name).values()
    attrs = graph.node(value.node).attrs
    if isinstance(attrs, DynamicQuantize) and value.index == 2 and low <= attrs.low and attrs.high <= high:
        same = graph.type_of(value).dims == dims
        bypass(graph, conversion, [value if same else insert(graph, conversion, Reshape(dims), src=value)])


@dataclass(frozen=True)
class _Match:
    """The op for numbers of a source, and values that equal its scale (1) or its zero (2)."""

    attrs: DynamicQuantize
    src: Value
    same: Mapping[Value, int]


@dataclass(frozen=True)
class _Rounding:
    """``clip(round(src · factor) + zero, low, high)``; or the quotient."""

    src: Value
    factor: Value
    zero: Value | None
    multiplies: bool
    low: int
    high: int


def _match(graph: Graph, clip: Node) -> _Match | None:
    rounding = _rounding(graph, clip)
    if rounding is None:
        return None
    trials = _Trials(graph, rounding.src)
    factors = trials.of(rounding.factor)
    zeros = None if rounding.zero is None else trials.of(rounding.zero)
    if factors is None or trials.whole is None or (rounding.zero is not None and zeros is None):
        return None
    scales = 1 / factors.double() if rounding.multiplies else factors.double()
    symmetric = zeros is None or not zeros.any()
    low, high = trials.least.float().clamp(max=0), trials.largest.float().clamp(min=0)
    span = torch.maximum(-low, high) if symmetric else high - low
    divisor = float((2 * span / scales)[span > 1].mean().round() / 2) if (span > 1).any() else 0.0
    least = scales[span == 0].mean().item()
    if not (0 < divisor < inf and 0 <= least < inf):
        return None
    wide = replace(
        _op(rounding, trials),
        divisor=divisor,
        least=0.0 if least == 1 else least,
        symmetric=symmetric,
        rounds=graph.type_of(rounding.src).dtype is DataType.BF16,
    )
    _, scale, zero = rounded(wide, low, low, high)
    # as bytes, 0 / 0 is 0, and so it is if 0 is divided by 1
    used = scale if _are_bytes(graph, Value(clip.name)) and not least else scale.where(scale != 0, 1.0)
    if not _equal(used, scales) or (zeros is not None and not torch.equal(zero, zeros.float())):
        return None
    results = {1: scale, 2: zero}
    same = {
        value: index
        for value, numbers in trials.known.items()
        for index, result in results.items()
        if graph.type_of(value).dtype is DataType.F32 and numbers is not None and _equal(numbers, result)
        if not (index == 2 and symmetric)
    }
    return _Match(wide, rounding.src, same)


def _op(rounding: _Rounding, trials: _Trials) -> DynamicQuantize:
    return DynamicQuantize(
        rounding.low, rounding.high, 1.0, whole=trials.whole or False, multiplies=rounding.multiplies
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=_TOLERANCE, atol=0.0)


def _are_bytes(graph: Graph, value: Value) -> bool:
    """Return whether all readers of a value make bytes of it."""
    readers = [graph.node(name) for name, _ in graph.readers(value)]
    return all(is_conversion(node.attrs) and node.results[0].dtype in LIMITS for node in readers)


def _rounding(graph: Graph, clip: Node) -> _Rounding | None:
    """Return the pattern that ends in a node."""
    attrs = clip.attrs
    if not isinstance(attrs, Eltwise) or attrs.alg != "clip" or clip.results[0].dtype is not DataType.F32:
        return None
    low, high = attrs.alpha, attrs.beta
    if not low <= 0 <= high <= low + 255 or low % 1 or high % 1:
        return None
    (value,), zero = graph.inputs(clip.name).values(), None
    if _is_sum(graph.node(value.node)):
        first, *rest = graph.inputs(value.node).values()
        if len(rest) != 1:
            return None
        value, zero = (first, rest[0]) if _is_round(graph, first) else (rest[0], first)
    if not _is_round(graph, value):
        return None
    (quotient,) = graph.inputs(value.node).values()
    attrs, dims = graph.node(quotient.node).attrs, clip.results[0].dims
    if not isinstance(attrs, Binary) or attrs.alg not in ("mul", "div"):
        return None
    src, factor = graph.inputs(quotient.node).values()
    if attrs.alg == "mul" and graph.type_of(src).dims != dims:
        src, factor = factor, src
    if graph.type_of(src).dtype not in (DataType.F32, DataType.BF16):
        return None
    if graph.type_of(src).dims != dims or graph.type_of(factor).size == graph.type_of(src).size > 1:
        return None
    return _Rounding(src, factor, zero, attrs.alg == "mul", int(low), int(high))


def _is_sum(node: Node) -> bool:
    attrs = node.attrs
    if isinstance(attrs, HostCall):  # of numbers and integers
        return attrs.target == "aten.add.Tensor" and arguments_of(attrs)["alpha"] == 1
    return isinstance(attrs, Binary) and attrs.alg == "add"


def _is_round(graph: Graph, value: Value) -> bool:
    attrs = graph.node(value.node).attrs
    return isinstance(attrs, Eltwise) and attrs.alg == "round"


class _Trials:
    """Ranges of rows, and values that are computed from these alone.

    `known`: a number for each range; None if a value is no number a range. `whole`: whether ranges are those of the
    whole tensor; None before one was found.
    """

    def __init__(self, graph: Graph, src: Value) -> None:
        self._graph, self._src = graph, src
        drawn = torch.Generator().manual_seed(0)
        magnitudes = 10 ** (12 * torch.rand(2, _TRIED, generator=drawn) - 6)
        signs = torch.tensor([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]).repeat(_TRIED // 4, 1).t()
        self.least, self.largest = (signs * magnitudes).to(torch_dtype(graph.type_of(src).dtype)).aminmax(dim=0)
        self.known: dict[Value, torch.Tensor | None] = {}
        self.whole: bool | None = None

    def of(self, value: Value) -> torch.Tensor | None:
        """Return a value's number for each range; None if it depends on more than the range."""
        if value not in self.known:
            self.known[value] = None
            if len(self.known) <= _MOST_NODES:
                self.known[value] = self._new(value)
        return self.known[value]

    def _new(self, value: Value) -> torch.Tensor | None:
        graph, node = self._graph, self._graph.node(value.node)
        if node.op == "constant":
            tensor = constant(graph, value) if graph.type_of(value).size <= _MOST_ROWS else None
            same = tensor is not None and tensor.numel() and bool((tensor == tensor.flatten()[0]).all())
            return tensor.flatten()[:1].expand(_TRIED) if same and tensor is not None else None
        if node.is_boundary or value.index:
            return None
        if isinstance(node.attrs, Reduction):
            return self._range(node)
        sources = {name: self.of(one) for name, one in graph.inputs(node.name).items()}
        tensors = {name: numbers for name, numbers in sources.items() if numbers is not None}
        if len(tensors) < len(sources):
            return None
        if node.op == "reshape":
            return tensors["src"]
        is_known = opdef(node.op).elementwise or node.op == "reorder"
        if not (is_elementwise(node.attrs) if isinstance(node.attrs, HostCall) else is_known):
            return None
        return evaluate_node(node, tensors)[0]

    def _range(self, node: Node) -> torch.Tensor | None:
        """Return the numbers of a reduction of the source; None for any other."""
        attrs, (source,) = node.attrs, self._graph.inputs(node.name).values()
        magnitude = self._graph.node(source.node)
        of_magnitudes = isinstance(magnitude.attrs, Eltwise) and magnitude.attrs.alg == "abs"
        if of_magnitudes:
            (source,) = self._graph.inputs(magnitude.name).values()
        if not isinstance(attrs, Reduction) or source != self._src or attrs.alg not in ("min", "max"):
            return None
        ndim = self._graph.type_of(source).ndim
        whole = attrs.axes == tuple(range(ndim))
        if (not whole and attrs.axes != (ndim - 1,)) or self.whole not in (None, whole):
            return None
        self.whole = whole
        if of_magnitudes:
            return torch.maximum(-self.least, self.largest) if attrs.alg == "max" else None
        return self.least if attrs.alg == "min" else self.largest
