"""Kinds of layers, one network each: gradients, inputs' too, as PyTorch's; and what runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling.budget import Budget
from fmtprop.jit import unavailable
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from tests.training.test_module import assert_same_step, compiled


class Function(nn.Module):
    """A function of its argument and one parameter."""

    def __init__(self, function: Callable, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(*shape, generator=torch.Generator().manual_seed(3)) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = kind(6, 4, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0][:, -1]


IMAGE = (2, 8, 6, 6)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution_strided": (lambda: nn.Conv2d(8, 16, 3, 2, 1), IMAGE),
    "convolution_dilated": (lambda: nn.Conv2d(8, 8, 3, 1, 2, dilation=2, bias=False), IMAGE),
    "convolution_depthwise": (lambda: nn.Conv2d(8, 8, 3, 1, 1, groups=8), IMAGE),
    "convolution_1d": (lambda: nn.Conv1d(8, 16, 5, 2, 2), (2, 8, 17)),
    "convolution_3d": (lambda: nn.Conv3d(4, 8, 3, 1, 1), (2, 4, 5, 4, 3)),
    "convolution_transposed": (lambda: nn.ConvTranspose2d(8, 6, 2, 2), IMAGE),
    "convolution_transposed_odd": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, 1, 1, groups=2, dilation=2), IMAGE),
    "convolution_transposed_extra": (lambda: nn.ConvTranspose2d(8, 6, 3, 1, output_padding=1, dilation=2), IMAGE),
    "convolution_transposed_1d": (lambda: nn.ConvTranspose1d(8, 6, 4, 2, bias=False), (2, 8, 7)),
    "max_pooling": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(3, 2, 1)), IMAGE),
    "average_pooling": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.AvgPool2d(3, 2, 1)), IMAGE),
    "adaptive_pooling": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(3)), IMAGE),
    "batch_norm": (lambda: nn.BatchNorm2d(8), IMAGE),
    "batch_norm_plain": (lambda: nn.BatchNorm2d(8, affine=False), IMAGE),
    "batch_norm_no_statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), IMAGE),
    "batch_norm_rows": (lambda: nn.BatchNorm1d(8), (5, 8)),
    "batch_norm_cumulative": (lambda: nn.BatchNorm2d(8, momentum=0.4, eps=1e-3), IMAGE),
    "layer_norm": (lambda: nn.LayerNorm(6), IMAGE),
    "group_norm": (lambda: nn.GroupNorm(4, 8), IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGE),
    "local_response_norm": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.LocalResponseNorm(3)), IMAGE),
    "prelu": (lambda: nn.PReLU(8), IMAGE),
    "softmax": (lambda: Function(lambda x, w: torch.softmax(x * w, 1), 1), IMAGE),
    "log_softmax": (lambda: Function(lambda x, w: torch.log_softmax(x * w, -1), 6), IMAGE),
    "concat": (lambda: Function(lambda x, w: torch.cat([x, x * w], 1), 6), IMAGE),
    "broadcast": (lambda: Function(lambda x, w: (x + w) / (w + 2), 8, 1, 1), IMAGE),
    "views": (lambda: Function(lambda x, w: (x * w).permute(0, 2, 3, 1)[:, 1:, ::2].flatten(1), 6), IMAGE),
    "matmul": (lambda: Function(lambda x, w: x @ w @ x.transpose(-1, -2), 8, 6, 6), IMAGE),
    "upsample": (lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")), IMAGE),
    "bicubic": (lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.Upsample(scale_factor=2, mode="bicubic")), IMAGE),
    "nearest": (lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.Upsample(scale_factor=2)), IMAGE),
    "spectrum": (lambda: Function(lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w), 4), IMAGE),
    "shuffle": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.ChannelShuffle(2), nn.PixelShuffle(2)), IMAGE),
    "reductions": (lambda: Function(lambda x, w: (x * w).amax(1) + x.mean((2, 3), keepdim=True).sum(1), 6), IMAGE),
    "linear": (lambda: nn.Linear(6, 5), IMAGE),
    "bilinear": (lambda: Function(lambda x, w: F.bilinear(x, x, w), 4, 6, 6), IMAGE),
    "gru": (lambda: Recurrent(nn.GRU), (3, 2, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), (3, 2, 6)),
    "rnn": (lambda: Recurrent(nn.RNN), (3, 2, 6)),
}
FUNCTIONS = (
    *("relu", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh"),
    *("relu6", "sigmoid", "tanh", "softplus", "logsigmoid", "softsign", "tanhshrink"),
)


#: minutes on a loaded machine; its operators are the LSTM's and the RNN's
SLOW = {"gru"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in FAMILIES])
def test_layers(name):
    make, shape = FAMILIES[name]
    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_()
    ours, theirs = compiled(make(), x)
    assert_same_step(ours, theirs, x)


def test_functions():
    """All of them in one network, each with a factor of its own, so that each gradient is seen."""

    def every(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sum(getattr(F, name)(x * w[number]) for number, name in enumerate(FUNCTIONS))

    x = torch.linspace(-4, 4, 96).reshape(2, 3, 4, 4).requires_grad_()
    ours, theirs = compiled(Function(every, len(FUNCTIONS)), x)
    assert_same_step(ours, theirs, x)


def test_a_token_of_a_table():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x).mean(1))

    tokens = torch.arange(12).reshape(3, 4) % 7
    ours, theirs = compiled(Words(), tokens)
    assert_same_step(ours, theirs, tokens)


def test_gradients_of_averages_and_softmax_are_planned():
    """In formats chosen with the rest; the logarithm's loses NaN, so PyTorch's operator runs it here."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Softmax(1)
    ours, theirs = compiled(nn.Sequential(*layers), torch.randn(2, 3, 8, 8))
    plan = ours.nets[0].plan
    backward = [step.node.op for step in plan.steps[plan.turn.step :]]
    assert backward.count("pooling_backward") == 2 and backward.count("softmax_backward") == 1
    assert_same_step(ours, theirs, torch.randn(2, 3, 8, 8))


