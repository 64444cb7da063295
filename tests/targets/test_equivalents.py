"""Equivalent primitives as a target offers them: named, with tails, sliced, checked by the plan's own check."""

from __future__ import annotations

from math import prod

import pytest

from fmtprop import dnnl
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.node import PostOp
from fmtprop.ir.op import opdef
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import OPS, Binary, Conv, Eltwise, InnerProduct, MatMul, Prelu, Sum
from fmtprop.passes.target import EXCHANGED, equivalent_of
from fmtprop.runtime import selfcheck
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.kernel import JIT
from tests.targets.nodes import node_of, request

WITH_EQUIVALENTS = [op for op in OPS if op.equivalents]

#: the samples that are products of two matrices, which other primitives compute too, or images of few columns
APPLICABLE = {
    "convolution": ("1x1", "1x1_one_place", "1x1_3d_odd", "column", "few_columns", "few_columns_depthwise"),
    "inner_product": tuple(s.name for s in opdef("inner_product").samples()),
    "matmul": ("2d", "2d_odd", "vector", "one_input", "one_matrix", "one_matrix_4d"),
}
PROBLEMS = [
    pytest.param(op, next(s for s in op.samples() if s.name == name), id=f"{op.name}-{name}")
    for op in WITH_EQUIVALENTS
    for name in APPLICABLE[op.name]
]


def offers(op, attrs, types, post_ops=(), formats=None):
    """Return the primitives as chosen nodes; formats are `any` where not given, bias plain."""
    node = node_of(
        op, attrs, {name: type_ for name, type_ in types.items() if not name.startswith("post_op")}, post_ops
    )
    asked = {name: MemoryDesc.any(type_.dims, type_.dtype) for name, type_ in types.items()}
    if "bias" in types:
        asked["bias"] = MemoryDesc(types["bias"].dims)
    found = OneDnnTarget().candidates(node, request(node, {**asked, **(formats or {})}))
    return [node.with_(descs=offer.results, choice=offer.choice("offered")) for offer in found if offer.target != JIT]


def others(nodes):
    """Return the nodes that run by another primitive than their op's own, or by their own with other axes."""
    return [node for node in nodes if equivalent_of(node.choice.impl)]


def has_its_own_only(op, attrs, types):
    nodes = offers(op, attrs, types)
    return bool(nodes) and others(nodes) == []


def typed(**dims):
    return {name: TensorType(size) for name, size in dims.items()}


# ---------------------------------------------------------------- which


@pytest.mark.parametrize(
    ("op", "attrs", "types", "kinds"),
    [
        ("convolution", Conv.make(2), typed(src=(1, 32, 7, 7), weights=(16, 32, 1, 1)), {"matmul", "inner_product"}),
        ("inner_product", InnerProduct(), typed(src=(9, 32), weights=(16, 32)), {"matmul", "convolution"}),
        ("matmul", MatMul(), typed(src=(2, 9, 32), weights=(32, 16)), {"inner_product", "convolution"}),
    ],
)
def test_each_is_offered_after_the_ops_own_and_named_by_its_primitive(op, attrs, types, kinds):
    nodes = offers(op, attrs, types)
    first = [node.choice.handle.pd.kind == op for node in nodes]
    assert first == sorted(first, reverse=True)
    assert {node.choice.handle.pd.kind for node in others(nodes)} == kinds
    for node in nodes:
        kind, _, impl = node.choice.impl.partition(":")
        if node.choice.handle.pd.kind != op:
            assert (kind, impl) == (node.choice.handle.pd.kind, node.choice.handle.pd.impl)
        else:
            assert node.choice.impl == node.choice.handle.pd.impl
    assert len({(node.choice.impl, *node.choice.operands.values(), *node.descs) for node in nodes}) == len(nodes)


