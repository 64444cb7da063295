"""Quantization by the range of the same run, as libraries write it: one op, and products of the integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fmtprop as fp

Function = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def rounded(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float, low: int, high: int) -> torch.Tensor:
    return (torch.round(x * (1.0 / scale)) + zero).clamp(low, high).to(torch.int8)


def largest_magnitude(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale, None


def both_ends(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (torch.maximum(-low, high) / 127.5).clamp(min=1e-5)
    return rounded(x, scale, 0, -128, 127), scale, None


def shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=2.0**-23)
    zero = (-128 - torch.round(low / scale)).clamp(-128, 127)
    return rounded(x, scale, zero, -128, 127), scale, zero


def whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = x.abs().amax() / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale, None


class Product(nn.Module):
    def __init__(self, function: Function, rows: tuple[int, ...], added: int = 0) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.function, self.rows, self.added, self.product = function, rows, added, torch._int_mm
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randint(-128, 128, (33, 48), dtype=torch.int8, generator=drawn))
        self.register_buffer("sums", added * self.codes.int().sum(0, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        integers, scale, zero = self.function(x)
        integers = integers.reshape(-1, 33)
        if self.added:  # as torchao does for CPUs
            integers = (integers.to(torch.int32) + self.added).to(torch.uint8)
        sums = self.product(integers, self.codes)
        if self.added:
            sums = sums - self.sums
        y = sums.to(torch.float32).reshape(*self.rows, 48)
        if zero is not None:
            y = y - zero * self.codes.float().sum(0)
        return y * scale


def meant(module: Product, x: torch.Tensor) -> torch.Tensor:
    """Return the module's result with exact sums: without VNNI, PyTorch's own product of bytes saturates."""
    module.product = lambda a, b: (a.double() @ b.double()).to(torch.int32)
    return module(x)


def ops(net: fp.CompiledModel) -> list[str]:
    return [
        node.op for node in net.compilation.normal.nodes() if node.op not in ("constant", "input", "output", "reshape")
    ]


@pytest.mark.parametrize(
    ("function", "rows", "added"),
    [(largest_magnitude, (17,), 128), (largest_magnitude, (2, 9), 0), (both_ends, (2, 9), 128), (whole, (1,), 0)],
)
def test_rows_and_their_product_are_two_nodes(function: Function, rows: tuple[int, ...], added: int) -> None:
    module = Product(function, rows, added)
    x = torch.randn(*rows, 33, generator=torch.Generator().manual_seed(1))
    net = fp.compile(module, x, deterministic=True)
    assert ops(net)[:2] == ["dynamic_quantize", "matmul"]
    assert "aten" not in ops(net)
    (product,) = (node for node in net.compilation.normal.nodes() if node.op == "matmul")
    assert {"src", "weights"} <= product.grids.keys()
    for data in (x, -x, x.abs(), torch.zeros_like(x), 1e-3 * x):
        assert torch.allclose(net(data), meant(module, data), rtol=1e-6, atol=0)


def test_zeros_of_rows_stay_with_them() -> None:
    module, x = Product(shifted, (9,)), torch.randn(9, 33, generator=torch.Generator().manual_seed(1))
    net = fp.compile(module, x, deterministic=True)
    assert {"dynamic_quantize", "matmul"} <= set(ops(net))
    for data in (x, x + 3, x - 3):
        assert torch.allclose(net(data), meant(module, data), rtol=1e-5, atol=1e-4)


def not_of_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = x.abs().amax(0, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale[:, :1], None


def not_linear(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = x.abs().amax(-1, keepdim=True).sqrt() / 127
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale, None


def of_others(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = (2 * x).abs().amax(-1, keepdim=True) / 127 + 0.25 * x[:, :1].abs()
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8), scale, None


@pytest.mark.parametrize("function", [not_of_rows, not_linear, of_others], ids=lambda function: function.__name__)
def test_other_scales_stay_as_they_are(function: Function) -> None:
    module, x = Product(function, (9,)), torch.randn(9, 33, generator=torch.Generator().manual_seed(1))
    net = fp.compile(module, x, deterministic=True)
    assert "dynamic_quantize" not in ops(net)
    assert torch.allclose(net(x), meant(module, x), rtol=1e-5, atol=1e-4)


class OtherSum(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        integers, scale, _ = self.function(x)
        wide = (integers.to(torch.int32) + 128).to(torch.uint8)
        return (self.product(wide, self.codes) - self.sums).float() * scale


def test_a_sum_that_does_not_cancel_stays() -> None:
    module, x = OtherSum(largest_magnitude, (9,), 127), torch.randn(9, 33)
    net = fp.compile(module, x, deterministic=True)
    assert "matmul" not in ops(net)
    assert torch.allclose(net(x), module(x), rtol=1e-6, atol=0)


class Pair(nn.Module):
    """A layer of which the source is quantized by its own range, as PT2E writes it."""

    def __init__(self, symmetric: bool, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        import torch.ao.quantization.fx._decomposed  # registers the operators

        drawn = torch.Generator().manual_seed(0)
        self.symmetric, self.dtype, self.layer = symmetric, dtype, nn.Linear(33, 48, bias=bias)
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randint(-128, 128, (48, 33), dtype=torch.int8, generator=drawn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, limits = torch.ops.quantized_decomposed, torch.iinfo(self.dtype)
        choose = q.choose_qparams_symmetric if self.symmetric else q.choose_qparams
        ends = limits.min, limits.max
        scale, zero = choose.tensor(x, *ends, 2.0**-23, self.dtype)
        stored = q.quantize_per_tensor.tensor(x, scale, zero, *ends, self.dtype)
        real = q.dequantize_per_tensor.tensor(stored, scale, zero, *ends, self.dtype)
        weights = q.dequantize_per_channel(self.codes, torch.full((48,), 0.02), None, 0, -128, 127, torch.int8)
        return torch.nn.functional.linear(real, weights, self.layer.bias)


@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33)], ids=str)
@pytest.mark.parametrize(
    ("symmetric", "dtype", "bias"),
    [(False, torch.uint8, True), (False, torch.int8, False), (True, torch.int8, True), (True, torch.uint8, True)],
)
def test_a_product_reads_the_integers_of_a_pair_by_its_own_range(symmetric, dtype, bias, shape):
    module, drawn = Pair(symmetric, dtype, bias).eval(), torch.Generator().manual_seed(1)
    net = fp.compile(module, torch.randn(shape, generator=drawn), confirm=False)
    for x in (torch.randn(shape, generator=drawn) * 9, torch.rand(shape, generator=drawn) + 3, torch.zeros(shape)):
        expected = module(x)
        assert (net(x) - expected).abs().max() <= 2e-5 * expected.abs().max() + 1e-6
    ops = {node.op for node in net.compilation.normal.nodes()}
    assert ("dynamic_quantize" in ops) == (not symmetric or dtype is torch.int8)
    assert ("quantize" in ops) == ("dynamic_quantize" not in ops)


def test_other_readers_of_a_pair_stay():
    class Both(Pair):
        def forward(self, x):
            q = torch.ops.quantized_decomposed
            scale, zero = q.choose_qparams.tensor(x, 0, 255, 2.0**-23, torch.uint8)
            stored = q.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
            real = q.dequantize_per_tensor.tensor(stored, scale, zero, 0, 255, torch.uint8)
            return self.layer(real), real.relu(), stored

    module, x = Both(False, torch.uint8).eval(), torch.randn(4, 33, generator=torch.Generator().manual_seed(1))
    for got, expected in zip(fp.compile(module, x, confirm=False)(x), module(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
