"""Gradients that PyTorch would trace as parts, or as an operator of its own, as one primitive of oneDNN's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops.prelu import PRELU_BACKWARD, Prelu
from tests.ops.lowered import judge, layout_of, lower, plain_tensor, random_tensors, reordered, run_buffers

LRN = nn.LocalResponseNorm(5, alpha=0.1)


def between(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 32, 3), layer, nn.Conv2d(32, 16, 3))


def step(run, x):
    run(x).square().mean().backward()
    return x.grad


def check(module, **options):
    """Compare a step with PyTorch's; return who runs each op of the plan."""
    theirs = copy.deepcopy(module)
    one, other = (torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    net = fp.compile(module, one, training=True, tune="model", confirm=False, **options)
    torch.testing.assert_close(step(net, one.requires_grad_()), step(theirs, other.requires_grad_()))
    for mine, exact in zip(module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, exact.grad)
    return {node.op: node.choice.target for node in (made.node for made in net.nets[0].plan.steps)}


def test_local_response_normalization_is_traced_as_parts():
    assert "lrn" not in check(between(LRN))


@pytest.mark.parametrize(("special_values", "target"), [("fast", "onednn"), ("exact", "reference")])
def test_learned_slopes(special_values, target):
    """Of a NaN, oneDNN's gradient of the slope is a number."""
    assert check(between(nn.PReLU(32)), special_values=special_values)["prelu_backward"] == target


def test_evaluation_has_no_workspace():
    module, x = between(LRN), torch.randn(2, 8, 12, 12)
    net = fp.compile(module, x, training=True, tune="model", confirm=False)
    with torch.no_grad():
        torch.testing.assert_close(net(x), module(x))
    assert "lrn" in {made.node.op for made in net.evaluations[0].net.plan.steps}


@pytest.mark.parametrize("kind", ["plain", "channels_last"])
@pytest.mark.parametrize("sample", list(PRELU_BACKWARD.samples()), ids=lambda sample: sample.name)
def test_the_gradient_of_slopes_is_summed(sample, kind):
    formats = {name: layout_of(type_, kind if name != "weights" else "plain") for name, type_ in sample.types.items()}
    formats |= {f"diff_{name}": formats[name] for name in ("src", "weights")}
    tensors = random_tensors(sample.types, -1.0, 1.0)
    wanted = PRELU_BACKWARD.reference(Prelu(), {name: tensor.double() for name, tensor in tensors.items()})
    pd = lower(PRELU_BACKWARD, Prelu(), formats).pd
    results = ("diff_src", "diff_weights")
    made = {
        name: torch.full((dnnl.NativeDesc.from_desc(formats[name]).nbytes,), 255, dtype=torch.uint8) for name in results
    }
    buffers = {name: reordered(tensor, formats[name]) for name, tensor in tensors.items()} | made
    run_buffers(pd, {dnnl.Arg[name.upper()]: data for name, data in buffers.items()})
    for name, exact in zip(results, wanted, strict=True):
        assert judge(plain_tensor(made[name], formats[name]), exact, "f32").status == "PASSED", name


def test_sizes_are_checked():
    image, other = TensorType((2, 8, 4, 4)), TensorType((2, 8, 4, 5))
    with pytest.raises(ShapeError, match=r"diff_dst has dims \(2, 8, 4, 5\) but src has \(2, 8, 4, 4\)"):
        PRELU_BACKWARD.infer(Prelu(), {"src": image, "weights": TensorType((1, 8, 1, 1)), "diff_dst": other})