@pytest.mark.parametrize(
    ("attrs", "weights"),
    [
        (Conv.make(2, strides=2), (16, 32, 1, 1)),
        (Conv.make(2, pad_l=1), (16, 32, 1, 1)),
        (Conv.make(2), (16, 32, 3, 3)),
        (Conv.make(2, groups=2), (2, 8, 16, 1, 1)),
    ],
)
def test_other_convolutions_are_no_products(attrs, weights):
    assert has_its_own_only("convolution", attrs, typed(src=(1, 32, 8, 8), weights=weights))


@pytest.mark.parametrize(
    ("src", "weights"),
    [((1, 32, 12, 8), (16, 32, 3, 3)), ((1, 32, 4, 4), (16, 32, 3, 3)), ((1, 8, 9, 2), (8, 8, 1, 1))],
)
def test_images_with_full_rows_or_few_rows_or_windows_of_one_place_are_not_exchanged(src, weights):
    nodes = offers("convolution", Conv.make(2, pad_l=weights[-1] // 2), typed(src=src, weights=weights))
    assert nodes
    assert not any(node.choice.impl.startswith(EXCHANGED) for node in nodes)


def test_an_exchanged_convolution_has_the_formats_of_the_exchanged_image():
    attrs, types = Conv.make(2, pad_l=1), typed(src=(2, 16, 12, 3), weights=(16, 16, 3, 3))
    nodes = others(offers("convolution", attrs, types))
    assert nodes
    for node in nodes:
        assert node.choice.impl == f"{EXCHANGED}:{node.choice.handle.pd.impl}"
        src = node.choice.operands["src"]
        assert src.transpose((0, 1, 3, 2)) == node.choice.handle.pd.query_md("src").desc
        again = next(iter(OneDnnTarget().named(node, {**node.choice.operands, "dst": node.descs[0]}, node.choice)))
        assert (again.impl, again.operands, again.results) == (node.choice.impl, node.choice.operands, node.descs)


def test_slopes_by_channel_stay_with_an_exchanged_convolution_and_slopes_by_place_do_not():
    attrs, types = Conv.make(2, pad_l=1), typed(src=(2, 16, 12, 3), weights=(16, 16, 3, 3))
    for slopes, is_offered in (((1, 16, 1, 1), True), ((1, 16, 12, 3), False)):
        post_ops = [PostOp("prelu", Prelu(), "post_op_0")]
        nodes = others(offers("convolution", attrs, {**types, **typed(post_op_0=slopes)}, post_ops))
        assert bool(nodes) is is_offered
        for node in nodes:
            assert selfcheck.check_node(node) is None, node.choice.impl


def test_bytes_are_not_exchanged():
    formats = {"src": ((1, 16, 12, 2), "u8"), "weights": ((16, 16, 3, 3), "s8"), "dst": ((1, 16, 12, 2), "f32")}
    natives = {name: dnnl.NativeDesc.from_desc(MemoryDesc.any(*form)) for name, form in formats.items()}
    exchanged = opdef("convolution").equivalents[-1]
    with pytest.raises(UnsupportedOpError, match="convolution of bytes"):
        exchanged(Conv.make(2, pad_l=1), natives, None)


def test_batches_of_weights_and_columns_of_bias_are_matmuls_alone():
    assert has_its_own_only("matmul", MatMul(), typed(src=(3, 9, 32), weights=(3, 32, 16)))
    assert has_its_own_only("matmul", MatMul(), typed(src=(16, 32), weights=(32, 16), bias=(16, 1)))
    assert has_its_own_only("matmul", MatMul(), typed(src=(9, 32), weights=(32, 1), bias=(9, 1)))


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("tails", ["none", "relu", "add", "row", "sum", "add_sum_relu"])
@pytest.mark.parametrize(("op", "sample"), PROBLEMS)
def test_each_passes_the_plans_own_check(op, sample, tails):
    (result,) = op.infer(sample.attrs, sample.types)
    channel = len(result.dims) - 1 if op.name == "matmul" else 1
    row = tuple(size if axis == channel else 1 for axis, size in enumerate(result.dims))
    relu, add, total = PostOp("eltwise", Eltwise("relu")), Binary("add"), Sum((0.5,))
    post_ops, dims = {
        "none": ((), {}),
        "relu": ((relu,), {}),
        "add": ((PostOp("binary", add, "post_op_0"),), {"post_op_0": result.dims}),
        "row": ((PostOp("binary", add, "post_op_0"),), {"post_op_0": row}),
        "sum": ((PostOp("sum", total, "post_op_0"),), {"post_op_0": result.dims}),
        "add_sum_relu": (
            (PostOp("binary", add, "post_op_0"), PostOp("sum", total, "post_op_1"), relu),
            {"post_op_0": result.dims, "post_op_1": result.dims},
        ),
    }[tails]
    nodes = others(offers(op.name, sample.attrs, {**sample.types, **typed(**dims)}, post_ops))
    # only code for AVX2 and later adds to dst behind another post-op, and not every one to a single row or column
    rare = tails == "add_sum_relu" and (dnnl.lib().isa in ("sse41", "avx") or sample.name in ("one_row", "one_output"))
    if rare and not nodes:
        pytest.skip("this oneDNN has no fast code for this tail")
    assert nodes
    for node in nodes:
        assert selfcheck.check_node(node) is None, node.choice.impl
        assert node.choice.handle.repro.startswith("benchdnn"), node.choice.handle.repro
        for name, desc in node.choice.operands.items():
            assert desc.kind == "blocked", name
            assert desc.dims == {**sample.types, **typed(**dims)}[name].dims


def test_a_channels_last_operand_of_a_tail_is_seen_as_rows():
    last = MemoryDesc((2, 16, 5, 7), tag="acdb")
    post_ops = [PostOp("binary", Binary("mul"), "post_op_0")]
    types = typed(src=(2, 32, 5, 7), weights=(16, 32, 1, 1), post_op_0=(2, 16, 5, 7))
    nodes = others(offers("convolution", Conv.make(2), types, post_ops, {"post_op_0": last}))
    assert nodes
    for node in nodes:
        assert node.choice.operands["post_op_0"] == last
        assert selfcheck.check_node(node) is None
    plain = offers("convolution", Conv.make(2), types, post_ops, {"post_op_0": MemoryDesc((2, 16, 5, 7))})
    assert plain
    assert others(plain) == []


def test_a_tail_that_varies_along_some_of_the_joined_axes_has_no_equivalent():
    post_ops = [PostOp("binary", Binary("mul"), "post_op_0")]
    types = typed(src=(2, 32, 5, 7), weights=(16, 32, 1, 1), post_op_0=(2, 16, 1, 1))
    nodes = offers("convolution", Conv.make(2), types, post_ops, {"post_op_0": MemoryDesc((2, 16, 1, 1))})
    assert nodes
    assert others(nodes) == []


def test_products_run_in_channels_last_slices_where_convolutions_have_slow_code_only():
    whole = MemoryDesc((2, 48, 5, 7), tag="acdb")
    formats = {"src": whole.slice((0, 16, 0, 0), (2, 32, 5, 7)), "dst": whole.slice((0, 0, 0, 0), (2, 16, 5, 7))}
    nodes = offers("convolution", Conv.make(2), typed(src=(2, 32, 5, 7), weights=(16, 32, 1, 1)), (), formats)
    products = [node for node in others(nodes) if node.choice.handle.pd.kind == "matmul"]
    assert products
    assert all(node.choice.operands["src"] == formats["src"] for node in products)
    assert all(node.descs == (formats["dst"],) for node in products)


@pytest.mark.parametrize("op", WITH_EQUIVALENTS, ids=lambda op: op.name)
def test_weights_hold_the_same_elements_in_either_shape(op):
    sample = next(s for s in op.samples() if prod(s.types["weights"].dims) > 64 and s.name in ("1x1", "2d"))
    nodes = others(offers(op.name, sample.attrs, sample.types))
    assert nodes
    for node in nodes:
        seen = node.choice.handle.pd.query_md("weights")
        assert seen.nbytes == node.choice.operands["weights"].nbytes, node.choice.impl
        assert seen.desc.padding_bytes == node.choice.operands["weights"].padding_bytes
