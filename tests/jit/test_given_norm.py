"""Batch normalization with given statistics: results are PyTorch's for all sizes, operands and special values."""

import pytest
import torch
import torch.nn.functional as F

from fmtprop.jit import GemvKernel, GivenNormKernel, NBitsKernel, Tail, offered
from fmtprop.jit.kernel import isa, serves
from fmtprop.layout import DataType

TORCH = {DataType.F32: torch.float32, DataType.BF16: torch.bfloat16}

#: relative error of the results of each data type
TOLERANCE = {DataType.F32: 2e-6, DataType.BF16: 5e-3}


@pytest.fixture(params=[DataType.F32, DataType.BF16], ids=["f32", "bf16"])
def dtype(request, isa):
    if request.param is DataType.BF16 and (isa.lanes != 16 or not serves(DataType.BF16)):
        pytest.skip("kernels in bf16 need AVX-512 with bf16")
    return request.param


def compute(rows, places, channels, dtype, *, scale=True, shift=True, relu=False, src=None, threads=2):
    """Return the kernel's result and PyTorch's in f64."""
    src = (torch.randn(rows, places, channels) if src is None else src).to(TORCH[dtype])
    vectors = {"mean": torch.randn(channels), "variance": torch.rand(channels) + 0.1}
    vectors |= {"scale": torch.randn(channels)} if scale else {}
    vectors |= {"shift": torch.randn(channels)} if shift else {}
    tail = (Tail("relu"),) if relu else ()
    kernel = offered(GivenNormKernel(rows, places, channels, 1e-3, dtype, has_scale=scale, has_shift=shift, tail=tail))
    dst = torch.full_like(src, 9.0)
    work = kernel.work(threads)
    for name, tensor in {"src": src, "dst": dst, **vectors}.items():
        work.point[name](tensor.data_ptr())
    for function, *arguments in work.calls:
        function(*arguments)
    double = {name: vector.double() for name, vector in vectors.items()}
    statistics = (double["mean"], double["variance"], double.get("scale"), double.get("shift"))
    expected = F.batch_norm(src.double().flatten(0, 1), *statistics, eps=1e-3).unflatten(0, (rows, places))
    return dst, F.relu(expected) if relu else expected


@pytest.mark.parametrize("size", [(1, 1, 16), (5, 7, 24), (6, 31, 32), (3, 56, 96), (9, 14, 57), (4, 12, 200)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("scale", "shift", "relu"), [(True, True, True), (False, True, False), (True, False, False)])
def test_the_result_is_that_of_pytorch(size, threads, scale, shift, relu, dtype):
    result, expected = compute(*size, dtype, scale=scale, shift=shift, relu=relu, threads=threads)
    assert (result - expected).abs().max() < TOLERANCE[dtype] * (1 + expected.abs().max())


def test_nan_and_infinities_are_those_of_pytorch(dtype):
    src = torch.randn(4, 9, 48)
    src[0, 3, 5], src[1, 8, 47], src[3, 0, 17] = float("nan"), float("inf"), float("-inf")
    result, expected = compute(4, 9, 48, dtype, relu=True, src=src)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())


def test_few_channels_have_no_kernel(dtype):
    assert offered(GivenNormKernel(4, 9, 7, 1e-3, dtype, has_scale=True, has_shift=True)) is None


def test_a_vector_that_overlaps_the_one_before_forbids_to_write_in_place():
    """It would be normalized twice: channels that are no whole vectors end in such a vector."""
    lanes = isa().lanes
    for channels, in_place in ((2 * lanes, True), (2 * lanes + 4, False)):
        kernel = GivenNormKernel(4, 5, channels, 1e-5, DataType.F32, has_scale=True, has_shift=True)
        assert kernel.overwrites is in_place
        assert GemvKernel(channels, 4 * lanes, DataType.F32, DataType.F32).overwrites is in_place
        assert NBitsKernel(channels, 128, 8, 128, DataType.F32, DataType.F32).overwrites is in_place
