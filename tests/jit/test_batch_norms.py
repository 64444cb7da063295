"""Batch normalization in training by machine code, with a function behind it, against f64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import BatchNormKernel, offered
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")
LIMITS = [None, (0.0, torch.inf), (0.0, 6.0), (-0.5, 0.75)]


def run(kernel, threads, **tensors):
    assert kernel is not None
    work = kernel.work(threads)
    for name, tensor in tensors.items():
        work.point[name](tensor.data_ptr())
    work.run()


def normalized(src, scale, shift, limits, threads=2, dst=None):
    """Normalize [places, c]; return dst, mean and variance."""
    pitches = (src.stride(0), src.shape[1] if dst is None else dst.stride(0))
    kernel = offered(BatchNormKernel(*src.shape, pitches, 1e-5, limits, DataType.from_any(src.dtype)))
    dst = torch.empty(src.shape, dtype=src.dtype) if dst is None else dst
    mean, variance = torch.empty(2, src.shape[1])
    run(kernel, threads, src=src, scale=scale, shift=shift, dst=dst, mean=mean, variance=variance)
    return dst, mean, variance


def gradients(src, diff_dst, mean, variance, scale, shift, limits, threads=2, diff_src=None):
    """Return the gradients by src, scale and shift."""
    diff_src = torch.empty(src.shape, dtype=src.dtype) if diff_src is None else diff_src
    pitches = (src.stride(0), diff_src.stride(0), diff_dst.stride(0))
    kernel = offered(BatchNormKernel(*src.shape, pitches, 1e-5, limits, DataType.from_any(src.dtype), gradient=True))
    diff_scale, diff_shift = torch.empty(2, src.shape[1])
    named = {"mean": mean, "variance": variance, "scale": scale, "shift": shift}
    diffs = {"diff_dst": diff_dst, "diff_src": diff_src, "diff_scale": diff_scale, "diff_shift": diff_shift}
    run(kernel, threads, src=src, **named, **diffs)
    return diff_src, diff_scale, diff_shift


def exact(src, scale, shift, limits, diff_dst):
    """Return dst and the gradients in f64, by autograd."""
    leaves = [one.double().requires_grad_() for one in (src, scale, shift)]
    dst = F.batch_norm(leaves[0], None, None, *leaves[1:], training=True)
    if limits is not None:
        dst = F.relu(dst) if limits[1] == torch.inf else F.hardtanh(dst, *limits)
    return dst.detach(), *torch.autograd.grad(dst, leaves, diff_dst.double())


def tangents(src, scale, shift, limits):
    """Return random numbers for the results; 0 where f32 and f64 may disagree on the side of a limit."""
    found, results = torch.randn(src.shape), exact(src, scale, shift, None, src)[0]
    for limit in limits or ():
        found[(results - limit).abs() < 1e-3] = 0
    return found.to(src.dtype)


@settings(max_examples=100)
@given(
    places=st.integers(2, 600),
    blocks=st.integers(1, 9),
    limits=st.sampled_from(LIMITS),
    gap=st.sampled_from([0, 16]),
    threads=st.integers(1, 4),
)
def check(places, blocks, limits, gap, threads) -> None:
    channels = 16 * blocks
    wide = 2 * torch.randn(places, channels + gap) + 1
    src, scale, shift = wide[:, gap:], torch.randn(channels), torch.randn(channels)
    diff_dst = tangents(src, scale, shift, limits)
    dst, *others = exact(src, scale, shift, limits, diff_dst)
    got, mean, variance = normalized(src, scale, shift, limits, threads)
    few = places < 20  # of a few numbers that are nearly equal, the deviation itself is uncertain
    assert (got - dst).abs().max() <= (2e-2 if few else 2e-5)
    if few:
        return
    torch.testing.assert_close(mean, src.double().mean(0).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, src.double().var(0, correction=0).float(), rtol=1e-5, atol=1e-5)
    found = gradients(src, diff_dst, mean, variance, scale, shift, limits, threads)
    for one, right in zip(found, others, strict=True):
        assert (one - right).abs().max() <= 1e-4 * max(1.0, float(right.abs().max()))


def test_any_sizes(isa):
    check()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limits", LIMITS)
def test_results_can_lie_where_operands_do(isa, limits, threads):
    src, scale, shift = torch.randn(900, 64), torch.rand(64) + 0.5, torch.randn(64)
    diff_dst = tangents(src, scale, shift, limits)
    dst, *others = exact(src, scale, shift, limits, diff_dst)
    _, mean, variance = normalized(src, scale, shift, limits, threads)
    found = gradients(src, diff_dst, mean, variance, scale, shift, limits, threads, diff_src=diff_dst)
    for one, right in zip(found, others, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-4)
    got, *_ = normalized(src, scale, shift, limits, threads, dst=src)
    torch.testing.assert_close(got.double(), dst, rtol=1e-5, atol=1e-5)


def test_a_mean_that_is_large_beside_the_deviation_costs_no_digits(isa):
    src, scale, shift = torch.randn(5000, 32) + 1000, torch.ones(32), torch.zeros(32)
    dst, _, variance = normalized(src, scale, shift, None)
    assert (dst - exact(src, scale, shift, None, src)[0]).abs().max() <= 1e-3
    torch.testing.assert_close(variance, src.double().var(0, correction=0).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("limits", LIMITS)
def test_nan_stays_in_its_channel_and_passes(isa, limits):
    src, scale, shift = torch.randn(200, 32), torch.ones(32), torch.zeros(32)
    src[7, 3], src[5, 20] = torch.nan, torch.inf
    dst, mean, variance = normalized(src, scale, shift, limits)
    assert dst[:, 3].isnan().all()
    assert dst.isnan().any(0).sum() == 2
    diff_dst = torch.randn(200, 32)
    diff_src, *_ = gradients(src, diff_dst, mean, variance, scale, shift, limits)
    assert diff_src[:, 3].isnan().all()
    assert diff_src[:, :3].isfinite().all()


def test_a_gradient_that_is_nan_passes_where_nothing_is_limited(isa):
    src, scale, shift = torch.randn(200, 16), torch.ones(16), torch.zeros(16)
    dst, mean, variance = normalized(src, scale, shift, (0.0, torch.inf))
    diff_dst = torch.randn(200, 16)
    inside, outside = int(dst[:, 2].argmax()), int(dst[:, 5].argmin())
    diff_dst[inside, 2] = diff_dst[outside, 5] = torch.nan
    _, diff_scale, diff_shift = gradients(src, diff_dst, mean, variance, scale, shift, (0.0, torch.inf))
    assert diff_shift.isnan().nonzero().flatten().tolist() == [2]
    assert diff_scale.isnan().nonzero().flatten().tolist() == [2]


@BF16
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("limits", LIMITS)
def test_bf16_is_computed_in_f32_and_rounded_once(limits, threads):
    src, scale, shift = torch.randn(500, 96).bfloat16(), torch.rand(96) + 0.5, torch.randn(96)
    diff_dst = tangents(src, scale, shift, limits)
    dst, diff_src, *vectors = exact(src, scale, shift, limits, diff_dst)
    got, mean, variance = normalized(src, scale, shift, limits, threads)
    assert ((got.double() - dst).abs() <= 2**-8 * dst.abs() + 1e-5).all()
    found, *found_vectors = gradients(src, diff_dst, mean, variance, scale, shift, limits, threads)
    assert ((found.double() - diff_src).abs() <= 2**-8 * diff_src.abs() + 1e-4).all()
    for one, right in zip(found_vectors, vectors, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-3)


def test_problems_without_a_kernel():
    for places, channels, dtype in ((10, 17, DataType.F32), (0, 16, DataType.F32), (10, 16, DataType.F16)):
        assert offered(BatchNormKernel(places, channels, (channels, channels), 1e-5, None, dtype)) is None
