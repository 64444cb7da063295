from __future__ import annotations

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.op import OPSET
from fmtprop.ir.types import TensorType
from fmtprop.ops import Pad, emit
from fmtprop.ops.pad import PAD
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 4, 5))


@pytest.mark.parametrize(
    ("target", "args", "pads"),
    [
        ("aten.constant_pad_nd.default", (X, [1, 2]), ((0, 0, 0, 1), (0, 0, 0, 2))),
        ("aten.constant_pad_nd.default", (X, [0, 1, 2, 3], -1.5), ((0, 0, 2, 0), (0, 0, 3, 1))),
        ("aten.constant_pad_nd.default", (X, [0, 0, 0, 0, 0, 2, 1, 0], 3), ((1, 0, 0, 0), (0, 2, 0, 0))),
        ("aten.pad.default", (X, [1, 0, 0, 4]), ((0, 0, 0, 1), (0, 0, 4, 0))),
        ("aten.pad.default", (X, [1, 1], "constant", 2.0), ((0, 0, 0, 1), (0, 0, 0, 1))),
    ],
)
def test_importers_agree_with_torch(target, args, pads):
    call = check_import(target, *args)
    (node,) = (node for node in call.graph.nodes() if node.op == "pad")
    assert (node.attrs.pads_l, node.attrs.pads_r) == pads


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("pads", [[1, 2], [1, 0, 2, 1], [0, 1, 1, 1, 2, 0]], ids=len)
@pytest.mark.parametrize("batched", [False, True])
def test_mirrored_padding_is_written_to_its_place(mode, pads, batched):
    axes = len(pads) // 2
    x = TensorType((2,) * batched + (3, 4, 5, 6)[: axes + 1])
    call = check_import("aten.pad.default", x, pads, mode)
    (node,) = (node for node in call.graph.nodes() if node.op == "aten")
    src = torch.randn(x.dims)
    expected = torch.nn.functional.pad(src, pads, mode)
    place = torch.empty_like(expected)
    ready = OPSET["aten"].pytorch.operator(node.attrs, {"src_0": src}, [place])
    assert ready.keywords["out"] is place  # no tensor is made and copied
    ready()
    assert torch.equal(place, expected)


def test_constant_padding_is_written_to_its_place():
    attrs = Pad((1, 0, 2, 0), (0, 3, 1, 0), -1.5)
    src = torch.randn(2, 3, 4, 5)
    (expected,) = PAD.reference(attrs, {"src": src})
    place = torch.empty_like(expected)
    ready = PAD.pytorch.operator(attrs, {"src": src}, [place])
    src.copy_(torch.randn(2, 3, 4, 5))  # the next run's numbers
    ready()
    assert torch.equal(place, PAD.reference(attrs, {"src": src})[0])


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_no_padding_is_the_argument(mode):
    assert FakeCall("aten.constant_pad_nd.default", X, [0, 0, 0, 0]).run() == Value("x0")
    assert FakeCall("aten.pad.default", X, [0, 0, 0, 0], mode).run() == Value("x0")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.pad.default", (TensorType((2, 3, 5)), [1, 1], "circular")),
        ("aten.pad.default", (X, [0, 1, 0, 0], "circular")),
        ("aten.constant_pad_nd.default", (X, [-1, 1])),
        ("aten.constant_pad_nd.default", (X.with_dtype("s64"), [1, 1])),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (lambda: Pad((0, -1), (0, 0)), r"pads_l\[1\] is -1; padding cannot be negative"),
        (lambda: Pad((0, 1), (0, 0)), "must have one entry per axis of src, which has 4"),
    ],
)
def test_errors(attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, "pad", {"src": x}, attrs())
