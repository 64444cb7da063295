"""The reference target: any op, on strided formats, and nothing else."""

from __future__ import annotations

import pytest

from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import HostCall
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.normalization import GroupNorm
from fmtprop.ops.pooling import Pooling
from fmtprop.ops.reorder import Reorder
from fmtprop.ops.softmax import Softmax
from fmtprop.ops.sum import Sum
from fmtprop.passes.assignment.formats import channels_last
from fmtprop.targets import ReferenceTarget
from fmtprop.targets.reference import ReferenceImplementation
from tests.targets.nodes import convolution, node_of, request

DIMS = (2, 16, 6, 6)
PLAIN = MemoryDesc(DIMS, "f32")
LAST = MemoryDesc(DIMS, "f32", tag="acdb")
BLOCKED = MemoryDesc(DIMS, "f32", tag="aBcd8b")
TYPES = {"src": TensorType(DIMS)}


def offers(node, ask):
    return list(ReferenceTarget().candidates(node, ask))


def test_there_is_one_way_and_it_is_torch():
    node, formats = convolution()
    (offer,) = offers(node, request(node, formats))
    assert (offer.target, offer.impl, offer.is_ref) == ("reference", "torch", False)
    assert offer.handle == ReferenceImplementation("torch")
    assert offer.cost > 0


def test_any_becomes_row_major():
    node, formats = convolution()
    (offer,) = offers(node, request(node, formats))
    assert offer.operands == {name: MemoryDesc(desc.dims, desc.dtype) for name, desc in formats.items()}
    assert offer.results == (MemoryDesc((2, 32, 10, 10), "f32"),)


def test_strides_are_taken_as_they_are():
    node = node_of("eltwise", Eltwise("relu"), TYPES)
    gaps = MemoryDesc(DIMS, "f32", strides=(1152, 72, 12, 2))
    (offer,) = offers(node, {"src": gaps, "dst": LAST})
    assert (offer.operands["src"], offer.results) == (gaps, (LAST,))


@pytest.mark.parametrize(
    ("op", "attrs", "tag", "taken"),
    [
        ("group_normalization", GroupNorm(4), "acb", "abc"),
        ("group_normalization", GroupNorm(4), "acdb", "acdb"),
        ("group_normalization", GroupNorm(4), "acbd", "abcd"),
        ("softmax", Softmax(1), "acdb", "abcd"),
    ],
)
def test_what_pytorch_would_copy_number_by_number_is_asked_for_as_it_reads_it(op, attrs, tag, taken):
    dims = (2, 16, 6, 6)[: len(tag)]
    node = node_of(op, attrs, {"src": TensorType(dims)})
    src, read = MemoryDesc(dims, "f32", tag=tag), MemoryDesc(dims, "f32", tag=taken)
    (offer,) = offers(node, {"src": src, "dst": MemoryDesc.any(dims, "f32")})
    assert (offer.operands["src"], offer.results) == (read, (read,))
    assert len(offers(node, {"src": src, "dst": src})) == (src == read)


def test_blocked_operands_are_asked_for_row_major():
    node = node_of("eltwise", Eltwise("relu"), TYPES)
    (offer,) = offers(node, {"src": BLOCKED, "dst": MemoryDesc.any(DIMS, "f32")})
    assert (offer.operands["src"], offer.results) == (PLAIN, (PLAIN,))


def test_a_blocked_result_is_refused_rather_than_replaced():
    node = node_of("eltwise", Eltwise("relu"), TYPES)
    assert offers(node, {"src": PLAIN, "dst": BLOCKED}) == []


@pytest.mark.parametrize(("src", "dst", "count"), [(PLAIN, LAST, 1), (BLOCKED, PLAIN, 0), (PLAIN, BLOCKED, 0)])
def test_a_reorder_of_blocks_is_not_torchs(src, dst, count):
    assert len(offers(node_of("reorder", Reorder(), TYPES), {"src": src, "dst": dst})) == count


def test_any_type_is_converted():
    node = node_of("reorder", Reorder("s64"), TYPES)
    wide = MemoryDesc(DIMS, "s64", tag="acdb")
    (offer,) = offers(node, {"src": PLAIN, "dst": wide})
    assert offer.results == (wide,)


