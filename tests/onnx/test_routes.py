"""A network from PyTorch and its ONNX file: one plan."""

from __future__ import annotations

import io
import warnings
from collections import Counter

import torch
from torch import nn

import fmtprop as fp


def steps(net: fp.CompiledModel) -> Counter[tuple[object, ...]]:
    found = [(step.node.op, step.node.choice) for step in net.plan.steps]
    return Counter((op, made.target, made.impl, made.cost) for op, made in found)


def test_plans_are_the_same():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(16, 17, 1)]
    module = nn.Sequential(*layers, nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(17, 5)).eval()
    x, file = torch.randn(1, 3, 16, 16), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older exporter is deprecated
        torch.onnx.export(module, (x,), file, dynamo=False)
    options = {"deterministic": True, "confirm": False}
    ours, theirs = fp.compile(module, (x,), **options), fp.compile(file.getvalue(), **options)
    assert steps(ours) == steps(theirs)
    torch.testing.assert_close(ours(x), theirs(x))
