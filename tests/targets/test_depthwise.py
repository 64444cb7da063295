"""A fused depthwise convolution on oneDNN: formats, arguments, what is refused, and that it is right."""

from __future__ import annotations

import pytest

from fmtprop import dnnl
from fmtprop.ir.node import PostOp
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Conv
from fmtprop.runtime import selfcheck
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.arguments import arguments
from tests.passes.test_depthwise_fusion import fuse, pair
from tests.targets.nodes import request


def offers(target, node, types, formats=None):
    asked = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
    found = target.candidates(node, request(node, {**asked, **(formats or {})}))
    return [(offer, node.with_(descs=offer.results, choice=offer.choice("offered"))) for offer in found]


def problem(**changes):
    graph, first, second = pair(**changes)
    node, inputs = fuse(graph, first, second)
    return node, {name: graph.type_of(value) for name, value in inputs.items()}


@pytest.mark.parametrize("tag", ["any", "acdb", "aBcd8b"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("channels", "stride", "size"), [(24, 1, 9), (17, 1, 10), (24, 2, 9), (17, 2, 12), (48, 2, 56)]
)
def test_every_implementation_passes_the_plans_own_check(channels, stride, size, bias, tag):
    node, types = problem(channels=channels, stride=stride, size=size, bias=bias)
    formats = {}
    if tag != "any":
        formats = {"src": MemoryDesc(types["src"].dims, tag=tag), "dst": MemoryDesc(node.results[0].dims, tag=tag)}
    found = offers(OneDnnTarget(), node, types, formats)
    assert found
    for offer, formatted in found:
        assert offer.results[0].dims == node.results[0].dims
        assert all(offer.operands[name].dims == types[name].dims for name in types)
        assert all({**offer.operands, "dst": offer.results[0]}[name] == desc for name, desc in formats.items())
        assert offer.handle.pd.kind == "convolution"
        if not offer.is_ref:
            assert selfcheck.check_node(formatted) is None, offer.impl


def test_weights_and_bias_have_arguments_of_their_own():
    node, types = problem()
    offer, formatted = offers(OneDnnTarget(), node, types)[0]
    found = {name: number for name, number, _ in arguments(formatted, offer.handle.pd)}
    assert found["post_op_1"] == dnnl.Arg.ATTR_POST_OP_DW | dnnl.Arg.WEIGHTS
    assert found["post_op_1_bias"] == dnnl.Arg.ATTR_POST_OP_DW | dnnl.Arg.BIAS
    assert len(found) == len(types) + 1
    assert "dw:k3s1p1" in offer.handle.repro


def test_weights_in_a_format_that_the_fused_code_does_not_take_are_not_offered():
    node, types = problem()
    plain = MemoryDesc(types["post_op_1"].dims)
    assert offers(OneDnnTarget(), node, types, {"post_op_1": plain}) == []


def test_a_wrapper_of_fast_code_is_no_reference():
    node, types = problem()
    found = offers(OneDnnTarget(), node, types)
    assert found
    for offer, _ in found:
        wrapped = offer.impl.removeprefix("ref_fused_convolution:any:")
        assert offer.is_ref == ("ref:" in wrapped)


def test_what_onednn_cannot_fuse_is_not_offered():
    node, types = problem(stride=2, size=9)
    attrs = Conv((2, 2), (0, 0), (1, 1), (1, 1), 24)
    uneven = Conv((2, 1), (0, 0), (1, 1), (1, 1), 24)
    tail = tuple(PostOp(p.op, uneven, p.operand, p.origin, p.bias) if p.attrs == attrs else p for p in node.post_ops)
    assert offers(OneDnnTarget(), node.with_(post_ops=tail), types) == []
