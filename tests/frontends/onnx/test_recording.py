"""The record of PyTorch's calls: whole, once each, and only while it is on."""

from __future__ import annotations

import operator

import pytest
import torch

from fmtprop.frontends.onnx.recording import Recording


@pytest.fixture
def x() -> torch.Tensor:
    return torch.empty(2, 3, 8, 8, device="meta")


def calls(recording: Recording) -> list[object]:
    return [node.target for node in recording.graph.nodes if node.op == "call_function"]


def test_calls_stay_whole(x):
    recording, weights = Recording(), torch.randn(4, 3, 3, 3)
    recording.input("x", x)
    with torch.no_grad(), recording, recording.within("layer", "Conv"):
        y = torch.nn.functional.silu(torch.conv2d(x, weights))
    aten = torch.ops.aten
    assert calls(recording) == [aten.conv2d.default, aten.silu.default]
    assert recording.node_of(y).meta["val"].shape == (2, 4, 6, 6)
    assert recording.node_of(y).meta["nn_module_stack"] == {"onnx": ("layer", "Conv")}
    assert list(recording.constants.values()) == [weights]


def test_only_results_that_are_read_are_taken_from_several(x):
    recording = Recording()
    recording.input("x", x)
    with torch.no_grad(), recording:
        _, second = torch.split(x, 4, dim=2)
        torch.relu(second)
    assert calls(recording) == [torch.ops.aten.split.Tensor, operator.getitem, torch.ops.aten.relu.default]


def test_an_error_ends_it(x):
    recording = Recording()
    with pytest.raises(ValueError, match="broadcast"), torch.no_grad(), recording:
        torch.add(x, torch.ones(7))
    torch.relu(torch.ones(2))
    assert torch.ops.aten.relu.default not in calls(recording)
