"""Folding of per-channel scaling and shifting (mostly batch normalization) into the weights before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from fmtprop.ir import Graph, Grid, Linear, Node, Value, linear_of
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.tensors import is_fresh, materialise, torch_dtype
from fmtprop.ops import BatchNorm, Binary, Eltwise, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant, is_constant, new_constant, only_reader, scaled_grid

#: elements that are scaled at a time
_PIECE_ELEMENTS = 1 << 16

#: a factor without effect, and a summand
_ONE, _ZERO = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


@dataclass(frozen=True)
class FoldBatchNorm(NodePass):
    """Fold ``y = x * scale + shift`` per channel into the weights and bias of x's producer.

    Batch normalization with constant statistics; a binary add, sub, mul or div with a constant that has one element or
    one per channel; an eltwise ``linear``. The producer is a convolution, deconvolution, inner product or 2-D matmul
    with constant weights and bias, and x has no other reader. Between both may be a reshape that adds and removes axes
    of size 1 alone, as files of TensorFlow have behind a convolution of rows. New weights are computed in f64 and
    rounded once, on the grid that they were on; if a factor may make one infinite, nothing is folded.

    Requires folded constants: weights behind a view are not found. Ensures that no foldable node follows a producer.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        linear = linear_of(node)
        while linear is not None and _fold_reader(graph, graph.node(node.name), linear):
            pass


class Affine(NamedTuple):
    """Per-channel factor and summand in f64; one element if all channels share it."""

    scale: torch.Tensor
    shift: torch.Tensor


def _fold_reader(graph: Graph, producer: Node, linear: Linear) -> bool:
    """Fold the only reader of a producer into it; return whether this was possible."""
    value, axis = Value(producer.name), linear.output_axis(producer.results[0].ndim)
    reader = only_reader(graph, value)
    if reader is not None and isinstance(reader.attrs, Reshape):
        behind = _axis_behind(producer.results[0].dims, reader.results[0].dims, axis)
        if behind is None:
            return False
        value, axis = Value(reader.name), behind
        reader = only_reader(graph, value)
    if reader is None or producer.post_ops or reader.post_ops or reader.results != (graph.type_of(value),):
        return False
    affine = _affine(graph, reader, value, axis)
    if affine is None or not _scale_weights(graph, producer, linear, affine):
        return False
    bypass(graph, reader, [value])
    if not producer.origin:
        graph.replace(graph.node(producer.name).with_(origin=reader.origin))
    return True


