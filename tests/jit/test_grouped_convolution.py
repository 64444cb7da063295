"""Convolutions in groups of few channels, computed by machine code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fmtprop.jit import GroupedConvolutionKernel, Tail, offered
from fmtprop.jit.grouped_convolution import Row
from fmtprop.layout import DataType

#: channels of a group (in, out), groups, rows and columns, window, strides, dilations, padding
CASES = {
    "two channels a group": (2, 2, 16, (9, 31), (3, 3), (1, 1), (1, 1), (1, 1)),
    "four channels a group": (4, 4, 32, (6, 28), (3, 3), (1, 1), (1, 1), (1, 1)),
    "with strides": (4, 4, 8, (13, 57), (3, 3), (2, 2), (1, 1), (1, 1)),
    "more padding than the window": (4, 4, 8, (3, 3), (3, 3), (1, 2), (1, 1), (4, 5)),
    "with dilation": (4, 4, 8, (17, 19), (3, 5), (1, 1), (3, 2), (2, 4)),
    "a window of one position": (8, 8, 3, (5, 15), (1, 1), (1, 1), (1, 1), (0, 0)),
    "one block of channels": (8, 8, 4, (7, 29), (3, 3), (1, 1), (1, 1), (1, 1)),
    "two blocks side by side": (16, 16, 3, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "three blocks side by side": (8, 24, 2, (9, 13), (5, 1), (1, 2), (1, 1), (2, 0)),
    "several units of a group": (32, 40, 2, (6, 9), (1, 7), (1, 1), (1, 1), (0, 3)),
}
TAILS = {"relu": (F.relu, 0.0, 0.0), "swish": (F.silu, 1.0, 0.0), "gelu_erf": (F.gelu, 0.0, 0.0)}


def kernel_of(src, weights, dst, strides, dilates, pads, *, has_bias=False, tail=()):
    groups, outputs, inputs, *window = weights.shape
    heights, row = (
        (src.shape[axis], dst.shape[axis], window[axis - 2], strides[axis - 2], dilates[axis - 2], pads[axis - 2])
        for axis in (2, 3)
    )
    return GroupedConvolutionKernel(
        src.shape[0], groups, inputs, outputs, heights, Row(*row), has_bias=has_bias, tail=tail
    )


def blocked(tensor, lanes):
    return tensor.unflatten(1, (-1, lanes)).permute(0, 1, 3, 4, 2).contiguous()


def packed(weights, lanes, is_few):
    if is_few:
        return weights.unflatten(0, (-1, lanes // weights.shape[1])).permute(0, 4, 5, 3, 1, 2).contiguous()
    parts = weights.unflatten(1, (-1, lanes)).unflatten(3, (-1, lanes))
    return parts.permute(0, 1, 3, 5, 6, 4, 2).contiguous()


def compute(src, weights, bias, strides, dilates, pads, isa, tail=(), threads=2):
    """Return the kernel's result and PyTorch's in f64, both before the tail of PyTorch."""
    groups = weights.shape[0]
    flat = weights.flatten(0, 1)
    bias_64 = None if bias is None else bias.double()
    expected = F.conv2d(src.double(), flat.double(), bias_64, strides, pads, dilates, groups)
    kernel = offered(kernel_of(src, weights, expected, strides, dilates, pads, has_bias=bias is not None, tail=tail))
    if kernel is None:
        return None, expected
    dst = torch.full_like(blocked(expected.float(), isa.lanes), 9.0)
    tensors = {"src": blocked(src, isa.lanes), "weights": packed(weights, isa.lanes, kernel.is_few), "dst": dst}
    work = kernel.work(threads)
    for name, tensor in {**tensors, **({} if bias is None else {"bias": bias})}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    return dst.permute(0, 1, 4, 2, 3).flatten(1, 2), expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_pytorch(case, threads, isa):
    inputs, outputs, groups, size, window, strides, dilates, pads = CASES[case]
    src, weights = torch.randn(2, groups * inputs, *size), torch.randn(groups, outputs, inputs, *window)
    bias = torch.randn(groups * outputs)
    result, expected = compute(src, weights, bias, strides, dilates, pads, isa, threads=threads)
    if isa.lanes == 16 and inputs > 4:
        assert result is None
        return
    assert result.shape == expected.shape
    assert (result - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("alg", TAILS)
def test_a_function_behind_it(alg, isa):
    function, alpha, beta = TAILS[alg]
    src, weights = torch.randn(1, 32, 5, 33), torch.randn(8, 4, 4, 3, 3)
    result, expected = compute(src, weights, None, (1, 1), (1, 1), (1, 1), isa, tail=(Tail(alg, alpha, beta),))
    assert (result - function(expected)).abs().max() < 1e-5 * expected.abs().max()


def test_nan_and_infinities_are_those_of_pytorch(isa):
    src, weights = torch.randn(1, 32, 6, 30), torch.randn(8, 4, 4, 3, 3)
    src[0, 3, 2, 5], src[0, 17, 4, 29] = float("nan"), float("inf")
    result, expected = compute(src, weights, None, (1, 1), (1, 1), (1, 1), isa, tail=(Tail("relu"),))
    assert torch.equal(result.isnan(), F.relu(expected).isnan())
    assert torch.equal(result.isinf(), F.relu(expected).isinf())


def test_other_problems_have_no_kernel(isa):
    src, dst = torch.empty(1, 24, 9, 9), torch.empty(1, 24, 9, 9)
    for weights, tail in (
        (torch.empty(2, 12, 12, 3, 3), ()),  # no whole blocks
        (torch.empty(8, 3, 3, 3, 3), ()),
        (torch.empty(1, 24, 24, 3, 3), ()),  # one group
        (torch.empty(3, 8, 8, 3, 9), ()),  # a wide window
        (torch.empty(6, 4, 4, 3, 3), (Tail("logistic"),)),
        (torch.empty(6, 4, 4, 3, 3), (Tail("add", dtype=DataType.F32),)),
    ):
        assert offered(kernel_of(src, weights, dst, (1, 1), (1, 1), (1, 1), tail=tail)) is None
