"""The record of PyTorch's calls: whole, once each, and only while it is on."""

from __future__ import annotations

import operator
import subprocess
import sys

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


def test_loading_does_not_import_the_compiler():
    program = """
import sys, onnx, fmtprop as fp
net = fp.load(onnx.parser.parse_model('''
    <ir_version: 8, opset_import: ["" : 17]>
    net (float[1, 4, 8, 8] x, float[4, 4, 3, 3] w, float[4, 4] v, float[4] b, int64[2] places) => (float[2, 4] y) {
        c = Conv(x, w)
        r = Relu(c)
        n = BatchNormalization(r, b, b, b, b)
        p = MaxPool<kernel_shape = [2, 2]>(n)
        a = GlobalAveragePool(p)
        f = Flatten(a)
        m = MatMul(f, v)
        k = LayerNormalization(m, b, b)
        s = Softmax(k)
        i = IsNaN(s)
        q = Where(i, k, s)
        u = Gather(v, places)
        y = Add(q, u)
    }'''))
print(len(list(net.nodes())) > 10, *(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
