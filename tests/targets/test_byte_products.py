"""Products of bytes by the kernel of our own: formats, refusals, and layers that differ in scales alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.jit import byte_products as kernels
from fmtprop.jit import unavailable
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, Eltwise, FakeQuantize, MatMul
from fmtprop.passes.target import Request
from fmtprop.targets.byte_products import byte_products
from tests.targets.nodes import node_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ROUNDED = PostOp("fake_quantize", FakeQuantize(0.1, 0, 255))


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_needed", lambda: True)


def quantized(op: str, attrs: Any, src: tuple[int, ...], weights: tuple[int, ...], post_ops: tuple = ()) -> Node:
    node = node_of(op, attrs, {"src": TensorType(src), "weights": TensorType(weights)}, post_ops)
    grids = {"src": Grid((0.02,), -3, 252), "weights": Grid((0.01,), -128, 127)}
    return node.with_(grids={**grids, "dst": Grid((0.1,), 0, 255)} if post_ops else grids)


def offers(node: Node, src: tuple[int, ...], weights: tuple[int, ...], formats: Request | None = None) -> list[Any]:
    request = {
        "src": MemoryDesc.any(src, DataType.U8),
        "weights": MemoryDesc.any(weights, DataType.S8),
        "dst": MemoryDesc.any(node.results[0].dims, DataType.U8 if "dst" in node.grids else DataType.F32),
    }
    return [way for way in byte_products(node, {**request, **(formats or {})}) if way[0].is_offered]


@pytest.mark.usefixtures("needed")
def test_weights_have_pairs_of_inputs_of_sixteen_outputs() -> None:
    src, weights = (2, 24, 9, 14), (40, 24, 3, 3)
    node = quantized("convolution", Conv.make(2, pad_l=1), src, weights)
    ((kernel, operands, (dst,)),) = offers(node, src, weights)
    assert (kernel.zero, kernel.weights_zero) == (3, 0)
    assert operands["src"].tag == "acdb"
    assert operands["weights"].tag == "AcdB16a2b"
    assert dst.tag == "acdb"
    plain = MemoryDesc(src, DataType.U8, tag="abcd")
    assert not offers(node, src, weights, {"src": plain})


@pytest.mark.usefixtures("needed")
def test_rows_of_a_batch_share_a_matrix() -> None:
    src, weights = (2, 5, 7, 32), (32, 48)
    ((kernel, *_),) = offers(quantized("matmul", MatMul(), src, weights), src, weights)
    assert (kernel.width.dst, kernel.height.dst, kernel.images) == (70, 1, 1)
    own = (2, 5, 32, 48)
    assert not offers(quantized("matmul", MatMul(), src, own), src, own)


@pytest.mark.usefixtures("needed")
def test_a_window_of_one_position_sees_a_row() -> None:
    src, weights = (2, 32, 9, 14), (48, 32, 1, 1)
    ((kernel, *_),) = offers(quantized("convolution", Conv.make(2), src, weights), src, weights)
    assert (kernel.width.dst, kernel.height.dst, kernel.images) == (252, 1, 1)


@pytest.mark.usefixtures("needed")
@pytest.mark.parametrize(
    ("src", "weights", "post_ops"),
    [
        ((1, 3, 9, 9), (16, 3, 3, 3), ()),  # odd channels
        ((1, 8, 9, 9), (20, 8, 3, 3), (ROUNDED,)),  # half a vector of bytes
        ((1, 8, 9, 9), (16, 8, 3, 3), (PostOp("eltwise", Eltwise("soft_relu", 1.0)),)),
    ],
)
def test_other_nodes_have_none(src: tuple[int, ...], weights: tuple[int, ...], post_ops: tuple) -> None:
    assert not offers(quantized("convolution", Conv.make(2, pad_l=1), src, weights, post_ops), src, weights)


class Twice(nn.Module):
    """Two convolutions of the same sizes, whose weights have other scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))
        with torch.no_grad():
            self.layers[1].weight.mul_(torch.linspace(0.2, 5, 32)[:, None, None, None])
        self.register_buffer("zeros", torch.zeros(32, dtype=torch.int32))
        for number, layer in enumerate(self.layers):
            self.register_buffer(f"scales_{number}", layer.weight.detach().flatten(1).abs().amax(1) / 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.fake_quantize_per_tensor_affine(x, 0.02, 0, 0, 255)
            scales = getattr(self, f"scales_{number}")
            weights = torch.fake_quantize_per_channel_affine(layer.weight, scales, self.zeros, 0, -127, 127)
            x = nn.functional.conv2d(x, weights, layer.bias, padding=1).relu()
        return x


def test_layers_that_differ_in_scales_alone_have_their_own() -> None:
    model, x = Twice().eval(), torch.rand(1, 32, 12, 12)
    net = fp.compile(model, (x,), deterministic=True)
    got, want = net(x), model(x)
    impls = [node.choice.impl for node in net.graph.nodes() if node.op == "convolution" and node.choice is not None]
    if kernels.is_needed():
        assert [impl.partition(":")[0] for impl in impls] == ["byte_products"] * len(impls)
    # a number between two roundings may be rounded the other way
    assert (got - want).abs().mean() < 1e-4 * want.abs().mean()
    assert (got - want).abs().max() < 0.02 * want.abs().max()


class WithZeros(nn.Module):
    """Three products of the same sizes and scales, whose weights have other zero points."""

    zeros = (50, -25, 10)

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        for number, zero in enumerate(self.zeros):
            codes = torch.randint(zero - 60, zero + 70, (256, 256), generator=drawn, dtype=torch.int8)
            self.register_buffer(f"codes_{number}", codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        for number, zero in enumerate(self.zeros):
            codes = ops.quantize_per_tensor(x, 0.02, 0, 0, 255, torch.uint8)
            x = ops.dequantize_per_tensor(codes, 0.02, 0, 0, 255, torch.uint8)
            codes = getattr(self, f"codes_{number}")
            x = torch.matmul(x, ops.dequantize_per_tensor(codes, 0.001, zero, -128, 127, torch.int8)).relu()
        return x


def test_a_later_shape_keeps_zero_points_apart() -> None:
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (it makes the operators)

    model = WithZeros().eval()
    net = fp.compile(model, (torch.rand(70, 256),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), deterministic=True)
    for rows in (70, 90, 130):
        x = torch.rand(rows, 256)
        got, want = net(x), model(x)
        assert (got - want).abs().mean() < 1e-3 * want.abs().mean()
    impls = [
        node.choice.impl for node in net.plans[-1].graph.nodes() if node.op == "matmul" and node.choice is not None
    ]
    if kernels.is_needed():
        assert [impl.partition(":")[0] for impl in impls] == ["byte_products"] * len(impls)
