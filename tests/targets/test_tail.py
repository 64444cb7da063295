"""A kernel behind a primitive: offered, right in every format, chosen where it costs less, and run with the plan."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.ir.node import PostOp
from fmtprop.jit import unavailable
from fmtprop.layout import MemoryDesc
from fmtprop.ops.eltwise import Eltwise
from fmtprop.runtime.selfcheck import check_node, primitive_key
from fmtprop.targets import OneDnnTarget
from fmtprop.tuning.roofline import ModelCosts
from tests.targets.nodes import convolution, request
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SWISH = PostOp("eltwise", Eltwise("swish", 1.0))
TAGS = ("any", "nhwc", "nchw", "nChw8c", "nChw16c")


def offered(outputs: int, dtype: str, tag: str):
    node, formats = convolution(outputs=outputs, dtype=dtype, post_ops=(SWISH,))
    wanted = {**request(node, formats), "dst": MemoryDesc(node.results[0].dims, dtype, tag=tag)}
    found = OneDnnTarget().candidates(node, wanted)
    return [node.with_(descs=c.results, choice=c.choice("test")) for c in found if c.is_followed]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("outputs", [32, 17])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_it_is_right_in_every_format(dtype, outputs, tag):
    if dtype == "bf16" and not dnnl.supports("bf16"):
        pytest.skip("no bf16 here")
    for node in offered(outputs, dtype, tag):
        assert node.choice.impl.endswith("+swish") and not node.choice.impl.startswith("ref")
        assert check_node(node) is None


def test_it_is_offered():
    assert offered(32, "f32", "nhwc")


def test_a_sum_before_it_stays_in_the_primitive():
    node, formats = convolution(post_ops=(SWISH,))
    first = PostOp("eltwise", Eltwise("relu"))
    found = [c for c in OneDnnTarget().candidates(node.with_(post_ops=(first, SWISH)), request(node, formats))]
    assert any(c.is_followed for c in found)
    # what follows it would read what the kernel has not made yet
    found = [c for c in OneDnnTarget().candidates(node.with_(post_ops=(SWISH, first)), request(node, formats))]
    assert found and all(not c.is_followed for c in found)


def test_a_wrong_one_is_found_and_not_offered_again():
    (node, *_) = offered(32, "f32", "nhwc")
    forgetful = replace(node.choice, handle=replace(node.choice.handle, after=None))
    assert check_node(node.with_(choice=forgetful)) is not None, "the primitive knows nothing of the post-op"
    target = OneDnnTarget()
    target.reject(node)
    plain, formats = convolution(outputs=32, post_ops=(SWISH,))
    wanted = {**request(plain, formats), "dst": node.descs[0]}
    again = [c for c in target.candidates(plain, wanted) if c.is_followed]
    assert node.choice.impl not in {c.impl for c in again if dict(c.operands) == dict(node.choice.operands)}


def test_another_kernel_is_checked_anew():
    (node, *_) = offered(32, "f32", "nhwc")
    other = node.with_(choice=replace(node.choice, handle=replace(node.choice.handle, after=None)))
    assert primitive_key(node) != primitive_key(other)


class Net(nn.Module):
    """Convolutions with SiLU and GELU, the last one's result the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.head, self.act = nn.Conv2d(32, 64, 1), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x))
        return nn.functional.gelu(self.head(x + self.act(self.depthwise(x))))


def price_kernels(monkeypatch, factor):
    """Let implementations that are followed by a kernel cost so many times as much."""
    usual = ModelCosts.node

    def node(self, one, candidate):
        return usual(self, one, candidate) * (factor if candidate.is_followed else 1.0)

    monkeypatch.setattr(ModelCosts, "node", node)


@pytest.fixture
def net(monkeypatch):
    """A plan with kernels wherever it can have them, and the module."""
    price_kernels(monkeypatch, 0.0)
    torch.manual_seed(0)
    module = Net().eval()
    x = torch.randn(2, 3, 32, 32)
    return module, fp.compile(module, (x,), tune="model", confirm=False), x


def test_a_plan_runs_it(net):
    module, compiled, x = net
    impls = [step.node.choice.impl for step in compiled.plan.steps]
    assert any("+swish" in impl for impl in impls) and any("+gelu_erf" in impl for impl in impls)
    expected = module(x)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    out = torch.full_like(expected, 7.0)
    compiled(x, out=out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert len(compiled.profile(x)) == len(compiled.plan.steps)
    assert "+swish" in compiled.report(repeats=1).to_text()


@pytest.mark.parametrize("threads", [1, 3])
def test_another_number_of_threads(net, threads):
    module, compiled, x = net
    with torch_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    """Convolutions with SiLU whose results a concat joins."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 32, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([nn.functional.silu(conv(x)) for conv in self.convs], 1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("usual_peaks")
def test_it_changes_the_part_of_a_concat_that_its_primitive_wrote(batch, monkeypatch):
    honest = OneDnnTarget.candidates

    def with_kernels(self, *what):
        found = list(honest(self, *what))
        return [candidate for candidate in found if candidate.is_followed] or found

    monkeypatch.setattr(OneDnnTarget, "candidates", with_kernels)
    torch.manual_seed(0)
    module, x = Branches().eval(), torch.randn(batch, 16, 20, 20)
    blocked = "aBcd16b" if "avx512" in dnnl.lib().isa.lower() else "aBcd8b"
    pins = {f"conv_{number}.dst": blocked for number in (1, 2, 3)}
    compiled = fp.compile(module, x, tune="model", confirm=False, winograd=False, pin=pins)
    starts = [s.results[0].desc.offset0 for s in compiled.plan.steps if "+swish" in s.node.choice.impl]
    if batch == 1:  # parts of one image are dense
        assert len([start for start in starts if start > 0]) == 2
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_nan_spreads(net):
    module, compiled, x = net
    x = x.clone()
    x[0, 0, 5, 5] = float("nan")
    torch.testing.assert_close(compiled(x).isnan(), module(x).isnan())


def test_by_costs_that_say_otherwise_there_are_none(monkeypatch):
    price_kernels(monkeypatch, 1e6)
    x = torch.randn(2, 3, 32, 32)
    compiled = fp.compile(Net().eval(), (x,), tune="model")
    assert not any("+" in step.node.choice.impl for step in compiled.plan.steps)
