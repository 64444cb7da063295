"""Weights with zero points: products of bytes and a correction by sums of the source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fmtprop as fp
from fmtprop.compiling import stages
from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.ops import Conv, Dequantize, InnerProduct, MatMul, Quantize, Reshape, emit
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision.centred_weights import CentredWeights
from fmtprop.passes.precision.mark_grids import grids_of

#: with layers of few products
EAGER = tuple(replace(one, least=0) if isinstance(one, CentredWeights) else one for one in NORMALISE)

#: step of the results
STEP = 4.0


class Net:
    """A layer of quantized numbers, whose weights are full-range integers with a zero point, or one for each output."""

    def __init__(self, dims, outputs, zero, *, window=1, groups=1, kind="conv", signed=False, source_zero=100):
        self.graph, drawn = Graph("zeros"), torch.Generator().manual_seed(0)
        self.kind, self.groups, self.pad = kind, groups, window // 2
        self.x = torch.randint(0, 256, dims, generator=drawn).float() - source_zero
        x = self.rounded(self.graph.input("x", TensorType(dims)), 1.0, source_zero)
        shape = (outputs, dims[1] // groups, window, window) if kind == "conv" else (outputs, *dims[1:])
        low, dtype = (-128, torch.int8) if signed else (0, torch.uint8)
        q = torch.randint(low, low + 256, shape, generator=drawn)
        zeros = torch.full((1,), zero) if isinstance(zero, int) else torch.tensor(zero)
        scales = 0.01 + 0.02 * torch.rand(zeros.shape, generator=drawn)
        along = [-1, *[1] * (len(shape) - 1)]
        self.w = (q - zeros.reshape(along)).double() * scales.double().reshape(along)
        self.bias = torch.randn(outputs, generator=drawn)
        if kind == "matmul":
            q = q.t().contiguous()
        given = [q.to(dtype), scales, zeros.to(dtype)]
        if zeros.numel() == 1:
            given[1:] = [one.reshape(()) for one in given[1:]]
        names = dict(zip(("src", "scale", "zero_point"), map(self.held, given), strict=True))
        weights = emit(self.graph, "dequantize", names, Dequantize(1 if kind == "matmul" else 0))
        attrs = {"conv": Conv.make(2, pad_l=self.pad, groups=groups), "matmul": MatMul()}.get(kind, InnerProduct())
        if groups > 1:
            weights = emit(self.graph, "reshape", {"src": weights}, Reshape((groups, outputs // groups, *shape[1:])))
        bias = self.held(self.bias.reshape(1, -1) if kind == "matmul" else self.bias)
        op = {"conv": "convolution", "matmul": "matmul"}.get(kind, "inner_product")
        self.graph.output(
            self.rounded(emit(self.graph, op, {"src": x, "weights": weights, "bias": bias}, attrs), STEP, 128)
        )

    def held(self, data):
        return self.graph.constant(self.graph.fresh_name("c"), tensor_type(data), data)

    def rounded(self, value, scale, zero):
        inputs = {"scale": self.held(torch.tensor(scale)), "zero_point": self.held(torch.tensor(zero).to(torch.uint8))}
        stored = emit(self.graph, "quantize", {"src": value, **inputs}, Quantize("u8", 0, 255))
        return emit(self.graph, "dequantize", {"src": stored, **inputs}, Dequantize())

    def exact(self):
        x = self.x.double()
        if self.kind == "conv":
            y = F.conv2d(x, self.w, self.bias.double(), 1, self.pad, 1, self.groups)
        else:
            y = F.linear(x.flatten(1), self.w.flatten(1), self.bias.double())
        return y / STEP

    def normal(self):
        graph = self.graph
        for one in EAGER:
            graph = one.run(graph)
        return graph


SIX = [200, 0, 255, 7, 128, 99]

LAYERS = {
    "one": ((2, 5, 6, 7), 6, 117, {"window": 3}),
    "signed": ((1, 5, 6, 7), 6, -100, {"window": 3, "signed": True}),
    "all positive": ((1, 5, 6, 7), 6, 0, {}),
    "outputs": ((2, 5, 6, 7), 6, SIX, {"window": 3}),
    "groups": ((1, 6, 6, 7), 6, SIX, {"window": 3, "groups": 2}),
    "depthwise": ((1, 6, 6, 7), 6, SIX, {"window": 3, "groups": 6}),
    "one depthwise": ((1, 6, 6, 7), 6, 90, {"window": 3, "groups": 6}),
    "rows": ((4, 9), 6, 117, {"kind": "linear"}),
    "rows, outputs": ((4, 9), 6, SIX, {"kind": "linear"}),
    "rows without a zero": ((4, 9), 6, SIX, {"kind": "linear", "source_zero": 0}),
    "images": ((4, 3, 3, 3), 6, 117, {"kind": "linear", "source_zero": 0}),
    "matrix": ((4, 9), 6, 117, {"kind": "matmul"}),
    "matrix, outputs": ((4, 9), 6, SIX, {"kind": "matmul"}),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_exact_and_all_weights_are_signed_bytes(layer, monkeypatch):
    dims, outputs, zero, how = LAYERS[layer]
    net = Net(dims, outputs, zero, **how)
    normal = net.normal()
    grids = grids_of(normal)
    for node in normal.nodes():
        if node.op in ("convolution", "inner_product", "matmul") and normal.inputs(node.name)["src"] in grids:
            assert node.grids["weights"].stored.value == "s8" and (
                node.op == "matmul" or not node.grids["weights"].zero
            )
    monkeypatch.setattr(stages, "NORMALISE", EAGER)
    steps, exact = fp.compile(net.graph, confirm=False)(net.x).double() / STEP, net.exact()
    near = (exact - exact.floor() - 0.5).abs() < 1e-3  # in the middle between two, either
    wanted = exact.round().clamp(-128, 127)
    assert ((steps - wanted).abs() < 1e-3)[~near].all() and ((steps - wanted).abs() < 1.001).all()


@pytest.mark.parametrize("zero", [128, [128] * 6], ids=["one", "outputs"])
def test_bytes_in_the_middle_of_their_range_need_no_correction(zero):
    normal = Net((1, 5, 6, 7), 6, zero, window=3).normal()
    assert len([node for node in normal.nodes() if node.op == "convolution"]) == 1


def test_layers_that_the_target_does_not_compute_in_bytes_stay():
    class Floats:
        def candidates(self, node, request):
            return []

    net = Net((1, 5, 6, 7), 6, 117)
    graph = net.graph
    for one in NORMALISE[: NORMALISE.index(CentredWeights())]:
        graph = one.run(graph)
    counts = [
        sum(node.op == "convolution" for node in one.run(graph).nodes())
        for one in (CentredWeights(Floats(), least=0), CentredWeights(least=6), CentredWeights(least=5))
    ]
    assert counts == [1, 1, 3]
