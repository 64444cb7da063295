"""Random quantized graphs, and the rule for each of their layers.

A layer reads rounded tensors, computes, and rounds its result to a grid of its own. All rounded tensors are results of
the graph, so each layer can be evaluated on the operands that the plan itself had: a number may differ from the exact
one by a step only if it lies in the middle between two, as far as f32 can tell.

    python -m tests.models.fuzz_quantized 0:2000
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops import (
    Binary,
    Concat,
    Conv,
    Deconv,
    Dequantize,
    Eltwise,
    InnerProduct,
    LayerNorm,
    MatMul,
    Permute,
    Pooling,
    Quantize,
    Reduction,
    Resampling,
    Reshape,
    RmsNorm,
    Shuffle,
    Softmax,
    emit,
)
from fmtprop.ops.host_call import host_call

#: error of f32 relative to the sum of the magnitudes that a number is made of
EPSILON = 4e-6

#: limits of the integers of each type
LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of a rounding, as they broadcast to its numbers, and the least and largest integer."""

    scale: torch.Tensor
    zero: torch.Tensor
    low: int
    high: int

    def off(self, got: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Return which results are no rounding of the exact numbers, up to an error of those."""
        scale = self.scale.double()
        steps, off = got.double() / scale, error / scale + 1e-5
        ends = [((exact / scale) + sign * off).round() for sign in (-1, 1)]
        low, high = (one.maximum(self.low - self.zero).minimum(self.high - self.zero) for one in ends)
        return (steps < low - 1e-3) | (steps > high + 1e-3)


@dataclass(frozen=True)
class Layer:
    """A layer: the places of its operands, its meaning in f64, and its grid."""

    name: str
    reads: tuple[int, ...]
    run: Callable[..., torch.Tensor]
    grid: Grid
    #: from the operands to the magnitude of what a result is made of, if not that of the results
    size: Callable[..., float | torch.Tensor] | None = None


class Drawn:
    """A random graph.

    Attributes
    ----------
    graph : Graph
        Its results are those of all layers.
    layers : list of Layer
        The first one rounds the input.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.graph, self.layers, self.values = Graph(f"quantized_{seed}"), list[Layer](), list[Value]()
        batch = self.random.choice([1, 1, 2, 3, 0])
        self.dims = (batch, self.random.choice([1, 3, 16, 17, 32]), *[self.random.randint(3, 12)] * 2)
        if self.random.random() < 0.2:  # rows of some vectors
            self.dims = (*self.dims[:3], self.random.randint(13, 70))
        spread = 10 ** self.random.uniform(-3, 2)
        self.x = torch.randn(self.dims, generator=self.numbers) * spread
        self._rounded("input", self.graph.input("x", TensorType(self.dims)), (), lambda x: x, spread * 3)
        for _ in range(self.random.randint(1, 6)):
            self.random.choice(LAYERS)(self)

    def held(self, data: torch.Tensor) -> Value:
        return self.graph.constant(self.graph.fresh_name("c"), tensor_type(data), data)

    def _rounded(
        self,
        name: str,
        value: Value,
        reads: tuple[int, ...],
        run: Callable[..., torch.Tensor],
        size: float,
        error: Callable[..., float | torch.Tensor] | None = None,
    ) -> None:
        """Round a value to a random grid for numbers up to a size, to an operand's, or to one that does not fit."""
        self.layers.append(Layer(name, reads, run, self._grid(self.graph.type_of(value).dims, reads, size), error))
        grid = self.layers[-1].grid
        dtype = torch.int8 if grid.low < 0 else torch.uint8
        zero = grid.zero.to(self.random.choice([dtype, torch.int64]))  # ONNX's, or PyTorch's
        inputs = {"scale": self.held(grid.scale.squeeze()), "zero_point": self.held(zero.squeeze())}
        kind, axis = "u8" if dtype is torch.uint8 else "s8", min(1, grid.scale.ndim)
        stored = emit(self.graph, "quantize", {"src": value, **inputs}, Quantize(kind, grid.low, grid.high, axis))
        self.values.append(emit(self.graph, "dequantize", {"src": stored, **inputs}, Dequantize(axis)))
        again = self.random.random() < 0.2  # each reader has a dequantization of its own
        shown = emit(self.graph, "dequantize", {"src": stored, **inputs}, Dequantize(axis)) if again else None
        self.graph.output(shown or self.values[-1])

    def _grid(self, dims: tuple[int, ...], reads: tuple[int, ...], size: float) -> Grid:
        same = self.layers[reads[0]].grid if reads else None
        if same is not None and same.scale.ndim == 0 and self.random.random() < 0.15:
            return same
        varies = len(dims) > 1 and dims[1] > 1 and self.random.random() < 0.25
        shape = [dims[1] if place == 1 else 1 for place in range(len(dims))] if varies else []
        fits = self.random.random() < 0.8
        scale = size / 128 * self.random.uniform(0.3, 1.5) if fits else 10 ** self.random.uniform(-6, 3)
        scales = (
            torch.full(shape, scale) * 10 ** (torch.rand(shape, generator=self.numbers) - 1)
            if varies
            else torch.tensor(scale)
        )
        low, high = self.random.choice([(0, 255), (-128, 127), (0, 255), (-128, 127), (0, 127), (-127, 127), (-64, 63)])
        zero = self.random.choice([low, high, 0, (low + high + 1) // 2, self.random.randint(low, high)])
        zeros = torch.full(shape, zero)
        if varies and self.random.random() < 0.3:
            zeros = torch.randint(low, high + 1, shape, generator=self.numbers)
        return Grid(scales.clamp(1e-6, 1e3), zeros, low, high)

    def add(
        self,
        name: str,
        value: Value,
        reads: tuple[int, ...],
        run: Callable[..., torch.Tensor],
        error: Callable[..., float | torch.Tensor] | None = None,
    ) -> None:
        """Add a layer; a ReLU may come before its rounding."""
        if self.random.random() < 0.3:
            value, inner = emit(self.graph, "eltwise", {"src": value}, Eltwise("relu")), run
            run = lambda *tensors: inner(*tensors).relu()  # noqa: E731
        tensors = [self._example(place) for place in reads]
        size = run(*tensors).abs().max().item() if all(one.numel() for one in tensors) else 1.0
        self._rounded(name, value, reads, run, size or 1.0, error)

    def _example(self, place: int) -> torch.Tensor:
        """Return numbers of a layer's grid."""
        dims, grid = self.graph.type_of(self.values[place]).dims, self.layers[place].grid
        numbers = torch.randint(grid.low, grid.high + 1, dims, generator=self.numbers)
        return (numbers - grid.zero).double() * grid.scale

    def place(self, ndim: int = 0) -> int | None:
        """Return a random tensor, of a number of dimensions if it is given."""
        found = [p for p, value in enumerate(self.values) if ndim in (0, self.graph.type_of(value).ndim)]
        return self.random.choice(found[-3:]) if found else None

    def weights(self, dims: tuple[int, ...], axis: int) -> tuple[Value, torch.Tensor]:
        """Return weights of full-range integers, with one scale and zero point or one for each output."""
        count = dims[axis] if self.random.random() < 0.7 else 1
        dtype = self.random.choice([torch.int8, torch.int8, torch.uint8])
        low, high = LIMITS[dtype]
        numbers = torch.randint(low, high + 1, dims, dtype=dtype, generator=self.numbers)
        scale = 10 ** self.random.uniform(-4, 0) * (0.5 + torch.rand(count, generator=self.numbers))
        inputs = {"src": self.held(numbers), "scale": self.held(scale if count > 1 else scale[0])}
        zeros = torch.zeros(count)
        if self.random.random() < 0.4:
            zeros = torch.randint(low, high + 1, (count,), dtype=dtype, generator=self.numbers)
            zeros = zeros if self.random.random() < 0.5 else zeros[:1].expand(count).contiguous()
            inputs["zero_point"] = self.held(zeros if count > 1 else zeros[0])
        along = [-1 if place == axis else 1 for place in range(len(dims))]
        real = (numbers.double() - zeros.double().reshape(along)) * scale.double().reshape(along)
        return emit(self.graph, "dequantize", inputs, Dequantize(axis)), real

    def bias(self, dims: tuple[int, ...]) -> tuple[dict[str, Value], torch.Tensor]:
        """Return a bias, or none and zeros."""
        if self.random.random() < 0.4:
            return {}, torch.zeros(dims)
        data = torch.randn(dims, generator=self.numbers)
        return {"bias": self.held(data)}, data


def convolution(net: Drawn) -> None:
    place = net.place(4)
    if place is None:
        return
    dims, pick = net.graph.type_of(net.values[place]).dims, net.random.choice
    kernel, stride, dilate = pick([1, 3]), pick([1, 1, 2]), pick([0, 0, 1])
    groups = pick([1, 1, dims[1]])
    outputs = groups * pick([1, 2]) if groups > 1 else pick([1, 8, 17, 32])
    weights, w = net.weights((outputs, dims[1] // groups, kernel, kernel), 0)
    if groups > 1:
        weights = emit(net.graph, "reshape", {"src": weights}, Reshape((groups, outputs // groups, *w.shape[1:])))
    bias, b = net.bias((outputs,))
    pad = kernel // 2 * (dilate + 1)
    attrs = Conv.make(2, stride, dilate, pad_l=pad, groups=groups)
    value = emit(net.graph, "convolution", {"src": net.values[place], "weights": weights, **bias}, attrs)

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w.to(x.dtype), b.to(x.dtype), stride, pad, dilate + 1, groups)

    twin = net.place(4)
    if twin is not None and net.graph.type_of(net.values[twin]).dims == net.graph.type_of(value).dims:
        value = emit(net.graph, "binary", {"src_0": value, "src_1": net.values[twin]}, Binary("add"))
        net.add("convolution and sum", value, (place, twin), lambda x, y: run(x) + y)
    else:
        net.add("convolution", value, (place,), run)


def deconvolution(net: Drawn) -> None:
    place = net.place(4)
    if place is None or max(net.graph.type_of(net.values[place]).dims[2:]) > 24:
        return
    channels, pick = net.graph.type_of(net.values[place]).dims[1], net.random.choice
    kernel, stride = pick([1, 2, 3, 4]), pick([1, 2])
    weights, w = net.weights((pick([1, 8, 17, 32]), channels, kernel, kernel), 0)
    bias, b = net.bias((w.shape[0],))
    inputs = {"src": net.values[place], "weights": weights, **bias}
    value = emit(net.graph, "deconvolution", inputs, Deconv.make(2, strides=stride))

    def run(x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w.transpose(0, 1).to(x.dtype), b.to(x.dtype), stride)

    net.add("deconvolution", value, (place,), run)


def moved(net: Drawn) -> None:
    place = net.place(4)
    if place is None:
        return
    source = net.values[place]
    dims = net.graph.type_of(source).dims
    if net.random.random() < 0.5 and max(dims[2:]) <= 24:
        attrs = Resampling("nearest", tuple(2 * one for one in dims[2:]))
        value = emit(net.graph, "resampling", {"src": source}, attrs)
        net.add("nearest", value, (place,), lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    elif dims[1] % 2 == 0:
        value = emit(net.graph, "shuffle", {"src": source}, Shuffle(1, 2))
        net.add("shuffle", value, (place,), lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def product(net: Drawn) -> None:
    place = net.place()
    assert place is not None
    source, outputs = net.values[place], net.random.choice([1, 8, 17, 32])
    dims = net.graph.type_of(source).dims
    if net.random.random() < 0.5 and len(dims) == 4:
        weights, w = net.weights((outputs, *dims[1:]), 0)
        bias, b = net.bias((outputs,))
        value = emit(net.graph, "inner_product", {"src": source, "weights": weights, **bias}, InnerProduct())
        net.add(
            "inner product", value, (place,), lambda x: F.linear(x.flatten(1), w.flatten(1).to(x.dtype), b.to(x.dtype))
        )
        return
    weights, w = net.weights((dims[-1], outputs), 1)
    value = emit(net.graph, "matmul", {"src": source, "weights": weights}, MatMul())
    net.add("matmul", value, (place,), lambda x: x @ w.to(x.dtype))


def ranged(net: Drawn) -> None:
    """Add a product whose source is rounded by its own range, as PT2E writes it."""
    place = net.place()
    assert place is not None
    graph, source = net.graph, net.values[place]
    dims, call = graph.type_of(source).dims, f"choose_qparams{net.random.choice(['', '_symmetric'])}"
    if not graph.type_of(source).size:
        return
    dtype = net.random.choice([torch.uint8, torch.int8])
    (low, high), kind = LIMITS[dtype], "u8" if dtype is torch.uint8 else "s8"
    given = {"quant_min": low, "quant_max": high, "eps": 2.0**-12, "dtype": DataType.from_any(kind)}
    attrs, inputs = host_call(f"quantized_decomposed.{call}.tensor", {"input": source, **given})
    scale = emit(graph, "aten", inputs, attrs)
    parameters = {"scale": scale, "zero_point": Value(scale.node, 1)}
    stored = emit(graph, "quantize", {"src": source, **parameters}, Quantize(kind, low, high))
    real = emit(graph, "dequantize", {"src": stored, **parameters}, Dequantize())
    weights, w = net.weights((net.random.choice([1, 8, 17, 32]), dims[-1]), 0)
    turned = emit(graph, "permute", {"src": weights}, Permute((1, 0)))
    bias, b = net.bias((*[1] * (len(dims) - 1), w.shape[0]))

    def rounded(x: torch.Tensor, off: float = 0.0) -> torch.Tensor:
        chosen = getattr(torch.ops.quantized_decomposed, call).tensor(x.float(), low, high, 2.0**-12, dtype)
        scale, zero = (one.double() for one in chosen)
        return ((x / scale + off).round() + zero).clamp(low, high).sub(zero) * scale

    def size(x: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude, and more of what is made of numbers in the middle between two."""
        either = rounded(x, 1e-4) - rounded(x, -1e-4)
        return (x.abs() @ w.abs().T).max() + b.abs().max() + either @ w.abs().T / EPSILON

    value = emit(graph, "matmul", {"src": real, "weights": turned, **bias}, MatMul())
    net.add("ranged product", value, (place,), lambda x: rounded(x) @ w.T + b, size)


def scores(net: Drawn) -> None:
    place = net.place(4)
    if place is None:
        return
    source = net.values[place]
    turned = emit(net.graph, "permute", {"src": source}, Permute((0, 1, 3, 2)))
    value = emit(net.graph, "matmul", {"src": source, "weights": turned}, MatMul())
    net.add("product of two", value, (place,), lambda x: x @ x.transpose(2, 3))


def pooling(net: Drawn) -> None:
    place = net.place(4)
    if place is None or min(net.graph.type_of(net.values[place]).dims[2:]) < 3:
        return
    if net.random.random() < 0.3:
        places = net.graph.type_of(net.values[place]).dims[2:]
        value = emit(net.graph, "pooling", {"src": net.values[place]}, Pooling.make("avg_include_padding", places))
        net.add("average", value, (place,), lambda x: x.mean((2, 3), keepdim=True))
        return
    alg, stride = net.random.choice(["max", "max", "avg_include_padding"]), net.random.choice([1, 2])
    value = emit(net.graph, "pooling", {"src": net.values[place]}, Pooling.make(alg, (3, 3), stride, pad_l=1))
    function = F.max_pool2d if alg == "max" else F.avg_pool2d
    net.add(alg, value, (place,), lambda x: function(x, 3, stride, 1))


def function(net: Drawn) -> None:
    place = net.place()
    assert place is not None
    name = net.random.choice(["tanh", "softmax", "clip", "erf", "mean"])
    source = net.values[place]
    if name == "softmax":
        axis = net.graph.type_of(source).ndim - 1
        value = emit(net.graph, "softmax", {"src": source}, Softmax(axis))
        net.add(name, value, (place,), lambda x: x.softmax(-1))
    elif name == "erf":
        attrs, inputs = host_call("aten.erf.default", {"self": source})
        net.add(name, emit(net.graph, "aten", inputs, attrs), (place,), torch.erf)
    elif name == "mean":
        if not net.graph.type_of(source).size:
            return
        axes = (2, 3) if net.graph.type_of(source).ndim == 4 else (net.graph.type_of(source).ndim - 1,)
        value = emit(net.graph, "reduction", {"src": source}, Reduction("mean", axes))
        net.add(name, value, (place,), lambda x: x.mean(axes, keepdim=True))
    elif name == "tanh":
        net.add(name, emit(net.graph, "eltwise", {"src": source}, Eltwise("tanh")), (place,), torch.tanh)
    else:
        value = emit(net.graph, "eltwise", {"src": source}, Eltwise("clip", -0.5, 1.5))
        net.add(name, value, (place,), lambda x: x.clamp(-0.5, 1.5))


def norm(net: Drawn) -> None:
    place = net.place()
    assert place is not None
    source = net.values[place]
    dims, op = net.graph.type_of(source).dims, net.random.choice(["layer_normalization", "rms_normalization"])
    if len(dims) < 2 or not dims[-1]:
        return
    centred, vectors = op.startswith("layer"), dict[str, torch.Tensor]()
    for name in ["scale", "shift"][: 1 + centred]:
        if net.random.random() < 0.7:
            vectors[name] = torch.randn(dims[-1:], generator=net.numbers)
    inputs = {"src": source, **{name: net.held(vector) for name, vector in vectors.items()}}
    attrs = LayerNorm(1e-5) if centred else RmsNorm(1e-5)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if centred else x
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * vectors.get("scale", torch.ones(())) + vectors.get("shift", torch.zeros(()))

    def size(x: torch.Tensor) -> float:
        """Return the largest number over the least deviation: where a mean is large, its error is, too."""
        least = (x.var(-1, unbiased=False) if centred else x.square().mean(-1)).min() + 1e-5
        factor = vectors.get("scale", torch.ones(())).abs().max()
        return float(x.abs().max() * factor / least.sqrt()) + float(vectors.get("shift", torch.zeros(())).abs().max())

    net.add(op, emit(net.graph, op, inputs, attrs), (place,), run, size)


def two(net: Drawn) -> None:
    first = net.place()
    assert first is not None
    dims = net.graph.type_of(net.values[first]).dims
    alike = [place for place, value in enumerate(net.values) if net.graph.type_of(value).dims == dims]
    second, name = net.random.choice(alike), net.random.choice(["add", "mul", "concat"])
    operands = {"src_0": net.values[first], "src_1": net.values[second]}
    if name == "concat":
        axis = net.random.randrange(len(dims))
        value = emit(net.graph, "concat", operands, Concat(axis))
        net.add(name, value, (first, second), lambda a, b: torch.cat([a, b], axis))
    else:
        functions = {"add": torch.add, "mul": torch.mul}
        net.add(name, emit(net.graph, "binary", operands, Binary(name)), (first, second), functions[name])


def view(net: Drawn) -> None:
    place = net.place(4)
    if place is None:
        return
    dims = net.graph.type_of(net.values[place]).dims
    attrs, run = net.random.choice([
        (Permute((0, 2, 3, 1)), lambda x: x.permute(0, 2, 3, 1)),
        (Reshape((dims[0], dims[1], dims[2] * dims[3])), lambda x: x.flatten(2)),
    ])  # fmt: skip
    net.add(
        "view",
        emit(net.graph, "permute" if isinstance(attrs, Permute) else "reshape", {"src": net.values[place]}, attrs),
        (place,),
        run,
    )


LAYERS: tuple[Callable[[Drawn], None], ...] = (
    convolution, convolution, deconvolution, moved, product, ranged, scores, pooling, function, norm, two, view,
)  # fmt: skip

#: what a graph is compiled by: in bytes wherever a kernel can, by costs, and in real numbers
WAYS: tuple[dict[str, str], ...] = ({"policy": "propagate"}, {"policy": "optimal"}, {"target": "mkldnn"})


def check(seed: int) -> None:
    """Compile a graph, and check each layer of a run."""
    net = Drawn(seed)
    for way in WAYS:
        results = fp.compile(net.graph, confirm=False, **way)(net.x)  # type: ignore[call-overload]
        results = [results] if isinstance(results, torch.Tensor) else results
        for layer, got in zip(net.layers, results, strict=True):
            operands = [results[place].double() for place in layer.reads] or [net.x.double()]
            # bytes that a product adds are shifted by their zero point first
            added = max((255 * net.layers[place].grid.scale.max().item() for place in layer.reads[1:]), default=0.0)
            exact, error = layer.run(*operands), EPSILON * _magnitude(layer, operands).clamp_min(added)
            wrong = layer.grid.off(got, exact, error)
            assert got.shape == exact.shape and not wrong.any(), (
                f"seed {seed}, {way}: {layer.name} of {[tuple(one.shape) for one in operands]} on {layer.grid}: "
                f"{int(wrong.sum())} of {wrong.numel()} wrong, such as {got[wrong][:3]} for {exact[wrong][:3]}"
            )


def _magnitude(layer: Layer, operands: list[torch.Tensor]) -> torch.Tensor:
    """Return about the largest sum of magnitudes that a result is made of."""
    if layer.size is not None and operands[0].numel():
        return torch.zeros_like(layer.run(*operands)) + layer.size(*operands)
    zeros = layer.run(*(torch.zeros_like(one) for one in operands)).abs()
    largest = layer.run(*(one.abs() for one in operands)).abs()
    size = max((one.abs().max().item() for one in (zeros, largest, *operands) if one.numel()), default=0.0)
    return torch.full_like(zeros, size)


if __name__ == "__main__":
    begin, _, end = sys.argv[1].partition(":")
    found = 0
    for number in range(int(begin), int(end)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # a primitive that fails its check is a finding, too
                check(number)
        except Exception as wrong:
            found += 1
            print(number, type(wrong).__name__, str(wrong)[:700], flush=True)
    print(f"{found} findings of {int(end) - int(begin)}")
