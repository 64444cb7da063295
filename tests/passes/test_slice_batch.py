"""A batch in slices computes what the whole batch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling import selection
from fmtprop.compiling.race import Race
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Concat, Eltwise, Permute, emit
from fmtprop.ops.convolution import Conv
from fmtprop.ops.reduction import Reduction
from fmtprop.ops.softmax import Softmax
from fmtprop.ops.view_attrs import Reshape, Slice
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.variants import slice_batch
from fmtprop.passes.variants.slice_batch import SliceBatch
from tests.passes.rewriting import Builder, rewrite


def sliced(graph: Graph, images: int = 1, cache_nbytes: int = 0) -> Graph:
    """Cut a graph; refuse one that stayed whole, or means something else."""
    result = rewrite(graph, SliceBatch(images, cache_nbytes), tolerance=1e-4)
    assert result is not graph
    verify(result, Stage.NORMAL)
    return result


def cuts(graph: Graph) -> int:
    """Return how often each layer of the stretch runs: the slices that are joined at its end."""
    joined = [node for node in graph.nodes() if node.op == "concat" and isinstance(node.attrs, Concat)]
    return max((len(graph.inputs(node.name)) for node in joined if node.attrs == Concat(0)), default=0)


@pytest.mark.parametrize(("batch", "images"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 2)])
def test_a_network_in_slices(batch, images):
    b = Builder()
    x = b.input(batch, 6, 9, 9)
    y = b.act(b.norm(b.conv(x, 8, "first", kernel=3, pad_l=1), "norm"))
    z = b.binary("add", b.conv(y, 8, "second"), y, "sum")
    graph = b.output(b.conv(z, 4, "third"), y)
    result = sliced(graph, images)
    assert cuts(result) == batch // images
    assert result.count("convolution") == 3 * batch // images


def test_a_result_of_constants_alone_keeps_its_place():
    b = Builder()
    x = b.input(2, 6, 4, 5)
    fixed = b.act(b.graph.constant("c", TensorType((3,)), torch.tensor([-1.0, 0.0, 2.0])), name="fixed")
    graph = b.output(b.act(x, name="computed"), fixed)
    result = sliced(graph)
    assert [result.inputs(node.name)["src"].node for node in result.output_nodes] == ["computed", "fixed"]


def test_each_axis_rule_keeps_its_meaning():
    b = Builder()
    x = b.input(4, 6, 4, 5)
    b.op("softmax", Softmax(1), "soft", src=x)
    b.op("reduction", Reduction("mean", (2, 3)), "mean", src=x)
    b.op("permute", Permute((0, 2, 3, 1)), "turned", src=x)
    b.op("reshape", Reshape((4, 120)), "flat", src=x)
    b.op("slice", Slice((0, 2, 0, 0), (4, 4, 4, 5), (1, 1, 1, 1)), "piece", src=x)
    b.op("concat", Concat(1), "joined", src_0=x, src_1=x)
    result = sliced(b.output(*map(Value, ("soft", "mean", "turned", "flat", "piece", "joined"))))
    assert cuts(result) == 4


@pytest.mark.parametrize(
    ("op", "attrs", "operands"),
    [
        ("softmax", Softmax(0), ("src",)),
        ("reduction", Reduction("sum", (0, 2)), ("src",)),
        ("permute", Permute((1, 0, 2, 3)), ("src",)),
        ("reshape", Reshape((24, 10)), ("src",)),
        ("slice", Slice((1, 0, 0, 0), (2, 6, 2, 5), (1, 1, 1, 1)), ("src",)),
        ("slice", Slice((0, 0, 0, 0), (2, 6, 2, 5), (2, 1, 1, 1)), ("src",)),
        ("concat", Concat(0), ("src_0", "src_1")),
    ],
)
def test_what_mixes_images_ends_the_stretch(op, attrs, operands):
    b = Builder()
    x = b.act(b.input(4, 6, 2, 5), "tanh", "before")
    mixed = b.op(op, attrs, "mixed", **dict.fromkeys(operands, x))
    result = sliced(b.output(b.act(mixed, "relu", "after")))
    assert cuts(result) == 4
    assert result.node("mixed").results == b.graph.node("mixed").results
    assert result.count("eltwise") == 5  # four slices of the one before, and the one after


def test_nothing_to_cut_gives_the_same_graph():
    def build(dims: tuple[int, ...]) -> Graph:
        b = Builder()
        return b.output(b.act(b.input(*dims)))

    assert SliceBatch(1, 0).run(one := build((1, 8, 4, 4))) is one
    assert SliceBatch(2, 0).run(odd := build((3, 8, 4, 4))) is odd
    assert SliceBatch(1, 10**6).run(small := build((4, 8, 4, 4))) is small
    assert SliceBatch(1, 0).run(empty := build((0, 8, 4, 4))) is empty
    b = Builder()
    mixed = b.output(b.op("softmax", Softmax(0), "mixed", src=b.input(4, 6)))
    assert SliceBatch(1, 0).run(mixed) is mixed
    g = Graph("two batches")
    x, y = g.input("x", TensorType((4, 3))), g.input("y", TensorType((2, 3)))
    g.output(emit(g, "eltwise", {"src": x}, Eltwise("relu")))
    g.output(emit(g, "eltwise", {"src": y}, Eltwise("relu")))
    assert SliceBatch(1, 0).run(g) is g


def test_the_stretch_ends_after_the_last_layer_that_overflows_the_cache():
    b = Builder()
    x = b.input(4, 8, 16, 16)
    big = b.conv(x, 32, "big")
    small = b.conv(b.conv(big, 4, "narrow", strides=4), 64, "small")
    result = sliced(b.output(small), cache_nbytes=4 * 32 * 16 * 16 * 4 - 1)
    # the narrow layer reads what is too large: it belongs to the stretch
    assert [node.name for node in result.nodes() if node.op == "convolution"][-1] == "small"
    assert result.count("convolution") == 4 + 4 + 1


def test_constants_with_a_batch_are_not_cut():
    b = Builder()
    x = b.act(b.input(4, 6), "tanh", "before")
    row = b.binary("add", x, b.constant(b.random(1, 6)), "row")
    whole = b.binary("mul", row, b.constant(b.random(4, 6)), "whole")
    result = sliced(b.output(whole))
    assert result.count("binary") == 4 + 1
    assert "whole" in result


def test_computed_weights_are_not_cut_although_their_first_axis_is_as_long_as_the_batch():
    b = Builder()
    x, kernel = b.input(4, 3, 8, 8), b.input(4, 3, 3, 3, name="kernel")
    y = b.op("convolution", Conv.make(2), "conv", src=b.act(x, "tanh", "before"), weights=kernel)
    result = sliced(b.output(y))
    assert result.count("eltwise") == 4
    assert result.count("convolution") == 1


def test_operands_of_post_ops_are_cut_with_their_node():
    b = Builder()
    x = b.input(4, 8, 6, 6)
    y = b.conv(x, 8, "first")
    z = b.binary("mul", b.act(b.binary("add", b.conv(y, 8, "second", kernel=3, pad_l=1), y, "sum")), y, "product")
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(b.output(z))
    assert [post_op.op for post_op in normal.node("second").post_ops if post_op.operand] == ["binary", "binary"]
    result = sliced(normal)
    assert result.count("convolution") == 8


def test_names_of_slices_avoid_the_names_of_other_nodes():
    b = Builder()
    x = b.input(2, 6)
    first = b.op("slice", Slice((0, 1), (2, 4), (1, 1)), "slice_1", src=x)
    second = b.act(first, "relu", "slice_1_n0_1")
    result = sliced(b.output(b.act(second, "tanh", "x_n0_1"), first))
    assert cuts(result) == 2


class Net(nn.Module):
    """An inverted residual, in which a depthwise convolution can be fused, and a classifier of whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6())
        self.wide = nn.Sequential(
            nn.Conv2d(16, 32, 1), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.ReLU6(), nn.Conv2d(32, 16, 1)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        return self.head((y + self.wide(y)).mean((2, 3))).softmax(0)


@pytest.mark.parametrize("winner", [0, 1])
@pytest.mark.usefixtures("own_cache")
def test_a_compiled_model_in_slices_agrees_with_pytorch(winner, monkeypatch):
    monkeypatch.setattr(slice_batch, "last_level_cache_nbytes", lambda: 2 * 4 * 16 * 8 * 8 * 4 - 2)
    seen = []

    def decide(plans, inputs, budget, fewest, *_):
        seen.append(len(plans))
        return Race((1.0,) * len(plans), 3, winner, tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 16, 16)
    net = fp.compile(model, x, policy="optimal", tune="model")
    assert seen and seen[0] >= 2
    assert (net.graph.count("convolution") > 4) == bool(winner)
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
        y = torch.randn(4, 3, 16, 16)
        torch.testing.assert_close(net(y), model(y), rtol=1e-4, atol=1e-5)
