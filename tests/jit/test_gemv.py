"""Products of a few rows and a matrix by machine code, against f64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import GemvKernel, Tail, offered
from fmtprop.jit.gemv import MOST_ROWS
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from fmtprop.ops.eltwise import FUNCTIONS

F32, BF16 = DataType.F32, DataType.BF16
WITH_BF16 = pytest.mark.skipif(not takes(BF16), reason="this CPU has no bf16")
TORCH = {F32: torch.float32, BF16: torch.bfloat16}


def run(kernel, threads=2, **tensors):
    """Return dst, with numbers behind it that must stay."""
    size = kernel.rows * kernel.outputs
    dst = torch.full((size + 16,), 77.0, dtype=TORCH[kernel.dst])
    work = kernel.work(threads)
    for name, tensor in {**tensors, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    assert (dst[size:] == 77).all()
    return dst[:size].reshape((kernel.rows, -1) if kernel.rows > 1 else (-1,))


def numbers(*dims, dtype=F32):
    return torch.randn(dims).to(TORCH[dtype])


def few_rows(outputs, depth, rows, dtype=F32, dst=F32, bias=None, tail=(), gap=0, **steps):
    """Return the kernel of rows that follow one another after a gap in src, and without one in dst."""
    along = (("src", depth + gap), ("dst", outputs), *steps.items()) if rows > 1 else ()
    return offered(GemvKernel(outputs, depth, dtype, dst, bias, tail, rows=rows, row_steps=along))


@settings(max_examples=80)
@given(
    outputs=st.integers(16, 300),
    vectors=st.integers(1, 40),
    rows=st.integers(1, MOST_ROWS),
    gap=st.integers(0, 50),
    threads=st.integers(1, 5),
    has_bias=st.booleans(),
)
def check_sizes(outputs, vectors, rows, gap, threads, has_bias) -> None:
    depth = 16 * vectors
    kernel = few_rows(outputs, depth, rows, bias=F32 if has_bias else None, gap=gap)
    src, weights, bias = numbers(rows, depth + gap), numbers(outputs, depth), numbers(outputs)
    got = run(kernel, threads, src=src, weights=weights, **({"bias": bias} if has_bias else {}))
    exact = F.linear(src[:, :depth].double(), weights.double(), bias.double() if has_bias else None)
    assert (got.double() - exact).abs().max() <= 1e-6 * exact.abs().max() + 1e-5


def test_sizes(isa):
    check_sizes()


def test_a_row_that_is_no_whole_number_of_vectors_has_no_kernel(isa):
    assert offered(GemvKernel(64, 20, F32, F32)) is None
    assert offered(GemvKernel(7, 64, F32, F32)) is None
    assert offered(GemvKernel(64, 64, F32, F32, tail=(Tail("max", dtype=F32),))) is None
    assert offered(GemvKernel(64, 64, F32, F32, tail=(Tail("elu", 1.0),))) is None


def test_many_rows_long_ones_and_distant_ones_have_no_kernel(isa):
    assert few_rows(64, 64, MOST_ROWS) is not None and few_rows(64, 1 << 20, 2) is not None
    assert few_rows(64, 3072, 3) is None
    assert few_rows(64, 64, MOST_ROWS + 1) is None
    assert few_rows(64, 64, 2, gap=1 << 30) is None


@pytest.mark.parametrize(("alg", "alpha", "beta"), [
    ("relu", 0.0, 0.0), ("swish", 1.0, 0.0), ("gelu_erf", 0.0, 0.0), ("gelu_tanh", 0.0, 0.0), ("clip", -1.0, 2.0),
    ("linear", 0.125, 0.0),
])  # fmt: skip
def test_functions_follow_the_sums(isa, alg, alpha, beta):
    tail = (
        Tail("mul", dtype=F32),
        Tail(alg, alpha, beta),
        Tail("sub", dtype=F32, is_number=True),
        Tail("add", dtype=F32),
    )
    kernel = offered(GemvKernel(75, 256, F32, F32, F32, tail))
    src, weights, bias = numbers(256), numbers(75, 256) / 16, numbers(75)
    factor, number, other = numbers(75), numbers(1), numbers(75)
    got = run(kernel, src=src, weights=weights, bias=bias, post_op_0=factor, post_op_2=number, post_op_3=other)
    sums = F.linear(src.double(), weights.double(), bias.double()) * factor
    torch.testing.assert_close(got.double(), FUNCTIONS[alg](sums, alpha, beta) - number + other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", range(2, MOST_ROWS + 1))
def test_every_row_has_its_numbers_behind_the_sums(isa, rows):
    tail = (Tail("mul", dtype=F32, is_number=True), Tail("gelu_erf"), Tail("add", dtype=F32), Tail("sub", dtype=F32))
    kernel = few_rows(75, 256, rows, bias=F32, tail=tail, post_op_0=1, post_op_2=75)
    src, weights, bias = numbers(rows, 256), numbers(75, 256) / 16, numbers(75)
    factors, residual, shared = numbers(rows, 1), numbers(rows, 75), numbers(75)
    got = run(kernel, src=src, weights=weights, bias=bias, post_op_0=factors, post_op_2=residual, post_op_3=shared)
    sums = F.linear(src.double(), weights.double(), bias.double()) * factors
    torch.testing.assert_close(got.double(), F.gelu(sums) + residual - shared, rtol=1e-5, atol=1e-5)


@WITH_BF16
@pytest.mark.parametrize("dst", [F32, BF16])
@pytest.mark.parametrize("bias", [F32, BF16])
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_bf16_is_summed_in_f32(dst, bias, rows):
    tail = (Tail("gelu_erf"), Tail("add", dtype=BF16))
    kernel = few_rows(93, 1024, rows, BF16, dst, bias, tail, gap=32, post_op_1=93)
    whole, weights = numbers(rows, 1056, dtype=BF16), numbers(93, 1024, dtype=BF16) / 32
    shift, other = numbers(93, dtype=bias), numbers(rows, 93, dtype=BF16)
    got = run(kernel, src=whole, weights=weights, bias=shift, post_op_1=other)
    exact = F.gelu(F.linear(whole[:, :1024].double(), weights.double(), shift.double())) + other
    assert (got.double() - exact).abs().max() <= (2e-5 if dst is F32 else 2e-2)


def test_nan_and_infinity_stay_what_they_are(isa):
    weights = numbers(32, 64)
    weights[3, 7], weights[9, 1], weights[20, 2] = torch.nan, torch.inf, -torch.inf
    src = torch.ones(64)
    got = run(offered(GemvKernel(32, 64, F32, F32, tail=(Tail("relu"),))), src=src, weights=weights)
    expected = F.relu(weights.sum(1))
    assert torch.equal(got.isnan(), expected.isnan()) and got[9] == torch.inf and got[20] == 0


@pytest.mark.parametrize("rows", [2, 5, MOST_ROWS])
def test_nan_and_infinity_stay_in_their_row(isa, rows):
    src, weights = torch.ones(rows, 64), torch.rand(32, 64) + 0.1
    src[0, 9], src[-1, 63] = torch.nan, torch.inf
    got = run(few_rows(32, 64, rows), src=src, weights=weights)
    assert got[0].isnan().all() and (got[-1] == torch.inf).all() and got[1:-1].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_a_batch_reads_each_items_matrix_where_it_is(isa, threads, queries):
    heads, keys, depth = 5, 37, 64
    steps = (("src", depth), ("weights", depth), ("dst", queries * keys), ("post_op_1", queries))
    along = (("src", heads * depth), ("dst", keys), ("post_op_1", 1), ("post_op_2", keys))
    tail = (Tail("linear", 0.125), Tail("mul", dtype=F32, is_number=True), Tail("add", dtype=F32))
    kernel = offered(GemvKernel(keys, depth, F32, F32, None, tail, heads, steps, heads * depth, queries, along))
    query, key = numbers(queries, heads, depth), numbers(keys, heads, depth)
    factors, mask = numbers(heads, queries, 1), numbers(queries, keys)
    dst = torch.full((heads * queries * keys + 16,), 77.0)
    work = kernel.work(threads)
    tensors = {"src": query, "weights": key, "post_op_1": factors, "post_op_2": mask, "dst": dst}
    for name, tensor in tensors.items():
        work.point[name](tensor.data_ptr())
    work.run()
    expected = torch.einsum("qhd,khd->hqk", query, key) * 0.125 * factors + mask
    torch.testing.assert_close(dst[: expected.numel()].reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    assert (dst[expected.numel() :] == 77).all()
