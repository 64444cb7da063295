"""Kernels of our own: right for every number, for any number of threads, and nowhere else."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop import dnnl
from fmtprop.errors import GraphError
from fmtprop.jit import CHUNK_NBYTES, Kernel, Work, kernel, kernel_for, unavailable
from fmtprop.jit.functions import FUNCTIONS
from fmtprop.jit.isa import AVX2, AVX512
from fmtprop.jit.programs import function
from fmtprop.layout import DataType
from tests.threads import torch_threads

MEANING = {
    "swish": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "clip": lambda x: x.clamp(-0.5, 6.0),
    "hardswish": lambda x: x * (x / 6 + 0.5).clamp(0.0, 1.0),
    "linear": lambda x: 1.7 * x,
    "tanh": torch.tanh,
}
PARAMETERS = {"swish": (1.0, 0.0), "clip": (-0.5, 6.0), "hardswish": (1 / 6, 0.5), "linear": (1.7, 0.0)}
WIDE = "avx512" in dnnl.lib().isa

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def parameters(alg: str) -> tuple[float, float]:
    return PARAMETERS.get(alg, (0.0, 0.0))


def kernel_of(isa, alg: str, bf16: bool = False) -> Kernel:
    return Kernel(alg, *function(isa, lambda a, x: FUNCTIONS[alg](a, x, *parameters(alg)), bf16=bf16))


def test_every_function_can_be_asked_for():
    assert kernel._WRITTEN.keys() == FUNCTIONS.keys() == MEANING.keys()


def test_a_function_with_more_vectors_than_there_are_is_refused():
    def greedy(a, x):
        return [a.vector() for _ in range(9)][-1]

    with pytest.raises(GraphError, match="more than 8 vectors"):
        function(AVX2, greedy, bf16=False)


def applied(kernel: Kernel, numbers: torch.Tensor) -> torch.Tensor:
    result = numbers.clone()
    work = Work(kernel, result.numel() * result.element_size())
    work.set_data_handle(result.data_ptr())
    work.run()
    return result


def every_magnitude() -> torch.Tensor:
    sizes = torch.logspace(-38, 38, 4000, dtype=torch.float64).float()
    close = torch.linspace(-110, 110, 8192 - 16)
    return torch.cat([sizes, -sizes, close, torch.zeros(16), torch.zeros(-(8000 + 8192) % 32)])


@pytest.mark.parametrize("alg", MEANING)
def test_f32_is_as_exact_as_pytorch(isa, alg):
    numbers = every_magnitude()
    exact = MEANING[alg](numbers.double())
    got = applied(kernel_of(isa, alg), numbers)
    bound = 3e-7 if alg == "tanh" else 2e-7  # oneDNN's tanh is exact to 1e-7, in twice the time
    assert ((got.double() - exact).abs() <= bound * numbers.double().abs() + 1e-37).all()


def test_swish_keeps_its_digits_far_below_zero():
    numbers = torch.linspace(-80, 80, 4096)
    exact = F.silu(numbers.double())
    error = (applied(kernel_of(AVX512 if WIDE else AVX2, "swish"), numbers).double() - exact).abs() / exact.abs()
    assert error.max() < 5e-7


@pytest.mark.parametrize("alg", MEANING)
def test_bf16_is_the_nearest_number(alg):
    found = kernel_for(alg, *parameters(alg), DataType.BF16)
    if found is None:
        pytest.skip("no bf16 here")
    numbers = torch.linspace(-30, 30, 1 << 14).bfloat16()
    exact = MEANING[alg](numbers.double())
    error = (applied(found, numbers).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 3e-7 * numbers.double().abs()).all()


@pytest.mark.parametrize("alg", MEANING)
def test_infinity_and_nan_are_pytorchs(isa, alg):
    special = torch.tensor([inf, -inf, nan, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45] + [1.0] * 7)
    got = applied(kernel_of(isa, alg), special)
    # by the formulas: PyTorch's own loops differ in -inf between whole vectors and the rest
    formulas = {
        "swish": lambda x: x / (1 + torch.exp(-x)),
        "gelu_erf": lambda x: x / 2 * (torch.erf(x * 0.5**0.5) + 1),
    }
    expected = formulas.get(alg, MEANING[alg])(special)
    torch.testing.assert_close(got, expected, equal_nan=True)


@settings(max_examples=60)
@given(chunks=st.integers(1, 700), threads=st.integers(1, 5))
def check_every_number(isa, chunks, threads):
    count = chunks * CHUNK_NBYTES // 4
    numbers = torch.full((count + 64,), 2.0)
    with torch_threads(threads):
        work = Work(kernel_of(isa, "swish"), count * 4)
        work.set_data_handle(numbers[32:].data_ptr())
        work.run()
    once = F.silu(torch.tensor(2.0)).item()
    assert torch.allclose(numbers[32 : 32 + count], torch.tensor(once), rtol=1e-6)
    assert (numbers[:32] == 2.0).all() and (numbers[32 + count :] == 2.0).all()


def test_every_number_is_changed_once_and_no_other(isa):
    check_every_number(isa)


@pytest.mark.parametrize(
    ("alg", "alpha", "beta", "dtype"),
    [
        *(("mish", 0.0, 0.0, "f32"), ("swish", 2.0, 0.0, "f32"), ("swish", 1.0, 0.0, "f16")),
        *(("logistic", 0.0, 0.0, "f32"), ("relu", 0.1, 0.0, "f32"), ("clip", 0.5, 1.0, "f32")),
    ],
)
def test_what_has_no_kernel(alg, alpha, beta, dtype):
    assert kernel_for(alg, alpha, beta, DataType(dtype)) is None


def test_without_executable_memory_there_are_none_and_doctor_says_why(no_executable_memory):
    assert "no executable memory" in unavailable() and "mprotect refuses" in unavailable()
    assert kernel_for("swish", 1.0, 0.0, DataType.F32) is None
