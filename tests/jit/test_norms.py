"""Group normalization by machine code, against f64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import GroupNormKernel, offered
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType

BF16 = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")


def normalized(src, groups, scale=None, shift=None, threads=2, dst=None):
    """Normalize [n, places, c]."""
    kernel = offered(GroupNormKernel(*src.shape, groups, 1e-5, DataType.from_any(src.dtype)))
    assert kernel is not None
    dst = torch.empty_like(src) if dst is None else dst
    work = kernel.work(threads)
    for name, tensor in {"src": src, "scale": scale, "shift": shift, "dst": dst}.items():
        if tensor is not None:
            work.point[name](tensor.data_ptr())
    work.run()
    return dst


def exact(src, groups, scale=None, shift=None):
    vectors = (None if one is None else one.double() for one in (scale, shift))
    return F.group_norm(src.double().mT, groups, *vectors).mT


@settings(max_examples=120)
@given(
    images=st.integers(1, 3),
    places=st.integers(1, 400),
    blocks=st.integers(1, 9),
    members=st.sampled_from([1, 2, 3, 5, 8, 16, 1000]),
    threads=st.integers(1, 5),
    affine=st.booleans(),
)
def check(images, places, blocks, members, threads, affine) -> None:
    channels = 16 * blocks
    groups = next(channels // n for n in range(min(members, channels), 0, -1) if channels % n == 0)
    if places * channels // groups == 1:
        return  # PyTorch refuses it
    src, scale, shift = 3 * torch.randn(images, places, channels) + 2, torch.randn(channels), torch.randn(channels)
    vectors = (scale, shift) if affine else ()
    error = (normalized(src, groups, *vectors, threads=threads) - exact(src, groups, *vectors)).abs().max()
    # of two or three numbers that are nearly equal, the deviation itself is uncertain
    assert error <= (2e-5 if places * channels // groups > 30 else 5e-3)


def test_groups_of_any_size(isa):
    check()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 8, 32, 320])
def test_large_tensors_are_shared_out(isa, groups, threads):
    src, scale, shift = torch.randn(2, 1000, 320), torch.randn(320), torch.randn(320)
    got = normalized(src, groups, scale, shift, threads)
    torch.testing.assert_close(got, exact(src, groups, scale, shift).float(), rtol=1e-5, atol=1e-5)


def test_a_mean_that_is_large_beside_the_deviation_costs_no_digits(isa):
    src = torch.randn(1, 5000, 32) + 1000
    error = (normalized(src, 4) - exact(src, 4)).abs().max()
    ours_in_rows = (F.group_norm(src.mT.contiguous(), 4).mT - exact(src, 4)).abs().max()
    assert error <= max(2 * ours_in_rows, torch.tensor(1e-3))


def test_a_result_can_lie_where_the_source_does(isa):
    src = torch.randn(2, 700, 64)
    expected = exact(src, 8).float()
    torch.testing.assert_close(normalized(src, 8, dst=src), expected, rtol=1e-5, atol=1e-5)


def test_infinity_and_nan_stay_in_their_group_and_image(isa):
    src = torch.randn(2, 50, 32)
    src[0, 3, 1], src[1, 7, 20] = torch.inf, torch.nan
    got = normalized(src, 4)
    spoiled = got.isnan()
    assert spoiled[0, :, :8].all() and spoiled[1, :, 16:24].all() and spoiled.sum() == 2 * 50 * 8


@BF16
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bf16_is_normalized_in_f32_and_rounded_once(threads):
    src, scale = torch.randn(2, 300, 96).bfloat16(), torch.rand(96) + 0.5
    right = exact(src, 6, scale, torch.zeros(96))
    got = normalized(src, 6, scale, torch.zeros(96), threads).double()
    assert ((got - right).abs() <= 2**-8 * right.abs() + 1e-5).all()


def test_problems_without_a_kernel():
    assert offered(GroupNormKernel(1, 10, 17, 1, 1e-5, DataType.F32)) is None
    assert offered(GroupNormKernel(1, 0, 16, 1, 1e-5, DataType.F32)) is None
    assert offered(GroupNormKernel(1, 10, 16, 1, 1e-5, DataType.F16)) is None