def _axis_behind(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """Return where a reshape that adds and removes axes of size 1 alone puts an axis; None behind others."""
    axes, kept = ([place for place, size in enumerate(dims) if size != 1] for dims in (before, after))
    if axis not in axes or [before[place] for place in axes] != [after[place] for place in kept]:
        return None
    return kept[axes.index(axis)]


# ---------------------------------------------------------------- folding


def _affine(graph: Graph, node: Node, src: Value, axis: int) -> Affine | None:
    """Return a node as an affine function of ``src`` along an axis; None if it is not one with constants."""
    inputs = graph.inputs(node.name)
    if isinstance(node.attrs, Eltwise):
        if node.attrs.alg != "linear":
            return None
        return Affine(torch.tensor([node.attrs.alpha]).double(), torch.tensor([node.attrs.beta]).double())
    if isinstance(node.attrs, BatchNorm):
        return batch_norm_affine(graph, node.attrs, inputs) if inputs["src"] == src and axis == 1 else None
    if isinstance(node.attrs, Binary):
        return _binary(graph, node, inputs, src, axis)
    return None


def batch_norm_affine(graph: Graph, attrs: BatchNorm, inputs: dict[str, Value]) -> Affine | None:
    """Return a batch normalization as a function of each channel; None if its parameters are not constant."""
    vectors = {name: constant(graph, value) for name, value in inputs.items() if name != "src"}
    known = {name: tensor.double() for name, tensor in vectors.items() if tensor is not None}
    if len(known) != len(vectors):
        return None
    scale = torch.rsqrt(known["variance"] + attrs.epsilon)
    if "scale" in known:
        scale = scale * known["scale"]
    shift = -known["mean"] * scale
    return Affine(scale, shift + known["shift"] if "shift" in known else shift)


def _binary(graph: Graph, node: Node, inputs: dict[str, Value], src: Value, axis: int) -> Affine | None:
    first = inputs["src_0"] == src
    tensor = constant(graph, inputs["src_1" if first else "src_0"])
    dst = node.results[0]
    if tensor is None or tensor.ndim != dst.ndim or tensor.numel() not in (1, dst.dims[axis]):
        return None
    if tensor.shape[axis] != tensor.numel():
        return None
    vector, alg = tensor.double().reshape(-1), node.attrs.alg if isinstance(node.attrs, Binary) else ""
    if alg == "mul":
        return Affine(vector, _ZERO)
    if alg == "add":
        return Affine(_ONE, vector)
    if alg == "sub":
        return Affine(_ONE, -vector) if first else Affine(-_ONE, vector)
    return Affine(1 / vector, _ZERO) if alg == "div" and first else None


# ---------------------------------------------------------------- where it goes


def _scale_weights(graph: Graph, producer: Node, linear: Linear, affine: Affine) -> bool:
    """Give a producer new weights and a new bias; return False, without a change, if this is impossible."""
    if linear.roles != Linear.roles:  # a gradient, or the products are not the result
        return False
    inputs = graph.inputs(producer.name)
    type_ = graph.type_of(inputs["weights"])
    known = all(is_constant(graph, inputs[name]) for name in ("weights", "bias") if name in inputs)
    if not known or not type_.dtype.is_floating:
        return False
    dst, bias = producer.results[0], constant(graph, inputs["bias"]) if "bias" in inputs else None
    if bias is not None and bias.numel() != bias.shape[-1]:
        return False  # for a product, a factor along another axis than the outputs
    channels = dst.dims[linear.output_axis(dst.ndim)]
    scale, shift = affine.scale.expand(channels), affine.shift.expand(channels)
    old_bias = torch.zeros(channels, dtype=torch.float64) if bias is None else bias.double().reshape(-1)
    dtype = torch_dtype(type_.dtype)
    new_bias = (old_bias * scale + shift).to(dtype if bias is None else bias.dtype)
    source = graph.node(inputs["weights"].node)
    data = graph.constants[source.name]
    weights = data if isinstance(data, Deferred) else materialise(data, type_).detach()
    factor = _largest(scale)
    # factors up to 1 make no number infinite, so none is read
    largest = getattr(weights, "largest", None) if factor <= 1 else _largest(weights)
    # a bound: the largest number and the largest factor may be in different rows
    bound = factor if largest is None else largest * factor
    if not (bound <= torch.finfo(dtype).max and new_bias.isfinite().all()):
        return False
    new_bias = new_bias.reshape(linear.bias_dims(channels, dst.ndim))
    if scale.ne(1).any():  # a bias alone leaves the weights as they are
        rows = scale.reshape(linear.factor_dims(type_.dims, dst.ndim))
        scaled = partial(_scaled, rows=rows, in_place=is_fresh(data))
        made: torch.Tensor | Deferred
        if isinstance(weights, Deferred):
            identity = "scaled", tuple(rows.shape), rows.numpy().tobytes()
            made = weights.then(scaled, identity=identity, fresh=True, largest=None if largest is None else bound)
        else:
            made = scaled(weights)
        grid = _scaled_grid(source.grids["dst"], rows, made) if source.grids else None
        inputs["weights"] = new_constant(graph, made, producer, source.origin, grid)
    inputs["bias"] = new_constant(graph, new_bias, producer, source.origin)
    graph.set_inputs(producer.name, inputs)
    return True


def _scaled_grid(grid: Grid, rows: torch.Tensor, made: torch.Tensor | Deferred) -> Grid | None:
    """Return the grid of scaled weights; None if a factor is 0, or turns a number's sign that the grid lacks."""
    if not rows.abs().float().gt(0).all() or not rows.isfinite().all():
        return None
    grid = scaled_grid(grid, rows.abs())
    if (rows > 0).all():
        return grid
    limit = min(-grid.low, grid.high)
    if grid.shifts or limit < max(-grid.low, grid.high) - 1:
        return None
    numbers = made.make() if isinstance(made, Deferred) else made
    steps = numbers.double() / torch.tensor(grid.scales, dtype=torch.float64).reshape(grid.shape)
    return replace(grid, low=-limit, high=limit) if steps.abs().max() < limit + 0.5 else None


def _largest(numbers: torch.Tensor | Deferred) -> float:
    """Return a bound of the numbers' magnitudes; NaN if a number is NaN."""
    if isinstance(numbers, Deferred):
        return _largest(numbers.make()) if numbers.largest is None else numbers.largest
    if not numbers.numel():
        return 0.0
    low, high = torch.aminmax(numbers)
    return max(-low.item(), high.item())


def _scaled(weights: torch.Tensor, rows: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Multiply in f64 and round once; in pieces, so that PyTorch's f64 copies stay in cache."""
    out = weights if in_place else torch.empty_like(weights)
    count = max(1, _PIECE_ELEMENTS * weights.shape[0] // max(weights.numel(), 1))
    factors = rows.expand(weights.shape[0], *rows.shape[1:])
    pieces = (torch.split(tensor, count) for tensor in (weights, factors, out))
    for part, factor, result in zip(*pieces, strict=True):
        torch.mul(part, factor, out=result)
    return out
