"""Normalizations and softmax of rows by machine code, against f64: of reals and of bytes, rounded and not."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.ir.grid import Grid
from fmtprop.jit import Rounding, RowNormKernel, SoftmaxKernel, offered
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from fmtprop.ops.quantization import to_bytes, to_reals

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")
U8, S8, SHIFTED = Grid((0.02,), 0, 255), Grid((0.03,), -128, 127), Grid((0.02,), -117, 138)
KINDS = ["rms", "layer", "softmax"]

READ = {"f32": None, "u8": U8, "s8": S8, "shifted": SHIFTED}
#: a rounding behind the rows, and whether its numbers are stored as reals
MADE = [(None, True), *product((U8, S8, SHIFTED, Grid((0.05,), -3, 12)), (True, False))]
#: each pair of ends, with columns of one vector, with a rest, and of many vectors in turn
ENDS = [
    (read, *made, (16, 49, 768)[(i + j) % 3]) for i, read in enumerate(READ.values()) for j, made in enumerate(MADE)
]


def run(kernel, threads=2, **tensors):
    work = kernel.work(threads)
    for name, tensor in tensors.items():
        work.point[name](tensor.data_ptr())
    work.run()
    return tensors["dst"]


def kernel_of(kind, rows, columns, src, dst, grid=None, rounding=None):
    scale, zero = (1.0, 0) if grid is None else (grid.scale, grid.zero)
    if kind == "softmax":
        return offered(SoftmaxKernel(rows, columns, scale, src, dst, rounding))
    centred, offset = kind == "layer", 0 if kind == "layer" else zero
    return offered(RowNormKernel(rows, columns, 1e-6 / scale**2, src, dst, centred, offset, rounding))


def exact(kind, src, scale=None, shift=None):
    wide = src.double()
    if kind == "softmax":
        return wide.softmax(1)
    if kind == "layer":
        wide = wide - wide.mean(1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    wide = wide if scale is None else wide * scale
    return wide if shift is None else wide + shift


def affine(kind, columns):
    names = {"rms": ["scale"], "layer": ["scale", "shift"], "softmax": []}[kind]
    return {name: torch.randn(columns) for name in names}


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 60),
    columns=st.integers(16, 1300),
    threads=st.integers(1, 5),
    scaled=st.booleans(),
)
def check(kind, rows, columns, threads, scaled) -> None:
    src = 3 * torch.randn(rows, columns) + 5
    vectors = affine(kind, columns) if scaled else {}
    kernel = kernel_of(kind, rows, columns, DataType.F32, DataType.F32)
    dst = run(kernel, threads, src=src, dst=torch.empty_like(src), **vectors)
    assert (dst - exact(kind, src, **vectors)).abs().max() <= 2e-5


def test_rows_of_any_size(isa):
    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("read", "made", "to_reals_", "columns"), ENDS)
def test_ends_of_bytes(isa, kind, read, made, to_reals_, columns):
    torch.manual_seed(0)
    src = torch.randn(7, columns) * 2
    stored, real = src, src
    if read is not None:
        stored = to_bytes(src, read)
        real = to_reals(stored, read)
    dtypes = [DataType.F32 if grid is None else grid.stored for grid in (read, None if to_reals_ else made)]
    rounding = None if made is None else Rounding(made.scale, made.low, made.high, made.zero)
    kernel = kernel_of(kind, 7, columns, *dtypes, read, rounding)
    vectors = affine(kind, columns)
    types = {DataType.F32: torch.float32, DataType.U8: torch.uint8, DataType.S8: torch.int8}
    got = run(kernel, src=stored, dst=torch.empty(7, columns, dtype=types[dtypes[1]]), **vectors)
    expected = exact(kind, real, **vectors)
    if made is None:
        assert (got - expected).abs().max() <= 2e-5
        return
    got = got if to_reals_ else to_reals(got, made)
    steps = expected / torch.tensor(made.scale).double()
    allowed = [(steps + sign * 1e-4).round().clamp(made.low, made.high) for sign in (-1, 1)]
    found = (got.double() / torch.tensor(made.scale).double()).round()
    assert bool(((found >= allowed[0]) & (found <= allowed[1])).all())


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(isa, kind):
    src = torch.randn(7, 768)
    expected = exact(kind, src)
    kernel = kernel_of(kind, 7, 768, DataType.F32, DataType.F32)
    assert kernel.overwrites
    torch.testing.assert_close(run(kernel, src=src, dst=src), expected.float())


def test_rows_with_a_rest_are_not_normalized_in_place(isa):
    assert not kernel_of("layer", 7, 49, DataType.F32, DataType.F32).overwrites
    assert not kernel_of("softmax", 7, 64, DataType.F32, DataType.U8).overwrites


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_nan_and_infinity_stay_in_their_row(isa, kind):
    src = torch.randn(3, 64)
    src[1, 5], src[2, 9] = torch.nan, torch.inf
    got = run(kernel_of(kind, 3, 64, DataType.F32, DataType.F32), src=src, dst=torch.empty_like(src))
    assert got[0].isfinite().all() and got[1].isnan().all()
    assert torch.equal(got.isnan(), exact(kind, src).isnan())


def test_large_scores(isa):
    src = torch.tensor([[0.0, -1e4, 50.0, 49.0] * 8, [3e4] * 32])
    got = run(kernel_of("softmax", 2, 32, DataType.F32, DataType.F32), src=src, dst=torch.empty_like(src))
    assert (got - exact("softmax", src)).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_shorter_than_a_vector_have_no_kernel(isa, kind):
    assert kernel_of(kind, 4, isa.lanes - 1, DataType.F32, DataType.F32) is None
    assert kernel_of(kind, 0, 64, DataType.F32, DataType.F32) is None


@BF16
@pytest.mark.parametrize("kind", KINDS)
def test_bf16(kind):
    src = torch.randn(9, 250).bfloat16()
    kernel = kernel_of(kind, 9, 250, DataType.BF16, DataType.BF16)
    got = run(kernel, src=src, dst=torch.empty_like(src))
    torch.testing.assert_close(got, exact(kind, src).bfloat16(), rtol=1e-2, atol=1e-2)
