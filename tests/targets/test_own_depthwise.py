"""Depthwise convolutions that the kernel of our own computes: formats, refusals, and the plan's own check."""

from __future__ import annotations

import pytest

from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, Eltwise
from fmtprop.runtime import selfcheck
from fmtprop.targets.depthwise import depthwise_kernels
from fmtprop.targets.kernels import kernel_candidates
from tests.targets.nodes import node_of, request

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

RELU6 = PostOp("eltwise", Eltwise("clip", 0.0, 6.0))


def offers(dtype="f32", channels=48, group=1, post_ops=(RELU6,), bias="f32", **formats):
    types = {
        "src": TensorType((1, channels, 9, 14), dtype),
        "weights": TensorType((channels // group, group, group, 3, 3), dtype),
        "bias": TensorType((channels,), bias),
    }
    node = node_of("convolution", Conv.make(2, 2, pad_l=1, groups=channels // group), types, post_ops)
    asked = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
    asked = request(node, {**asked, **formats})
    found = [c for c in kernel_candidates(node, asked) if c.impl.startswith("depthwise")]
    assert len(found) == len(list(depthwise_kernels(node, asked)))
    return node, found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_all_tensors_have_their_channels_innermost(dtype):
    if not takes(DataType(dtype)):
        pytest.skip("kernels in bf16 need AVX-512 with bf16")
    node, (offer,) = offers(dtype)
    assert [offer.operands[name].tag for name in ("src", "weights", "bias")] == ["acdb", "deabc", "a"]
    assert offer.results[0].tag == "acdb"
    assert selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("offered"))) is None


def test_it_reads_a_part_of_a_batch_by_its_pointer():
    src = MemoryDesc((3, 48, 9, 14), tag="acdb").submemory((1, 48, 9, 14), (1, 0, 0, 0))
    _, (offer,) = offers(src=src)
    assert offer.operands["src"] == src


def test_other_convolutions_are_left_to_onednn():
    for _, found in (
        offers(src=MemoryDesc((1, 48, 9, 14), tag="aBcd16b")),
        offers(group=2),
        offers(channels=4),
        offers(post_ops=(PostOp("eltwise", Eltwise("mish")),)),
        offers("bf16", bias="bf16"),
    ):
        assert not found