def test_gradients_of_a_deconvolution_are_convolutions():
    ours, _ = compiled(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 6, 2, 2)), torch.randn(2, 3, 6, 6))
    plan = ours.nets[0].plan
    backward = [step.node.op for step in plan.steps[plan.turn.step :]]
    assert backward.count("convolution_backward_weights") == 2 and backward.count("convolution") == 1
    assert "aten" not in backward


@pytest.mark.usefixtures("usual_peaks")
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_resampling_and_its_gradient_are_one_call_each(mode):
    ours, _ = compiled(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Upsample(scale_factor=2, mode=mode)), torch.randn(2, 3, 24, 24)
    )
    steps = [step.node for step in ours.nets[0].plan.steps]
    assert sum("upsample" in str(node.attrs) or node.op == "resampling" for node in steps) == 2
    assert "index" not in str([node.attrs for node in steps])
    # PyTorch's kernel for channels-last takes a fraction of the time of the one for rows
    gradient = next(node for node in steps if "upsample" in str(node.attrs) and "_backward" in str(node.attrs))
    assert mode != "bilinear" or gradient.choice.operands["src_0"].tag == "acdb"
    assert torch.ops.aten.upsample_bilinear2d.default.py_kernels  # PyTorch's rules are back


@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_a_layer_normalization_and_its_gradients_run_on_onednn(epsilon):
    ours, theirs = compiled(nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48, epsilon)), torch.randn(16, 24))
    plan = ours.nets[0].plan
    targets = {step.node.op: step.target for step in plan.steps if "layer" in step.node.op}
    assert targets == {"layer_normalization_training": "onednn", "layer_normalization_backward": "onednn"}
    assert "eltwise" not in {step.node.op for step in plan.steps}  # the variance itself is read
    assert_same_step(ours, theirs, torch.randn(16, 24))


@pytest.mark.skipif(unavailable() != "", reason="no kernels here")
@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_function_behind_a_normalization_is_a_part_of_it(dtype, has_time, monkeypatch):
    if not has_time:  # then the functions are fused in the formats that were chosen without
        monkeypatch.setattr(Budget, "allows", lambda self, work, seconds: False)
    if dtype == "bf16" and not takes(DataType.BF16):
        pytest.skip("this CPU has no bf16")
    first = nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 32, 3, padding=1, groups=32)
    layers = *first, nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64, affine=False), nn.ReLU()
    x = torch.randn(8, 16, 40, 40).contiguous(memory_format=torch.channels_last)
    ours, theirs = compiled(nn.Sequential(*layers), x, dtype=dtype)
    attrs = [step.node.attrs for step in ours.nets[0].plan.steps if "batch" in step.node.op]
    assert [one.function for one in attrs] == ["clip", "relu", "relu", "relu", "relu", "clip"]
    exact, found = copy.deepcopy(theirs).double(), []
    for module, given, type_ in ((ours, x, "f32"), (theirs, x, dtype), (exact, x.double(), "f32")):
        with torch.autocast("cpu", torch.bfloat16, enabled=type_ == "bf16"):
            y = module(given).to(given.dtype)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        found.append([y.detach(), *(one.grad for one in module.parameters())])
        found[-1] += [one for one in module.buffers() if one.is_floating_point()]
    for one, eager, right in zip(*found, strict=True):
        error, usual = (float((other - right).norm()) for other in (one, eager))
        # before a normalization, the gradient of a bias is 0 but for rounding
        assert float(right.double().norm()) < 1e-6 or error <= 2 * usual + 1e-3 * float(right.double().norm())


def test_what_has_a_gradient_of_its_own_runs_on_onednn():
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    ours, _ = compiled(nn.Sequential(*layers), torch.randn(2, 3, 8, 8), deterministic=True)
    steps = ours.nets[0].plan.steps
    on_pytorch = {step.node.op for step in steps if step.target == "reference"}
    assert not on_pytorch & {
        "convolution_backward_data", "convolution_backward_weights", "batch_normalization_training",
        "batch_normalization_backward", "eltwise_backward",
    }  # fmt: skip
    backward = [step.node.op for step in steps[ours.nets[0].plan.turn.step :]]
    assert backward.count("convolution_backward_weights") == 2
    assert backward.count("convolution_backward_data") == 1  # nobody asks for the gradient of the images


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_slope_of_hardswish_is_pytorchs_at_its_bounds(dtype):
    if dtype == "bf16" and not dnnl.supports("bf16"):
        pytest.skip("oneDNN has no bf16 on this CPU")
    values = [-3.015625, -3.0, -2.984375, 0.0, 2.984375, 3.0, 3.015625]
    slopes = []
    for compiles in (False, True):
        x, module = torch.tensor([values], requires_grad=True), nn.Hardswish()
        net = fp.compile(module, (x,), training=True, dtype=dtype, confirm=False) if compiles else module
        net(x).float().sum().backward()
        slopes.append(x.grad)
    torch.testing.assert_close(*slopes, atol=1e-2 if dtype == "bf16" else 1e-6, rtol=0)
