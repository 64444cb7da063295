"""Maximum pooling and its gradient on oneDNN, which pass a workspace instead of indices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.dnnl import Arg
from fmtprop.errors import DnnlError, ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Pooling
from fmtprop.ops.max_pooling_training import MAX_POOLING_BACKWARD, MAX_POOLING_TRAINING
from tests.ops.lowered import FORMATS, judge, layout_of, lower, plain_tensor, random_tensors, reordered, run_buffers

SAMPLES = {sample.name: sample for sample in MAX_POOLING_BACKWARD.samples()}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_gradient_reads_the_workspace_of_its_forward_pass(name, kind):
    """In every format, with equal numbers in a window: the first one gets the gradient."""
    sample = SAMPLES[name]
    types = {operand: sample.types[operand] for operand in ("src", "diff_dst")}
    tensors = random_tensors(types, -1.0, 1.0)
    tensors["src"] = tensors["src"].mul(4).round().relu()
    (wanted,) = MAX_POOLING_BACKWARD.reference(sample.attrs, {**tensors, "workspace": torch.zeros(1)})
    src = layout_of(types["src"], "plain" if kind == "any" else kind)
    dst, diff = (MemoryDesc.any(types[of].dims, "f32") for of in ("diff_dst", "src"))
    try:
        forward = lower(MAX_POOLING_TRAINING, sample.attrs, {"src": src, "dst": dst})
    except DnnlError as error:
        assert error.status == "unimplemented" and kind == "blocked"
        pytest.skip("oneDNN has no such pooling")
    formats = forward.resolve(forward.pd)
    given = formats["dst"] if kind != "any" else dst
    backward = lower(MAX_POOLING_BACKWARD, sample.attrs, {"src": src, "diff_dst": given, "diff_src": diff})
    read = backward.resolve(backward.pd)
    assert read["workspace"] == formats["workspace"]
    sizes = {name: dnnl.NativeDesc.from_desc(desc).nbytes for name, desc in (*formats.items(), *read.items())}
    buffers = {name: torch.full((sizes[name],), 255, dtype=torch.uint8) for name in ("dst", "workspace", "diff_src")}
    workspace = {Arg.WORKSPACE: buffers["workspace"]}
    run_buffers(forward.pd, {Arg.SRC: reordered(tensors["src"], src), Arg.DST: buffers["dst"], **workspace})
    diff_dst = reordered(tensors["diff_dst"], read["diff_dst"])
    run_buffers(backward.pd, {Arg.DIFF_DST: diff_dst, Arg.DIFF_SRC: buffers["diff_src"], **workspace})
    outcome = judge(plain_tensor(buffers["diff_src"], read["diff_src"]), wanted.double(), "f32")
    assert outcome.status in ("PASSED", "MISTRUSTED"), outcome.detail  # most gradients are zeros


class Net(nn.Module):
    def __init__(self, pool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.pool, self.last = nn.Conv2d(8, 32, 3, padding=1), pool, nn.Conv2d(32, 16, 3)

    def forward(self, x):
        return self.last(self.pool(self.first(x).relu()))


class Alone(nn.Module):
    """Its input may hold infinities, whose maximum oneDNN loses: so both passes run in PyTorch."""

    def __init__(self):
        super().__init__()
        self.pool, self.last = nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 16, 3)

    def forward(self, x):
        return self.last(self.pool(x))


def passes(net):
    nodes = [step.node for step in net.nets[0].plan.steps]
    return [(node.op, node.choice.target) for node in nodes if node.op.startswith("pooling")]


@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
@pytest.mark.parametrize(
    "module",
    [Net(nn.MaxPool2d(2)), Net(nn.MaxPool2d(3, 2, 1, ceil_mode=True)), Net(nn.AdaptiveMaxPool2d(5)), Alone()],
    ids=["even", "overlapping", "adaptive", "infinite"],
)
def test_both_passes_are_planned(module, policy):
    ours, theirs = copy.deepcopy(module), copy.deepcopy(module)
    x, other = (torch.randn(2, 8, 20, 20, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x.requires_grad_()
    other.requires_grad_()
    how = {"special_values": "fast", "tune": "model", "confirm": False}
    net = fp.compile(ours, x, training=True, policy=policy, **how)
    for run, given in ((net, x), (theirs, other)):
        run(given).square().mean().backward()
    torch.testing.assert_close(x.grad, other.grad)
    for mine, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, exact.grad)
    target = "reference" if isinstance(module, Alone) else "onednn"
    assert passes(net) == [("pooling_training", target), ("pooling_max_backward", target)]


def test_indices_with_other_readers_stay():
    class Indices(Net):
        def forward(self, x):
            y, indices = nn.functional.max_pool2d(self.first(x).relu(), 2, return_indices=True)
            return self.last(y), indices

    module, x = Indices(None), torch.randn(2, 8, 20, 20)
    net = fp.compile(module, x, training=True, special_values="fast", tune="model", confirm=False)
    assert passes(net) == [] and torch.equal(net(x)[1], module(x)[1])


def test_exact_numbers_need_pytorchs_indices():
    net = fp.compile(Net(nn.MaxPool2d(2)), torch.randn(2, 8, 20, 20), training=True, tune="model", confirm=False)
    assert passes(net) == []


def test_sizes_are_checked():
    average, types = Pooling.make("avg_include_padding", (2, 2), 2), {"src": TensorType((1, 8, 4, 4))}
    with pytest.raises(ShapeError, match="avg_include_padding has no workspace: its gradient is pooling_backward"):
        MAX_POOLING_TRAINING.infer(average, types)
    types |= {"workspace": TensorType((1,), "u8"), "diff_dst": TensorType((1, 8, 3, 3))}
    with pytest.raises(
        ShapeError, match=r"diff_dst has dims \(1, 8, 3, 3\) but this pooling's result has \(1, 8, 2, 2\)"
    ):
        MAX_POOLING_BACKWARD.infer(Pooling.make("max", (2, 2), 2), types)
