"""Kernels over rows: right for all sizes, patterns and numbers of threads, and for special values."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import StandaloneKernel, broadcast_kernel_for, fold_kernel_for, rows, unavailable
from fmtprop.jit.rows import BROADCASTS, FOLDS
from fmtprop.layout import DataType
from tests.jit.test_channelwise import BF16, ISAS

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


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Kernels are those of an instruction set."""
    monkeypatch.setattr(rows, "isa", lambda: request.param)
    rows._broadcast.cache_clear()
    rows._fold.cache_clear()
    yield request.param
    rows._broadcast.cache_clear()
    rows._fold.cache_clear()


def run(kernel: StandaloneKernel, dims: tuple[int, ...], threads: int, **tensors: torch.Tensor) -> torch.Tensor:
    """Return the result; what is before and behind it must stay as it is."""
    size = torch.Size(dims).numel()
    dst = torch.full((size + 64,), 7.0, dtype=next(iter(tensors.values())).dtype)
    work = kernel.work(threads)
    for name, tensor in {**tensors, "dst": dst[32:]}.items():
        work.pointers[name].set_data_handle(tensor.data_ptr())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        work.run()
    finally:
        torch.set_num_threads(before)
    assert (dst[:32] == 7.0).all() and (dst[-32:] == 7.0).all()
    return dst[32:-32].view(dims)


def folded(alg: str, src: torch.Tensor, threads: int = 2) -> torch.Tensor:
    images, count, columns = src.shape
    dtype = F32 if src.dtype is torch.float32 else DataType.BF16
    kernel = fold_kernel_for(alg, images, count, columns, dtype)
    assert kernel is not None
    return run(kernel, (images, columns), threads, src=src)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=200, deadline=None)
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


@pytest.mark.parametrize("columns", [1, 17, 40])
@pytest.mark.parametrize("alg", FOLDS)
def test_special_values_are_pytorchs(isa, alg, columns):
    src = torch.randn(6, 75, columns)
    src[0, 3, 0], src[1, 74, -1], src[2, 0, 0], src[3] = nan, nan, inf, -inf
    src[4, 11, 0], src[4, 60, 0], src[5] = inf, -inf, inf
    torch.testing.assert_close(folded(alg, src), EXACT[alg](src), equal_nan=True)


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
        work.pointers[name].set_data_handle(tensor.data_ptr())
    work.run()
    assert torch.equal(src, expected)


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
    assert fold_kernel_for(alg, *sizes, DataType(dtype)) is None


def test_without_executable_memory_there_are_none(no_executable_memory):
    assert broadcast_kernel_for("add", ((5, 1), (40, 0)), F32) is None
    assert fold_kernel_for("sum", 1, 9, 16, F32) is None
