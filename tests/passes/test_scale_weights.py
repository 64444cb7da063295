"""Channels' factors in weights: the same numbers, only where that is much less to multiply, and no reorder for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling import entrants
from fmtprop.ir.verify import Stage
from fmtprop.layout import MemoryDesc
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.variants.scale_weights import ScaleWeights
from fmtprop.tuning import costs
from tests.passes.rewriting import Builder, rewrite, summary
from tests.tuning.test_roofline import PEAKS


def scaled_convolution(b: Builder, *dims: int, name: str = "conv", swapped: bool = False, outputs: int = 4, **window):
    """Add a convolution of a product of an activation and factors of its channels; return it and the product."""
    x = b.input(*dims, name=f"x_{name}")
    factors = b.input(1, dims[1], *(1,) * (len(dims) - 2), name=f"factors_{name}")
    product = b.binary("mul", *((factors, x) if swapped else (x, factors)), name=f"product_{name}")
    return b.conv(product, outputs, name, **window), product


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dims", [(1, 8, 50), (1, 8, 7, 9), (3, 6, 5, 4), (1, 4, 3, 4, 5)])
def test_it_means_the_same(dims, swapped):
    b = Builder()
    conv, _ = scaled_convolution(b, *dims, swapped=swapped)
    other = b.input(dims[0], 4, *dims[2:], name="other")
    graph = b.output(b.act(b.binary("add", conv, other, "residual")))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    rewritten = rewrite(normal, ScaleWeights())
    assert "product_conv" not in rewritten
    assert rewritten.node("conv") == normal.node("conv")
    assert rewritten.node("conv").post_ops  # what follows it within its primitive stays there
    assert rewritten.inputs("conv")["src"].node == "x_conv"
    before = {k: v for k, v in normal.inputs("conv").items() if k not in ("src", "weights")}
    assert before == {k: v for k, v in rewritten.inputs("conv").items() if k not in ("src", "weights")}


def test_what_is_something_else_or_no_gain_stays():
    b = Builder()
    several, product = scaled_convolution(b, 1, 8, 9, 9, name="read_twice")
    rest = [
        several,
        product,
        scaled_convolution(b, 1, 8, 9, 9, name="window", kernel=3)[0],
        scaled_convolution(b, 1, 8, 9, 9, name="stride", strides=2)[0],
        scaled_convolution(b, 1, 8, 9, 9, name="padding", pad_l=1)[0],
        scaled_convolution(b, 1, 8, 9, 9, name="groups", groups=2)[0],
        scaled_convolution(b, 1, 8, 3, 5, name="small")[0],  # 32 weights, 120 elements: less than four times as many
    ]
    x, images, rows = b.input(2, 8, 9, 9), b.input(2, 8, 1, 1, name="images"), b.input(1, 8, 9, 1, name="rows")
    rest += [b.conv(b.binary("mul", x, images, "of_each_image"), 4, "images_conv")]
    rest += [b.conv(b.binary("mul", b.input(1, 8, 9, 9, name="y"), rows, "of_each_row"), 4, "rows_conv")]
    rest += [b.conv(b.binary("add", x, b.input(1, 8, 1, 1, name="summands"), "sum"), 4, "sum_conv")]
    wanted, _ = scaled_convolution(b, 1, 8, 4, 4, name="just")  # 32 weights, 128 elements
    graph = b.output(*rest, wanted)
    assert [node.name for node in ScaleWeights().eligible(graph)] == ["just"]
    assert summary(rewrite(graph, ScaleWeights()))[-1] == "just"
    assert ScaleWeights(["window"]).run(graph) is graph


def test_weights_that_are_computed_in_every_run_stay():
    b = Builder()
    conv, _ = scaled_convolution(b, 1, 8, 9, 9)
    weights = b.input(4, 8, 1, 1, name="weights")
    graph = b.output(conv)
    graph.set_inputs("conv", {**graph.inputs("conv"), "weights": weights})
    assert ScaleWeights().eligible(graph) == []


class Squeezed(nn.Module):
    """A squeeze-and-excitation block with what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.deep = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.down, self.up = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project = nn.Conv2d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.deep(x))
        factors = torch.sigmoid(self.up(nn.functional.silu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.project(y * factors)


@pytest.fixture
def squeezed(monkeypatch, own_cache):
    monkeypatch.setattr(costs, "peaks", lambda *_: replace(PEAKS, copying=1e10))  # the plan depends on them
    module, x = Squeezed().eval(), torch.randn(1, 32, 56, 56)
    with torch.no_grad():
        return module, x, module(x)


def test_a_plan_scales_weights_and_reorders_none(squeezed):
    module, x, expected = squeezed
    net = fp.compile(module, x, tune="model", confirm=False)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    steps = {step.node.name: step.node for step in net.plan.steps}
    products = [node.results[0].dims for node in steps.values() if node.op == "binary"]
    assert products == [(32, 16)]
    made = MemoryDesc((16, 32, 1, 1), "f32", strides=(1, 16, 512, 512))
    assert steps["conv_4"].choice.operands["weights"] == made
    assert [node.name for node in steps.values() if node.op == "reorder" and 16 in node.descs[0].dims[:1]] == []
    for factor in (-3.0, 0.0):  # the factors are another run's
        with torch.no_grad():
            torch.testing.assert_close(net(x * factor), module(x * factor), rtol=1e-4, atol=1e-4)


def test_it_is_chosen_by_cost(squeezed, monkeypatch):
    module, x, _ = squeezed
    chosen = fp.compile(module, x, tune="model", confirm=False).certificate
    monkeypatch.setattr(ScaleWeights, "run", lambda self, graph: graph)
    without = fp.compile(module, x, tune="model", confirm=False).certificate
    assert chosen.objective < without.objective
    assert chosen.optimal
    assert chosen.propagate == without.propagate  # the baseline stays what other systems do


def test_where_no_kernel_reads_such_weights_the_source_is_scaled(squeezed, monkeypatch):
    module, x, expected = squeezed
    nowhere = MemoryDesc((16, 32, 1, 1), "f32", strides=(7, 113, 1, 1))
    pinned = {
        name: replace(variant, pins=lambda graph: {"conv_4.weights": nowhere})
        for name, variant in entrants.VARIANTS.items()
    }
    monkeypatch.setattr(entrants, "VARIANTS", pinned)
    net = fp.compile(module, x, tune="model", confirm=False)
    assert (1, 32, 56, 56) in [step.node.results[0].dims for step in net.plan.steps if step.node.op == "binary"]
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


def test_pins_name_the_graph_as_it_was(squeezed):
    module, x, expected = squeezed
    net = fp.compile(module, x, tune="model", pin={"binary_1.dst": "nhwc"})
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    assert net.graph.node("binary_1").descs[0] == MemoryDesc((1, 32, 56, 56), "f32", tag="nhwc")


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
def test_bf16(squeezed):
    module, x, expected = squeezed
    for tune in ("model", "measure"):
        net = fp.compile(module, x, dtype="bf16", tune=tune)
        assert (net(x) - expected).abs().max() < 0.02 * expected.abs().max()


def test_nothing_is_pinned_in_bf16():
    b = Builder()
    conv, _ = scaled_convolution(b, 1, 8, 9, 9)
    graph = b.output(conv)
    assert list(ScaleWeights().pins(graph)) == ["conv.weights"]
    lowered = graph.map_nodes(lambda node: node.with_(results=tuple(replace(t, dtype="bf16") for t in node.results)))
    assert [node.name for node in ScaleWeights().eligible(lowered)] == ["conv"]
    assert ScaleWeights().pins(lowered) == {}
