"""DML_SLICE1 in a graph: SPEC S1-S4."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.dialects.slice1 import Slice1
from fmtprop.errors import ShapeError
from fmtprop.ir import Graph, TensorType
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops import Conv, Eltwise, emit, slice1

IMAGE = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)


def sliced(operator: Slice1, **options) -> Graph:
    g = Graph("slice1")
    g.output(slice1(g, g.input("x", TensorType((1, 1, 4, 4))), operator, **options))
    return g


@pytest.mark.parametrize(
    ("strides", "expected"), [((1, 1, 2, 2), [[2, 4], [10, 12]]), ((1, 1, -2, 2), [[14, 16], [6, 8]])]
)
def test_s3_examples_run(strides, expected):
    net = fp.compile(sliced(Slice1((0, 0, 0, 1), (1, 1, 4, 3), strides)))
    assert net(IMAGE)[0, 0].tolist() == expected


@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "s64", "s32", "s16", "s8", "u64", "u32", "u16", "u8"])
def test_s3_backwards_in_every_type(dtype, target):
    g = Graph("slice1")
    backwards = Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2))
    g.output(slice1(g, g.input("x", TensorType((1, 1, 4, 4), dtype)), backwards))
    net = fp.compile(g, tune="model", target=target)
    assert net(IMAGE.to(torch_dtype(DataType.from_any(dtype))))[0, 0].tolist() == [[14, 16], [6, 8]]


def test_s2_the_output_need_not_copy_everything():
    net = fp.compile(sliced(Slice1((0, 0, 0, 0), (1, 1, 4, 4), (1, 1, 1, 1), (1, 1, 2, 3))))
    assert torch.equal(net(IMAGE), IMAGE[:, :, :2, :3])


def test_s4_positive_strides_are_a_view():
    net = fp.compile(sliced(Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, 2, 2))))
    assert [node.choice.target for node in net.graph.nodes() if node.op == "slice"] == ["view"]


def test_s4_negative_strides_are_a_copy():
    net = fp.compile(sliced(Slice1((0, 0, 0, 1), (1, 1, 4, 3), (1, 1, -2, 2))))
    (node,) = [node for node in net.graph.nodes() if node.op == "slice"]
    assert node.choice.target == "reference"
    assert "no format takes this view, copied instead" in node.choice.reason


def test_s4_a_slice_of_a_blocked_tensor_at_whole_blocks_is_a_view():
    g = Graph("blocked")
    x = g.input("x", TensorType((1, 32, 4, 4)))
    weights = g.constant("w", TensorType((32, 32, 1, 1)), torch.eye(32).reshape(32, 32, 1, 1))
    y = emit(g, "convolution", {"src": x, "weights": weights}, Conv((1, 1), (0, 0), (0, 0), (0, 0), 1))
    half = slice1(g, y, Slice1((0, 16, 0, 0), (1, 16, 4, 4), (1, 1, 1, 1)))
    g.output(emit(g, "eltwise", {"src": half}, Eltwise("relu")))
    data = torch.randn(1, 32, 4, 4)
    assert torch.allclose(fp.compile(g)(data), data[:, 16:].relu(), atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        (lambda: Slice1((0, 0, 0, 2), (1, 1, 4, 3), (1, 1, 1, 1)), {}, r"DML_SLICE1 of x: slice1: .*"),
        (lambda: Slice1((0, 0), (1, 1), (1, 1)), {}, r"DML_SLICE1 of x"),
    ],
)
def test_s2_errors_name_the_value(operator, options, message):
    with pytest.raises(ShapeError, match=message):
        sliced(operator(), **options)


def test_s2_data_types_go_by_feature_level():
    g = Graph("levels")
    x = g.input("x", TensorType((1, 1, 4, 4), "f64"))
    whole = Slice1((0, 0, 0, 0), (1, 1, 4, 4), (1, 1, 1, 1))
    slice1(g, x, whole, feature_level="4.1")
    with pytest.raises(ShapeError, match=r"f64 is not supported at feature level 3\.0"):
        slice1(g, x, whole, feature_level="3.0")


def test_torch_flips_and_slices_map_onto_it():
    class Mirror(torch.nn.Module):
        def forward(self, x):
            return x.flip(-1, 1)[:, 1:6:2, 2:]

    x = torch.randn(2, 8, 5, 7)
    graph = fp.from_torch(Mirror(), x)
    assert {node.op for node in graph.nodes() if not node.is_boundary} == {"slice"}
    assert torch.equal(fp.compile(graph)(x), Mirror()(x))


def test_a_flip_of_nothing_is_the_tensor_itself():
    class Still(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x.flip([]))

    x = torch.randn(3)
    assert torch.equal(fp.compile(Still(), x)(x), x.relu())
