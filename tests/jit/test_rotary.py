"""Rotary embeddings by machine code, against f64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import RotaryKernel, offered
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")


def turned(src, cos, sin, threads=2, dst=None, interleaved=False):
    """Turn heads [n, h, t, d], in any strides with rows side by side, by angles [1 or n, 1, t, d]."""
    steps = [0 if size == 1 else step for size, step in zip(cos.shape, cos.stride(), strict=True)]
    axes = tuple(zip(src.shape[:-1], steps, src.stride(), strict=False))
    kernel = offered(RotaryKernel(axes, src.shape[-1] // 2, DataType.from_any(src.dtype), interleaved=interleaved))
    dst = torch.empty(src.shape, dtype=src.dtype) if dst is None else dst
    work = kernel.work(threads)
    for name, tensor in {"src": src, "cos": cos, "sin": sin, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    return dst


def exact(src, cos, sin, interleaved=False):
    wide = src.double()
    if interleaved:
        return wide * cos + torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2) * sin
    first, second = wide.chunk(2, -1)
    return wide * cos + torch.cat([-second, first], -1) * sin


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 9),
    half=st.integers(1, 70),
    threads=st.integers(1, 5),
    each=st.booleans(),
    across=st.booleans(),
    interleaved=st.booleans(),
)
def check(batch, heads, tokens, half, threads, each, across, interleaved) -> None:
    shape = (batch, tokens, heads, 2 * half) if across else (batch, heads, tokens, 2 * half)
    src = torch.randn(shape).transpose(1, 2) if across else torch.randn(shape)
    cos, sin = torch.randn(2, batch if each else 1, 1, tokens, 2 * half)
    got = turned(src, cos, sin, threads, interleaved=interleaved)
    assert (got - exact(src, cos, sin, interleaved)).abs().max() <= 1e-5


def test_rows_of_any_size_and_place(isa):
    check()


INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])


@INTERLEAVED
def test_rows_that_are_parts_of_longer_ones(isa, interleaved):
    whole, (cos, sin) = torch.randn(2, 3, 5, 200), torch.randn(2, 1, 1, 5, 40)
    src = whole[..., 7:47]
    got = turned(src, cos, sin, interleaved=interleaved)
    assert (got - exact(src, cos, sin, interleaved)).abs().max() <= 1e-5


@INTERLEAVED
def test_in_place(isa, interleaved):
    src, (cos, sin) = torch.randn(2, 4, 3, 70), torch.randn(2, 1, 1, 3, 70)
    expected = exact(src, cos, sin, interleaved)
    turned(src, cos, sin, dst=src, interleaved=interleaved)
    torch.testing.assert_close(src, expected.float())


@INTERLEAVED
def test_nan_and_infinity_reach_their_pair_alone(isa, interleaved):
    src, (cos, sin) = torch.randn(1, 2, 3, 38), torch.randn(2, 1, 1, 3, 38)
    src[0, 0, 1, 4], src[0, 1, 2, 30] = torch.nan, torch.inf
    got, expected = turned(src, cos, sin, interleaved=interleaved), exact(src, cos, sin, interleaved)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())


def test_no_rows_and_very_long_rows_have_no_kernel(isa):
    assert offered(RotaryKernel(((0, 0, 64),), 32, DataType.F32)) is None
    assert offered(RotaryKernel(((1, 0, 64),), 1 << 20, DataType.F32)) is None


@BF16
@pytest.mark.parametrize("half", [32, 21])
@INTERLEAVED
def test_bf16(half, interleaved):
    src, (cos, sin) = torch.randn(2, 3, 5, 2 * half).bfloat16(), torch.randn(2, 1, 1, 5, 2 * half)
    got = turned(src, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got, exact(src, cos, sin, interleaved).bfloat16(), rtol=1e-2, atol=1e-2)
