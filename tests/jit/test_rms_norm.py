"""RMS normalization by machine code, against f64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import RmsNormKernel, offered
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")


def normalized(src, scale=None, threads=2, dst=None):
    kernel = offered(RmsNormKernel(*src.shape, 1e-6, DataType.from_any(src.dtype)))
    dst = torch.empty_like(src) if dst is None else dst
    work = kernel.work(threads)
    for name, tensor in {"src": src, "scale": scale, "dst": dst}.items():
        if tensor is not None:
            work.point[name](tensor.data_ptr())
    work.run()
    return dst


def exact(src, scale=None):
    wide = src.double()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    return wide if scale is None else wide * scale


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 60), vectors=st.integers(1, 80), threads=st.integers(1, 5), scaled=st.booleans())
def check(rows, vectors, threads, scaled) -> None:
    src = 3 * torch.randn(rows, 16 * vectors)
    scale = torch.randn(16 * vectors) if scaled else None
    assert (normalized(src, scale, threads) - exact(src, scale)).abs().max() <= 1e-5


def test_rows_of_any_size(isa):
    check()


def test_in_place(isa):
    src = torch.randn(7, 768)
    expected = exact(src)
    normalized(src, dst=src)
    torch.testing.assert_close(src, expected.float())


def test_nan_and_infinity_stay_in_their_row(isa):
    src = torch.randn(3, 64)
    src[1, 5], src[2, 9] = torch.nan, torch.inf
    got = normalized(src)
    assert got[0].isfinite().all() and got[1].isnan().all() and torch.equal(got.isnan(), exact(src).isnan())


@pytest.mark.parametrize("columns", [1, 17, 100])
def test_rows_that_are_no_whole_number_of_vectors_have_no_kernel(isa, columns):
    assert offered(RmsNormKernel(4, columns, 1e-6, DataType.F32)) is None


@BF16
def test_bf16():
    src, scale = torch.randn(9, 256).bfloat16(), torch.rand(256)
    torch.testing.assert_close(normalized(src, scale), exact(src, scale).bfloat16(), rtol=1e-2, atol=1e-2)
