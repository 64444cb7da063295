"""Kernels over rows: right for all sizes, patterns and numbers of threads, and for special values."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import (
    AverageKernel,
    EltwiseKernel,
    FoldKernel,
    StandaloneKernel,
    broadcast_kernel_for,
    offered,
    unavailable,
)
from fmtprop.jit.kernel import takes
from fmtprop.jit.rows import BROADCASTS, FOLDS
from fmtprop.layout import DataType
from tests.threads import torch_threads

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU does not round to bf16")

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

F32 = DataType.F32
FUNCTIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
EXACT = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
}


def run(kernel: StandaloneKernel, dims: tuple[int, ...], threads: int, **tensors: torch.Tensor) -> torch.Tensor:
    """Return the result; what is before and behind it must stay as it is."""
    size = torch.Size(dims).numel()
    dst = torch.full((size + 64,), 7.0, dtype=next(iter(tensors.values())).dtype)
    work = kernel.work(threads)
    for name, tensor in {**tensors, "dst": dst[32:]}.items():
        work.point[name](tensor.data_ptr())
    with torch_threads(threads):
        work.run()
    assert (dst[:32] == 7.0).all() and (dst[-32:] == 7.0).all()
    return dst[32:-32].view(dims)


def folded(alg: str, src: torch.Tensor, threads: int = 2) -> torch.Tensor:
    images, count, columns = src.shape
    dtype = F32 if src.dtype is torch.float32 else DataType.BF16
    kernel = offered(FoldKernel(alg, images, count, columns, dtype))
    assert kernel is not None
    return run(kernel, (images, columns), threads, src=src)


def averaged(src: torch.Tensor, threads: int = 2) -> torch.Tensor:
    images, places, channels = src.shape
    kernel = offered(AverageKernel(images, places, channels, F32 if src.dtype is torch.float32 else DataType.BF16))
    assert kernel is not None
    return run(kernel, (images, channels), threads, src=src)


@settings(max_examples=150)
@given(
    alg=st.sampled_from(BROADCASTS),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(16, 700)),
    kept=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    threads=st.integers(1, 5),
)
def check_broadcast(alg, sizes, kept, threads) -> None:
    src = torch.randn(sizes)
    other = torch.rand([size if keep else 1 for size, keep in zip(sizes, kept, strict=True)]) + 0.5
    steps = [step if keep else 0 for step, keep in zip(other.stride(), kept, strict=True)]
    kernel = broadcast_kernel_for(alg, tuple(zip(sizes, steps, strict=True)), F32)
    assert kernel is not None
    assert torch.equal(run(kernel, sizes, threads, src_0=src, src_1=other), FUNCTIONS[alg](src, other))


def test_every_pattern_of_broadcast(isa):
    check_broadcast()


@settings(max_examples=200)
@given(
    alg=st.sampled_from(list(FOLDS)),
    images=st.integers(1, 5),
    count=st.integers(1, 300),
    columns=st.one_of(st.just(1), st.integers(16, 200)),
    threads=st.integers(1, 5),
)
def check_fold(alg, images, count, columns, threads) -> None:
    src = torch.randn(images, count, columns)
    got, exact = folded(alg, src, threads).double(), EXACT[alg](src.double())
    tolerance = 1e-6 * EXACT["sum"](src.double().abs()) if alg in ("sum", "mean", "norm") else torch.zeros(())
    assert ((got - exact).abs() <= tolerance).all()


def test_folds_of_any_size(isa):
    check_fold()


@settings(max_examples=150)
@given(images=st.integers(1, 4), places=st.integers(1, 60), blocks=st.integers(1, 40), threads=st.integers(1, 5))
def check_average(images, places, blocks, threads) -> None:
    src = torch.randn(images, places, 16 * blocks)
    error = (averaged(src, threads).double() - src.double().mean(1)).abs()
    assert (error <= 4e-7 * src.abs().amax(1)).all()


def test_averages_of_any_size(isa):
    check_average()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_tensors_are_shared_out(isa, threads):
    src, factors = torch.randn(1, 784, 240), torch.rand(1, 1, 240)
    torch.testing.assert_close(averaged(src, threads), src.mean(1), atol=1e-6, rtol=1e-5)
    kernel = broadcast_kernel_for("mul", ((784, 0), (240, 1)), F32)
    assert kernel is not None
    assert torch.equal(run(kernel, (1, 784, 240), threads, src_0=src, src_1=factors), src * factors)


@pytest.mark.parametrize("columns", [1, 17, 40])
@pytest.mark.parametrize("alg", FOLDS)
def test_special_values_are_pytorchs(isa, alg, columns):
    src = torch.randn(6, 75, columns)
    src[0, 3, 0], src[1, 74, -1], src[2, 0, 0], src[3] = nan, nan, inf, -inf
    src[4, 11, 0], src[4, 60, 0], src[5] = inf, -inf, inf
    torch.testing.assert_close(folded(alg, src), EXACT[alg](src), equal_nan=True)


def test_infinity_and_nan_go_on_in_their_channel_alone(isa):
    src = torch.ones(1, 50, 32)
    src[0, 3, 1], src[0, 7, 2], src[0, 8, 2], src[0, 49, 31] = inf, inf, -inf, nan
    torch.testing.assert_close(averaged(src), src.mean(1), equal_nan=True)


@BF16
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bf16_is_averaged_in_f32_and_rounded_once(threads):
    src = torch.randn(2, 300, 96).bfloat16()
    exact = src.double().mean(1)
    assert ((averaged(src, threads).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()


@BF16
@pytest.mark.parametrize("columns", [1, 33])
@pytest.mark.parametrize("alg", FOLDS)
def test_bf16_is_folded_in_f32_and_rounded_once(alg, columns):
    src = torch.randn(3, 77, columns).bfloat16()
    torch.testing.assert_close(folded(alg, src), EXACT[alg](src.float()).bfloat16(), rtol=2**-8, atol=1e-5)


@BF16
@pytest.mark.parametrize("step", [0, 1])
def test_bf16_broadcasts_are_rounded_once(step):
    src, other = torch.randn(5, 37).bfloat16(), torch.rand(5 if step == 0 else 1, 1 if step == 0 else 37).bfloat16()
    kernel = broadcast_kernel_for("mul", ((5, 1 - step), (37, step)), DataType.BF16)
    assert kernel is not None
    assert torch.equal(run(kernel, (5, 37), 2, src_0=src, src_1=other), src * other)


def test_a_result_can_lie_where_the_source_does(isa):
    src, other = torch.randn(40, 49), torch.rand(40, 1)
    expected = src * other
    kernel = broadcast_kernel_for("mul", ((40, 1), (49, 0)), F32)
    assert kernel is not None
    work = kernel.work(2)
    for name, tensor in {"src_0": src, "src_1": other, "dst": src}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    assert torch.equal(src, expected)


@pytest.mark.parametrize(("rows", "length"), [(1, 40), (3, 16), (40, 99)])
def test_rows_of_a_source_may_have_gaps(isa, rows, length):
    wide, other = torch.randn(rows, length + 21), torch.rand(rows, length)
    src = wide[:, 21:]
    kernel = broadcast_kernel_for("sub", ((rows, length), (length, 1)), F32, pitch=length + 21)
    assert kernel is not None
    assert torch.equal(run(kernel, (rows, length), 2, src_0=src, src_1=other), src - other)


def test_few_long_rows_are_divided():
    kernel = broadcast_kernel_for("add", ((2, 1), (100_000, 0)), F32)
    assert kernel is not None
    assert kernel.rows >= 16 and kernel.rows * kernel.length == 200_000


@pytest.mark.parametrize(
    ("alg", "axes", "dtype"),
    [
        ("max", ((5, 1), (40, 0)), "f32"),
        ("add", ((5, 1), (7, 0)), "f32"),
        ("add", ((5, 1), (40, 5)), "f32"),
        ("add", ((5, 1), (40, 0)), "f16"),
        ("add", (), "f32"),
    ],
)
def test_broadcasts_without_a_kernel(alg, axes, dtype):
    assert broadcast_kernel_for(alg, axes, DataType(dtype)) is None


@pytest.mark.parametrize(
    ("alg", "sizes", "dtype"),
    [("mul", (1, 9, 16), "f32"), ("sum", (1, 9, 7), "f32"), ("sum", (0, 9, 16), "f32"), ("sum", (1, 9, 16), "s8")],
)
def test_folds_without_a_kernel(alg, sizes, dtype):
    assert offered(FoldKernel(alg, *sizes, DataType(dtype))) is None


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((1, 9, 17), "f32"), ((1, 9, 4), "f32"), ((0, 9, 16), "f32"), ((1, 0, 16), "f32"), ((1, 9, 16), "s8")],
)
def test_averages_without_a_kernel(sizes, dtype):
    assert offered(AverageKernel(*sizes, DataType(dtype))) is None


def test_kernels_for_as_many_vectors_at_a_time_share_code():
    one, other, alike = (offered(AverageKernel(*sizes, F32)) for sizes in ((1, 9, 96), (3, 50, 192), (2, 7, 96)))
    assert one is not None and other is not None and alike is not None
    assert one.kernel is alike.kernel
    assert one.fingerprint != offered(FoldKernel("mean", 1, 9, 96, F32)).fingerprint
    assert one.repro != other.repro


def test_without_executable_memory_there_are_none(no_executable_memory):
    assert offered(AverageKernel(1, 9, 16, F32)) is None
    assert broadcast_kernel_for("add", ((5, 1), (40, 0)), F32) is None
    assert offered(FoldKernel("sum", 1, 9, 16, F32)) is None


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("alg", "meaning"), [("tanh", torch.tanh), ("gelu_erf", F.gelu), ("swish", F.silu)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_a_function_of_another_tensor(dtype: torch.dtype, alg: str, meaning: Any, threads: int) -> None:
    src = torch.linspace(-9, 9, 32 * 5).to(dtype)
    kernel = EltwiseKernel(alg, 1.0, 0.0, src.numel(), F32 if dtype is torch.float32 else DataType.BF16)
    assert kernel.is_offered
    torch.testing.assert_close(run(kernel, tuple(src.shape), threads, src=src), meaning(src), rtol=1e-2, atol=1e-6)
