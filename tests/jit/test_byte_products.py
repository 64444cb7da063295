"""Products of bytes that are widened to 16 bits: exact sums of each size, window, type and tail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
import torch

from fmtprop.jit import ByteProductsKernel, byte_products
from fmtprop.jit.byte_products import TailOperand, TailStep
from fmtprop.jit.grouped_convolution import Row
from fmtprop.layout import DataType
from tests.jit.work import statuses

TYPES = {DataType.F32: torch.float32, DataType.U8: torch.uint8, DataType.S8: torch.int8}


@pytest.fixture(autouse=True)
def _needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code runs on any CPU with AVX2."""
    monkeypatch.setattr(byte_products, "is_needed", lambda: True)


def kernel(
    inputs: int, outputs: int, size: tuple[int, int], window: tuple[int, int] = (1, 1), images: int = 1,
    stride: int = 1, step: int = 1, pad: int = 0, **rest: object,
) -> ByteProductsKernel:  # fmt: skip
    height, width = (
        Row(one, (one + 2 * pad - step * (taps - 1) - 1) // stride + 1, taps, stride, step, pad)
        for one, taps in zip(size, window, strict=True)
    )
    types = (rest.pop("src", DataType.U8), rest.pop("weights", DataType.S8), rest.pop("dst", DataType.F32))
    zeros = (rest.pop("zero", 0), rest.pop("weights_zero", 0))
    return ByteProductsKernel(images, inputs, outputs, height, width, *types, *zeros, outputs, **rest)  # type: ignore[arg-type]


def bytes_of(dims: tuple[int, ...], dtype: DataType, seed: int) -> torch.Tensor:
    limits = torch.iinfo(TYPES[dtype])
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max + 1, dims, generator=drawn).to(TYPES[dtype])


