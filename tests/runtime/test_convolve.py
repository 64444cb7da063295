"""The convolution that checks compare with: as PyTorch's, and not PyTorch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.ops import convolution
from fmtprop.ops.convolution import Conv
from fmtprop.runtime.convolve import convolve
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget
from tests.targets import nodes


def quarters(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randint(-8, 9, shape) / 4).to(dtype)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Conv, dict[str, torch.Tensor]]:
    ndim = draw(st.integers(1, 3))
    size = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(ndim))  # noqa: E731
    kernel, strides, dilates, left, right = size(1, 4), size(1, 3), size(0, 2), size(0, 2), size(0, 2)
    reach = [(n - 1) * (d + 1) + 1 for n, d in zip(kernel, dilates, strict=True)]
    source = tuple(max(1, n - lo - hi) + extra for n, lo, hi, extra in zip(reach, left, right, size(0, 4), strict=True))
    groups, read, made = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    weights = (groups, made, read, *kernel) if groups > 1 else (made, read, *kernel)
    tensors = {
        "src": quarters((draw(st.integers(1, 3)), groups * read, *source), dtype),
        "weights": quarters(weights, dtype),
    }
    if draw(st.booleans()):
        tensors["bias"] = quarters((groups * made,), dtype)
    return Conv(strides, dilates, left, right, groups), tensors


@settings(max_examples=150)
@given(problems())
def test_it_is_the_convolution(problem):
    attrs, tensors = problem
    # PyTorch 2.13 computes strided 3-D convolutions in bf16 wrongly on CPUs with AMX: it is asked in f64
    (expected,) = convolution.reference(attrs, {name: tensor.double() for name, tensor in tensors.items()})
    (got,) = convolve(attrs, tensors)
    assert torch.equal(got, expected.to(got.dtype))  # sums of small quarters are exact


def test_checks_do_not_ask_pytorch_for_convolutions(monkeypatch):
    def refuse(*args):
        pytest.fail("PyTorch would run it by a oneDNN of its own")

    monkeypatch.setattr(convolution, "reference", refuse)
    for name in ("conv1d", "conv2d", "conv3d"):
        monkeypatch.setattr(convolution.F, name, refuse)
    node, formats = nodes.convolution()
    assert check_node(nodes.chosen(OneDnnTarget(), node, formats)) is None
