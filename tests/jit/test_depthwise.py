"""Depthwise convolutions: results are PyTorch's for every size of the rows, window and channels, and special values."""

import pytest
import torch
import torch.nn.functional as F

from fmtprop.jit import DepthwiseKernel, Tail, offered
from fmtprop.jit.grouped_convolution import Row
from fmtprop.jit.kernel import serves
from fmtprop.layout import DataType

#: channels, rows and columns, window, strides, dilations, padding
CASES = {
    "one block": (16, (5, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a pair of vectors": (32, (6, 31), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a pair and a vector": (48, (9, 12), (3, 3), (1, 1), (1, 1), (1, 1)),
    "two overlapping vectors": (24, (7, 29), (3, 3), (1, 1), (1, 1), (1, 1)),
    "two overlapping pairs": (57, (7, 14), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a pair and an overlapping vector": (33, (4, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "with strides": (40, (13, 57), (3, 3), (2, 2), (1, 1), (1, 1)),
    "strides and an even size": (32, (14, 28), (5, 5), (2, 2), (1, 1), (2, 2)),
    "window of 7": (32, (9, 23), (7, 7), (1, 1), (1, 1), (3, 3)),
    "window of 1": (64, (3, 40), (1, 1), (1, 1), (1, 1), (0, 0)),
    "window of one row": (32, (5, 33), (1, 5), (1, 1), (1, 1), (0, 2)),
    "with dilation": (32, (17, 19), (3, 5), (1, 1), (3, 2), (2, 4)),
    "more padding than the window": (16, (3, 3), (3, 3), (1, 2), (1, 1), (4, 5)),
}
TAILS = {
    "relu": (F.relu, 0.0, 0.0),
    "swish": (F.silu, 1.0, 0.0),
    "clip": (F.relu6, 0.0, 6.0),
    "hardswish": (F.hardswish, 1 / 6, 0.5),
}

#: relative error of the results of each data type
TOLERANCE = {DataType.F32: 1e-5, DataType.BF16: 5e-3}

TORCH = {DataType.F32: torch.float32, DataType.BF16: torch.bfloat16}


@pytest.fixture(params=[DataType.F32, DataType.BF16], ids=["f32", "bf16"])
def dtype(request, isa):
    if request.param is DataType.BF16 and (isa.lanes != 16 or not serves(DataType.BF16)):
        pytest.skip("kernels in bf16 need AVX-512 with bf16")
    return request.param


def kernel_of(src, window, dst, strides, dilates, pads, dtype, *, has_bias=False, tail=()):
    heights, row = (
        (src.shape[axis], dst.shape[axis], window[axis - 2], strides[axis - 2], dilates[axis - 2], pads[axis - 2])
        for axis in (2, 3)
    )
    return DepthwiseKernel(*src.shape[:2], heights, Row(*row), dtype, has_bias=has_bias, tail=tail)


def compute(src, weights, bias, strides, dilates, pads, dtype, tail=(), threads=2):
    """Return the kernel's result and PyTorch's in f64, before the tail."""
    src, weights = src.to(TORCH[dtype]), weights.to(TORCH[dtype])
    bias_64 = None if bias is None else bias.double()
    expected = F.conv2d(src.double(), weights.double(), bias_64, strides, pads, dilates, src.shape[1])
    window = weights.shape[2:]
    kernel = offered(
        kernel_of(src, window, expected, strides, dilates, pads, dtype, has_bias=bias is not None, tail=tail)
    )
    if kernel is None:
        return None, expected
    dst = torch.full(expected.permute(0, 2, 3, 1).shape, 9.0, dtype=src.dtype)
    tensors = {
        "src": src.permute(0, 2, 3, 1).contiguous(),
        "weights": weights.permute(2, 3, 0, 1).contiguous(),
        "dst": dst,
    }
    work = kernel.work(threads)
    for name, tensor in {**tensors, **({} if bias is None else {"bias": bias})}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    return dst.permute(0, 3, 1, 2), expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_pytorch(case, threads, isa, dtype):
    channels, size, window, strides, dilates, pads = CASES[case]
    src, weights, bias = torch.randn(2, channels, *size), torch.randn(channels, 1, *window), torch.randn(channels)
    result, expected = compute(src, weights, bias, strides, dilates, pads, dtype, threads=threads)
    assert result.shape == expected.shape
    assert (result - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("alg", TAILS)
def test_a_function_behind_it(alg, isa, dtype):
    function, alpha, beta = TAILS[alg]
    src, weights = torch.randn(1, 48, 5, 33), torch.randn(48, 1, 3, 3)
    tail = (Tail(alg, alpha, beta),)
    result, expected = compute(src, weights, None, (1, 1), (1, 1), (1, 1), dtype, tail=tail)
    assert (result - function(expected)).abs().max() < TOLERANCE[dtype] * expected.abs().max()


def test_nan_and_infinities_are_those_of_pytorch(isa, dtype):
    src, weights = torch.randn(1, 48, 6, 30), torch.randn(48, 1, 3, 3)
    src[0, 3, 2, 5], src[0, 17, 4, 29], src[0, 40, 0, 0] = float("nan"), float("inf"), float("-inf")
    result, expected = compute(src, weights, None, (1, 1), (1, 1), (1, 1), dtype, tail=(Tail("relu"),))
    assert torch.equal(result.isnan(), F.relu(expected).isnan())
    assert torch.equal(result.isinf(), F.relu(expected).isinf())


def test_other_problems_have_no_kernel(isa, dtype):
    src = torch.empty(1, 24, 9, 9)
    for channels, window, tail in (
        (7, (3, 3), ()),  # no whole vector
        (24, (3, 9), ()),  # a wide window
        (24, (3, 3), (Tail("logistic"),)),
        (24, (3, 3), (Tail("add", dtype=DataType.F32),)),
    ):
        src = torch.empty(1, channels, 9, 9)
        assert offered(kernel_of(src, window, src, (1, 1), (1, 1), (1, 1), dtype, tail=tail)) is None
