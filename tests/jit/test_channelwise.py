"""Kernels over the channels of channels-last tensors: right for all sizes and numbers of threads, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop import dnnl
from fmtprop.jit import ChannelKernel, channel_kernel_for, channelwise, unavailable
from fmtprop.jit.assembler import AVX2, AVX512
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType

WIDE = "avx512" in dnnl.lib().isa
ISAS = [AVX2, pytest.param(AVX512, marks=pytest.mark.skipif(not WIDE, reason="this CPU has no AVX-512"))]
BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU does not round to bf16")

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SIZES = dict(images=st.integers(1, 4), places=st.integers(1, 60), blocks=st.integers(1, 40), threads=st.integers(1, 5))


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Kernels are those of an instruction set."""
    monkeypatch.setattr(channelwise, "isa", lambda: request.param)
    channelwise._kernel.cache_clear()
    yield request.param
    channelwise._kernel.cache_clear()


def run(kernel: ChannelKernel, threads: int, **tensors: torch.Tensor) -> torch.Tensor:
    """Return the result; what is before and behind it must stay as it is."""
    places = kernel.places if kernel.alg == "scale" else 1
    size = kernel.images * places * kernel.channels
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
    return dst[32:-32].view(kernel.images, places, kernel.channels)


def made(alg: str, images: int, places: int, channels: int, dtype: str = "f32", shared: bool = False) -> ChannelKernel:
    kernel = channel_kernel_for(alg, images, places, channels, DataType(dtype), shared=shared)
    assert kernel is not None
    return kernel


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def check_average(images: int, places: int, blocks: int, threads: int) -> None:
    channels = 16 * blocks
    src = torch.randn(images, places, channels)
    got = run(made("average", images, places, channels), threads, src=src)
    exact = src.double().mean(1, keepdim=True)
    assert ((got.double() - exact).abs() <= 4e-7 * src.abs().amax(1, keepdim=True)).all()


@settings(max_examples=150, deadline=None)
@given(shared=st.booleans(), **SIZES)
def check_scale(images: int, places: int, blocks: int, threads: int, shared: bool) -> None:
    channels = 16 * blocks
    src, factors = torch.randn(images, places, channels), torch.randn(1 if shared else images, 1, channels)
    kernel = made("scale", images, places, channels, shared=shared)
    assert torch.equal(run(kernel, threads, src_0=src, src_1=factors), src * factors)


def test_averages_of_any_size_by_any_number_of_threads(isa):
    check_average()


def test_every_number_has_the_factor_of_its_image_and_channel(isa):
    check_scale()


def test_large_tensors_are_shared_out(isa):
    src, factors = torch.randn(1, 784, 240), torch.rand(1, 1, 240)
    for threads in (1, 2, 3):
        mean = run(made("average", 1, 784, 240), threads, src=src)
        torch.testing.assert_close(mean, src.mean(1, keepdim=True), atol=1e-6, rtol=1e-5)
        product = run(made("scale", 1, 784, 240), threads, src_0=src, src_1=factors)
        assert torch.equal(product, src * factors)


@BF16
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bf16_is_computed_in_f32_and_rounded_once(threads):
    src, factors = torch.randn(2, 300, 96).bfloat16(), torch.randn(2, 1, 96).bfloat16()
    mean = run(made("average", 2, 300, 96, "bf16"), threads, src=src)
    exact = src.double().mean(1, keepdim=True)
    assert ((mean.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()
    product = run(made("scale", 2, 300, 96, "bf16"), threads, src_0=src, src_1=factors)
    assert torch.equal(product, src * factors)


def test_the_result_can_lie_where_the_source_does(isa):
    src, factors = torch.randn(1, 200, 48), torch.randn(1, 1, 48)
    expected, work = src * factors, made("scale", 1, 200, 48).work(2)
    for name, tensor in {"src_0": src, "src_1": factors, "dst": src}.items():
        work.pointers[name].set_data_handle(tensor.data_ptr())
    work.run()
    assert torch.equal(src, expected)


def test_infinity_and_nan_go_on_in_their_channel_alone(isa):
    src = torch.ones(1, 50, 32)
    src[0, 3, 1], src[0, 7, 2], src[0, 8, 2], src[0, 49, 31] = inf, inf, -inf, nan
    mean = run(made("average", 1, 50, 32), 2, src=src).flatten()
    assert mean[1] == inf and mean[2].isnan() and mean[31].isnan()
    assert (mean[[0, *range(3, 31)]] == 1.0).all()
    factors = torch.full((1, 1, 32), 0.0)
    torch.testing.assert_close(
        run(made("scale", 1, 50, 32), 2, src_0=src, src_1=factors), src * factors, equal_nan=True
    )


@pytest.mark.parametrize(
    ("images", "places", "channels", "dtype"),
    [(1, 9, 17, "f32"), (1, 9, 4, "f32"), (0, 9, 16, "f32"), (1, 0, 16, "f32"), (1, 9, 16, "f16"), (1, 9, 16, "s8")],
)
@pytest.mark.parametrize("alg", ["average", "scale"])
def test_what_has_no_kernel(alg, images, places, channels, dtype):
    assert channel_kernel_for(alg, images, places, channels, DataType(dtype)) is None


def test_kernels_for_as_many_vectors_at_a_time_share_code():
    one, other = made("scale", 1, 9, 96), made("scale", 3, 50, 192)
    assert one.kernel is made("scale", 2, 7, 96).kernel
    assert one.fingerprint != made("average", 1, 9, 96).fingerprint
    assert one.repro != other.repro


def test_without_executable_memory_there_are_none(no_executable_memory):
    assert channel_kernel_for("scale", 1, 9, 16, DataType.F32) is None
