"""Operators of PyTorch that cannot write to given memory: steps keep the results that they make."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.passes.assignment.formats import plain, unspecified
from fmtprop.runtime.plan import Home, Plan
from fmtprop.targets.bound import NOTHING
from fmtprop.targets.reference import ReferenceTarget


class Flips(nn.Module):
    """A flip before a primitive, one behind it, and one as a result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x.flip(-1))
        return y.flip(-2) + y, x.flip(1), y[:, 1:].flip(0)


class Circular(nn.Module):
    """An operator that calls others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(F.pad(x, (1, 1, 2, 2), mode="circular") * 2, (1, 0, 0, 0), mode="circular")


class Sampled(nn.Module):
    """Samples of a grid, with a view of them and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.rand(2, 5, 6, 2) * 2 - 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.grid_sample(x, self.grid[: x.shape[0]], align_corners=False)
        return y, y[:, 1:].sum(1) @ y[:, 0].transpose(1, 2)


class Folded(nn.Module):
    """A result that is made of a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.flip(0)


class Spectrum(nn.Module):
    """A complex result in another order of axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = torch.stft(x.flatten(1), 8, window=torch.hann_window(8), return_complex=True)
        return (wave.abs() + 1).log() @ torch.ones(wave.shape[-1], 3)


class Views(nn.Module):
    """A registered operator that returns its argument, or a part of it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        same, part = torch.ops.fmtprop_tests.views(y)
        return same, part, y * 2


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    with torch.library._scoped_library("fmtprop_tests", "FRAGMENT") as made:
        made.define("views(Tensor x) -> (Tensor, Tensor)")
        made.impl("views", lambda x: (x, x[:1]), "CompositeImplicitAutograd")
        yield


MODULES = [Flips, Circular, Sampled, Folded, Spectrum]
SHAPE = (2, 3, 6, 6)


def _made(plan: Plan) -> int:
    return sum(buffer.home is Home.TENSOR for buffer in plan.buffers)


def _each(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
def test_results_are_pytorchs_and_belong_to_the_caller(kind: type[nn.Module], target: str) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    net = fp.compile(module, torch.randn(SHAPE), target=target)
    kept, wanted = [], []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            kept.append((x := torch.randn(SHAPE), _each(net(x))))
            wanted.append(_each(module(x)))
    with torch.autocast("cpu", torch.bfloat16):  # a run with loops over the calls
        kept.append((x := torch.randn(SHAPE), _each(net(x))))
    wanted.append(_each(module(kept[-1][0])))
    for (x, results), others in zip(kept, wanted, strict=True):
        for result, other in zip(results, others, strict=True):
            assert torch.allclose(result, other, atol=1e-5)
            assert result.is_contiguous()
            assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_no_step_copies_what_an_operator_makes() -> None:
    plans = [fp.compile(kind().eval(), torch.randn(SHAPE)).plan for kind in (Flips, Circular, Sampled)]
    assert [_made(plan) for plan in plans] == [4, 2, 1]


def test_a_result_that_a_step_makes_is_in_the_operators_own_order() -> None:
    net = fp.compile(Spectrum(), x := torch.randn(SHAPE))
    wave = torch.stft(x.flatten(1), 8, window=torch.hann_window(8), return_complex=True)
    (step,) = (step for step in net.plan.steps if "stft" in str(step.node.attrs))
    operands = {name: access.desc for name, access in step.operands.items()}
    for result, wanted in [(unspecified(step.node.descs[0]), wave), (plain(step.node.descs[0]), wave.contiguous())]:
        (candidate,) = ReferenceTarget().candidates(step.node, {**operands, "dst": result})
        assert candidate.results[0].strides == torch.view_as_real(wanted).stride()


def test_a_view_of_an_operand_is_copied() -> None:
    net = fp.compile(Views(), torch.randn(4, 5))
    for _ in range(2):
        x = torch.randn(4, 5)
        results = net(x)
        assert all(map(torch.equal, results, Views()(x)))
        assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


class Windowed(nn.Module):
    """A view by an operator whose source's memory later steps overwrite."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.view = nn.Linear(32, 32), view

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x).relu()
        view = self.view(y)
        for _ in range(3):
            y = self.layer(y).sigmoid()
        return view, y


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
@pytest.mark.parametrize(
    "view",
    [lambda y: y.unfold(1, 8, 8), lambda y: y.unfold(1, 8, 4), lambda y: y.unfold(0, 2, 1), torch._neg_view],
)
def test_a_declared_view_outlives_its_source(view: Callable[[torch.Tensor], torch.Tensor], policy: str) -> None:
    module, x = Windowed(view), torch.randn(2, 32, 32)
    net = fp.compile(module, x, policy=policy, tune="model", confirm=False)
    for _ in range(2):
        for found, expected in zip(net(x), module(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_windows_of_a_constant_may_overlap(policy: str) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.randn(32, 3))
            self.register_buffer("parts", torch.randn(20).unfold(0, 6, 2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self.whole * 2).unfold(0, 6, 2), self.parts, self.parts @ x

    module, x = Windows(), torch.randn(6, 4)
    net = fp.compile(module, x, policy=policy, tune="model", confirm=False)
    for found, expected in zip(net(x), module(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_made", [False, True])
def test_what_a_users_operator_returns_may_be_a_view(is_made: bool) -> None:
    with torch.library._scoped_library("fmtprop_views", "FRAGMENT") as library:
        library.define(f"half_{is_made}(Tensor x) -> Tensor")
        library.impl(f"half_{is_made}", lambda x: x[:, :16].clone() if is_made else x[:, :16], "CPU")
        library.impl(f"half_{is_made}", lambda x: x.new_empty(x.shape[0], 16, *x.shape[2:]), "Meta")
        module, x = Windowed(getattr(torch.ops.fmtprop_views, f"half_{is_made}")), torch.randn(2, 32, 32)
        net = fp.compile(module, x, tune="model", confirm=False)
        for found, expected in zip(net(x), module(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_run_keeps_no_tensor_that_it_made() -> None:
    net = fp.compile(Sampled().eval(), x := torch.randn(SHAPE))
    results = net(x)
    gone = [weakref.ref(result) for result in results]
    del results
    assert not any(one() is not None for one in gone)
    context, give_back = net._executor.lease()
    assert all(memory.tensor is NOTHING for memory in context._passing)
    context.profile([x])
    assert all(memory.tensor is NOTHING for memory in context._passing)
    give_back()


class Trained(nn.Module):
    """Operators without a form that writes, forward and backward; one makes a result and is read by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
        self.sampled = Sampled()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = self.sampled(self.layer(x).flip(-1))
        return y, z.sin() + y.sum()


def test_gradients_are_those_of_pytorch_and_a_step_leaves_no_cycle() -> None:
    torch.manual_seed(0)
    module = Trained()
    net = fp.compile(module, torch.randn(SHAPE), training=True, tune="model")
    for again in (False, True):
        x, ours, theirs = torch.randn(SHAPE), [], []
        for call, gradients in ((net, ours), (module, theirs)):
            module.zero_grad()
            loss = sum(result.square().sum() for result in call(x))
            loss.backward(retain_graph=again)
            if again:
                loss.backward()
            gradients += [parameter.grad.clone() for parameter in module.parameters()]
        for gradient, wanted in zip(ours, theirs, strict=True):
            assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert any(_made(half.plan) for half in net.nets)
    gc.collect()
    gc.disable()
    try:
        results = net(torch.randn(SHAPE))
        gone = [weakref.ref(result) for result in results]
        del results
        assert not any(one() is not None for one in gone)
    finally:
        gc.enable()


def test_a_gradient_that_nobody_requests_is_no_result() -> None:
    """Of an image without a gradient, PyTorch's operator gives None beside the gradient of the grid."""
    module = Sampled()
    net = fp.compile(module, x := torch.randn(SHAPE), training=True, tune="model", confirm=False)
    gradients = []
    for call in (net, module):
        module.zero_grad()
        sum(result.square().sum() for result in call(x)).backward()
        gradients.append(module.grid.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