def results(one: ByteProductsKernel, threads: int = 1, **others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernel's results, and the exact sums, scaled: both as [images, height, width, outputs]."""
    assert one.is_offered
    src = bytes_of((one.images, one.height.src, one.width.src, one.inputs), one.src, 1)
    window = (one.height.window, one.width.window)
    weights = bytes_of((one.outputs, one.inputs, *window), one.weights, 2)
    factors = [0.001 * (1 + index % 7) for index in range(one.outputs)]
    blocks = -(-one.outputs // 16)
    padded = torch.zeros(16 * blocks, one.inputs, *window, dtype=weights.dtype)
    padded[: one.outputs] = weights
    packed = padded.view(blocks, 16, one.inputs // 2, 2, *window).permute(0, 4, 5, 2, 1, 3).contiguous()
    shape = (one.images, one.height.dst, one.width.dst, one.outputs)
    room = torch.full((prod(shape) + 32,), 77).to(TYPES[one.dst])
    dst, behind = room[:-32].view(shape), room[-32:]
    work = one.work(threads)
    kept = one.scale(work, factors)
    for name, tensor in {"src": src, "weights": packed, "dst": dst, **others}.items():
        work.point[name](tensor.data_ptr())
    assert statuses(work) == [0] and kept
    assert (behind == 77).all()
    sums = torch.nn.functional.conv2d(
        (src.double() - one.zero).permute(0, 3, 1, 2),
        weights.double() - one.weights_zero,
        stride=(one.height.stride, one.width.stride),
        padding=(one.height.pad, one.width.pad),
        dilation=(one.height.step, one.width.step),
    )
    return dst, sums.permute(0, 2, 3, 1) * torch.tensor(factors, dtype=torch.float64)


def name(one: ByteProductsKernel) -> str:
    """Return a short name of a test."""
    sizes = (f"{axis.src}x{axis.window}" for axis in (one.height, one.width))
    return f"{one.inputs} to {one.outputs} of {' '.join(sizes)} {one.src} {one.dst}"


def kernels() -> Iterator[ByteProductsKernel]:
    """Yield products of all numbers of rows and inputs, and windows with strides, steps, zeros and zero points."""
    for rows in (1, 2, 5, 6, 7, 13, 64, 700):
        yield kernel(2 * rows % 50 + 2, 16 + rows % 20, (1, rows))
    yield kernel(512, 73, (1, 40), zero=7)
    yield kernel(4096, 48, (1, 3), zero=255)  # the largest sums
    yield kernel(2, 1, (1, 9), src=DataType.S8, weights=DataType.U8, weights_zero=3)
    yield kernel(16, 32, (9, 13), (3, 3), images=2, pad=1)
    yield kernel(10, 24, (9, 13), (3, 3), images=3, pad=1, zero=128, src=DataType.U8)
    yield kernel(64, 64, (30, 37), (3, 3), stride=2, pad=1, zero=3)
    yield kernel(12, 20, (15, 17), (3, 5), step=2, pad=2, zero=3, weights=DataType.U8, weights_zero=5)
    yield kernel(6, 7, (7, 7), (2, 3), src=DataType.S8)
    yield kernel(512, 512, (7, 7), (3, 3), pad=1)
    yield kernel(4, 16, (20, 300), (7, 7), stride=2, pad=3)
    yield kernel(8, 16, (5, 5), (5, 5), pad=4)  # most of the window lies beside the image


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("one", [*kernels()], ids=name)
def test_sums_are_exact(one: ByteProductsKernel, threads: int) -> None:
    got, want = results(one, threads)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("outputs", [48, 41])
@pytest.mark.parametrize("size", [(1, 23), (6, 5)])
def test_bias_and_tail_come_after_the_sums(outputs: int, size: tuple[int, int]) -> None:
    shape = (1, *size, outputs)
    added, factor, each = torch.randn(shape), torch.randn(*shape[:3], 1), torch.randn(outputs)
    steps = (
        TailStep("add", operand=TailOperand(DataType.F32, outputs, is_number=False), number=0),
        TailStep("gelu_erf"),
        TailStep("mul", operand=TailOperand(DataType.F32, 1, is_number=True), number=2),
        TailStep("linear", 0.5, 3.0),
        TailStep("sub", operand=TailOperand(DataType.F32, 0, is_number=False), number=3),
        TailStep("clip", -20.0, 30.0),
    )
    one, bias = kernel(32, outputs, size, has_bias=True, tail=steps), torch.randn(outputs)
    got, sums = results(one, bias=bias, post_op_0=added, post_op_2=factor, post_op_3=each)
    want = torch.nn.functional.gelu(sums + bias + added) * factor * 0.5 + 3.0 - each
    torch.testing.assert_close(got.double(), want.clamp(-20.0, 30.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dst", [DataType.U8, DataType.S8])
@pytest.mark.parametrize("summand", [DataType.U8, DataType.S8, None])
def test_results_are_rounded_to_bytes_and_saturate(dst: DataType, summand: DataType | None) -> None:
    one, others = kernel(24, 48, (5, 7), (3, 3), pad=1, dst=dst, tail=(TailStep("linear", 0.4, 3.0),)), {}
    added: torch.Tensor | float = 0.0
    if summand is not None:
        others["post_op_0"] = added = bytes_of((1, 5, 7, 48), summand, 3)
        first = TailStep("add", operand=TailOperand(summand, 48, is_number=False), number=0)
        one = replace(one, tail=(first, *one.tail, TailStep("relu")))
    got, sums = results(one, **others)
    want = ((sums.float() + added) * 0.4 + 3.0).clamp(0.0 if summand is not None else -1e9)
    limits = torch.iinfo(TYPES[dst])
    wrong = got.double() - want.round().clamp(limits.min, limits.max)
    assert got.float().std() > 30
    assert wrong.abs().max() <= 1
    assert (wrong != 0).float().mean() < 0.001  # halves, by the order of additions


@pytest.mark.parametrize(
    "one",
    [
        kernel(3, 16, (1, 5)),  # no whole pairs
        kernel(1 << 16, 16, (1, 5)),  # sums of more than 31 bits
        kernel(8, 20, (1, 5), dst=DataType.U8),  # half a vector of bytes
        kernel(8, 16, (1, 5), dst=DataType.S32),
        kernel(8, 16, (5, 5), (1, 1), pad=1),  # positions that read zeros alone
        kernel(8, 16, (1, 5), tail=(TailStep("mul", operand=TailOperand(DataType.S8, 1, is_number=True)),)),
        kernel(8, 16, (1, 5), tail=(TailStep("soft_relu"),)),
    ],
    ids=name,
)
def test_other_problems_are_left_to_others(one: ByteProductsKernel) -> None:
    assert not one.is_offered