def test_reorder_costs():
    target = ReferenceTarget()
    assert target.reorder_cost(PLAIN, PLAIN) == 0.0
    assert target.reorder_cost(PLAIN, LAST) > 0
    assert target.reorder_cost(PLAIN, BLOCKED) is None
    assert target.reorder_cost(BLOCKED, PLAIN) is None


def test_the_operand_of_a_sum_lies_as_the_result_does():
    node, formats = convolution()
    node = node.with_(post_ops=(PostOp("sum", Sum((1.0,)), "post_op_0"),))
    dst = MemoryDesc(node.results[0].dims, node.results[0].dtype)
    last = {name: channels_last(MemoryDesc(desc.dims, desc.dtype)) for name, desc in formats.items()}
    for wanted in (dst, MemoryDesc.any(dst.dims, dst.dtype)):
        (offer,) = offers(node, {**last, "post_op_0": channels_last(dst), "dst": wanted})
        assert offer.operands["post_op_0"] == offer.results[0]


def test_an_index_that_repeats_is_read_as_a_view():
    arguments = '{"self": {"tensor": "src_0"}, "dim": 0, "index": {"tensor": "src_1"}}'
    types = {"src_0": TensorType((6, 8)), "src_1": TensorType((20, 8), "s64")}
    node = node_of("aten", HostCall("aten.gather.default", arguments), types)
    repeated = MemoryDesc((20,), "s64").reshape((20, 1)).expand((20, 8))
    transposed = MemoryDesc((20, 8), "s64", tag="ba")
    for index, read in ((repeated, repeated), (transposed, MemoryDesc((20, 8), "s64"))):
        (offer,) = offers(node, {"src_0": MemoryDesc((6, 8)), "src_1": index, "dst": MemoryDesc((20, 8))})
        assert offer.operands["src_1"] == read


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_gathered_along_an_axis_is_read_as_a_view(axis):
    # a copy of points for each of their neighbours takes as long as gathering them; the first axis has another kernel
    arguments = f'{{"self": {{"tensor": "src_0"}}, "dim": {axis}, "index": {{"tensor": "src_1"}}}}'
    types = {"src_0": TensorType((6, 8, 4)), "src_1": TensorType((6, 8, 4), "s64")}
    node = node_of("aten", HostCall("aten.gather.default", arguments), types)
    points, index, dst = MemoryDesc((8, 4)).expand((6, 8, 4)), MemoryDesc((6, 8, 4), "s64"), MemoryDesc((6, 8, 4))
    (offer,) = offers(node, {"src_0": points, "src_1": index, "dst": dst})
    assert offer.operands["src_0"] == (dst if axis == 0 else points)


def test_results_of_a_call_that_is_right_with_any_strides_lie_as_its_source_does():
    arguments = '{"input": {"tensor": "src_0"}, "output_size": [24, 24], "align_corners": false, "scale_factors": null}'
    src, dst = TensorType((2, 32, 12, 12)), TensorType((2, 32, 24, 24))
    last = MemoryDesc(src.dims, "f32", tag="acdb")
    for target, tag in (("aten.upsample_bilinear2d.vec", "acdb"), ("aten.upsample_trilinear3d.vec", "abcd")):
        node = Node("up", "aten", HostCall(target, arguments), (dst,))
        (offer,) = offers(node, {"src_0": last, "dst": MemoryDesc.any(dst.dims)})
        assert [desc.tag for desc in (offer.operands["src_0"], *offer.results)] == [tag, tag]


def test_a_pooling_does_not_read_images_side_by_side():
    """PyTorch copies them to row-major: RAFT's poolings of 1280 images took 128 ms instead of 3 (bf16)."""
    node = node_of("pooling", Pooling.make("avg_include_padding", (2, 2), 2), TYPES)
    for asked, read in ((PLAIN, PLAIN), (LAST, LAST), (MemoryDesc(DIMS, "f32", tag="cdab"), PLAIN)):
        (offer,) = offers(node, request(node, {"src": asked}))
        assert offer.operands["src"] == read
