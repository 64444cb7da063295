"""The record of PyTorch's calls: whole, once each, and only while it is on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fmtprop.onnx.model.recording import Recorded, RecordedTensor, Recording

aten = torch.ops.aten


@pytest.fixture
def recording() -> Recording:
    found = Recording()
    with torch.no_grad(), found.on():
        yield found


@pytest.fixture
def x(recording) -> RecordedTensor:
    return recording.input((2, 3, 8, 8), torch.float32)


def targets(recording: Recording) -> list[object]:
    return [call.target for call in recording.calls]


def test_calls_stay_whole(recording, x):
    weights = torch.randn(4, 3, 3, 3)
    recording.origin = "layer"
    y = F.silu(torch.conv2d(x, weights))
    assert targets(recording) == [aten.conv2d.default, aten.silu.default]
    assert y is recording.calls[1].result and y.shape == (2, 4, 6, 6) and y.is_meta
    assert recording.calls[0].args == (x, weights) and recording.calls[0].origin == "layer"


def test_a_call_that_reads_numbers_is_not_remembered(recording, x):
    """An index of one number becomes a part of the call; another number makes another call."""
    for number in (1, 2):
        index = recording.traced(torch.tensor(number))
        x[:, index]
        assert recording.calls[-1].args[1:] == (1, number)


def test_a_contiguous_tensor_is_not_copied(recording, x):
    x.transpose(1, 2).contiguous()
    del recording.calls[:]
    assert x.contiguous() is x and not recording.calls


def test_calls_on_constants_are_recorded_and_made(recording, x):
    constant = torch.arange(3.0)
    column = recording.traced(constant).reshape(3, 1)
    assert recording.plain(column).tolist() == [[0], [1], [2]] and not column.is_meta
    assert targets(recording) == [aten.reshape.default]
    assert recording.plain(recording.traced(constant)) is constant
    assert recording.traced(constant) is recording.traced(constant)


def test_an_error_ends_it(recording, x):
    with pytest.raises(ValueError, match="broadcast"):
        torch.add(x, torch.ones(7))
    assert not recording.calls


def test_nothing_else_is_recorded(x):
    other = Recording()
    with other.on():
        torch.relu(torch.ones(2))
        torch.relu(x)
    assert targets(other) == [aten.relu.default]
    assert isinstance(other.calls[0], Recorded)


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
