"""The oneDNN target: what it offers, what it keeps, what it leaves out and why."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from fmtprop import compile, dnnl
from fmtprop.errors import DnnlError, GraphError, PlanError
from fmtprop.ir.grid import Grid
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.op import opdef
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.convolution_backward import ConvGradient
from fmtprop.ops.deconvolution import Deconv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul import MatMul
from fmtprop.ops.normalization import BatchNorm
from fmtprop.ops.pooling import Pooling
from fmtprop.ops.prelu import Prelu
from fmtprop.ops.recurrent import KINDS, Recurrent
from fmtprop.ops.reduction import Reduction
from fmtprop.ops.reorder import Reorder
from fmtprop.ops.resampling import Resampling
from fmtprop.ops.softmax import Softmax
from fmtprop.ops.sum import Sum
from fmtprop.passes.target import can_be_read
from fmtprop.runtime import selfcheck
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget, onednn
from fmtprop.targets.arguments import arguments
from fmtprop.targets.known_bad import known_bad
from tests.targets.nodes import chosen, convolution, node_of, request, step_of

needs_bf16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
RELU = PostOp("eltwise", Eltwise("relu"))
IMAGE = (2, 16, 12, 12)


@pytest.fixture
def target() -> OneDnnTarget:
    return OneDnnTarget()


# ---------------------------------------------------------------- offers


def test_any_becomes_concrete_and_the_best_comes_first(target):
    node, formats = convolution()
    offers = list(target.candidates(node, request(node, formats)))
    assert len(offers) > 1
    for offer in offers:
        assert set(offer.operands) == {"src", "weights", "bias"}
        assert all(desc.kind != "any" for desc in (*offer.operands.values(), *offer.results))
        assert offer.target == "onednn"
        assert offer.is_ref == offer.impl.startswith("ref") == offer.handle.pd.is_reference
    assert not offers[0].is_ref
    # what oneDNN itself would take
    assert [offer.handle.pd.index for offer in offers] == sorted(offer.handle.pd.index for offer in offers)
    assert offers[0].handle.pd.index == 0


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("tail", [(), (RELU,), (PostOp("eltwise", Eltwise("swish", 1.0)),)])
def test_a_name_finds_the_implementations_that_have_it(target, kernel, tail):
    attrs = Conv((1, 1), (0, 0), (0, 0), (0, 0))
    formats = {"src": MemoryDesc(IMAGE, "f32"), "weights": MemoryDesc.any((32, 16, kernel, kernel), "f32")}
    size = IMAGE[2] - kernel + 1
    node = Node("conv", "convolution", attrs, (TensorType((2, 32, size, size)),), post_ops=tail)
    asked = request(node, formats)
    offers = list(target.candidates(node, asked))
    assert len({offer.impl for offer in offers}) > 1
    for offer in offers:
        found = list(OneDnnTarget().named(node, asked, offer.choice("")))
        same = [one for one in offers if (one.target, one.impl) == (offer.target, offer.impl)]
        assert [(one.operands, one.results) for one in found] == [(one.operands, one.results) for one in same]
        assert {(one.target, one.impl) for one in found} == {(offer.target, offer.impl)}
    assert not list(target.named(node, asked, replace(offers[0].choice(""), impl="jit:unknown")))


def test_the_descriptor_of_a_named_implementation_is_made_once(target, monkeypatch):
    node, formats = convolution()
    offer = next(iter(target.candidates(node, request(node, formats))))
    (named,) = list(OneDnnTarget().named(node, request(node, formats), offer.choice("")))[:1]
    monkeypatch.setattr(dnnl.Recipe, "create", None)
    named.handle.build(1).close()


def test_a_concrete_request_is_served_as_asked(target):
    node, formats = convolution()
    plain = MemoryDesc((2, 16, 10, 10), "f32")
    offers = list(target.candidates(node, request(node, {**formats, "src": plain})))
    assert offers
    assert all(offer.operands["src"] == plain for offer in offers)


def test_implementations_are_asked_for_one_by_one(target, monkeypatch):
    asked: list[str] = []
    honest = dnnl.PrimitiveDesc.walk

    def walk(self):
        for pd in honest(self):
            asked.append(pd.impl)
            yield pd

    monkeypatch.setattr(dnnl.PrimitiveDesc, "walk", walk)
    node, formats = convolution()
    answers = target.candidates(node, request(node, formats))
    assert asked == []
    first = next(iter(answers))
    assert asked == [first.impl]
    rest = list(answers)
    assert rest[0] is first
    assert len(asked) >= len(rest) > 1


def test_later_implementations_are_no_offers(target):
    node, formats = convolution()
    own = [offer for offer in target.candidates(node, request(node, formats)) if ":any" not in offer.impl]
    assert 1 < len(own) <= onednn._IMPLEMENTATIONS


def test_offers_hold_no_native_objects_until_they_are_used(target):
    node, formats = convolution()
    gc.collect()
    before = dnnl.live_handles().get("primitive_desc", 0)
    offers = list(target.candidates(node, request(node, formats)))
    assert dnnl.live_handles().get("primitive_desc", 0) == before
    dnnl.Primitive(offers[0].handle.pd)
    assert dnnl.live_handles()["primitive_desc"] == before + 1


def test_equal_questions_share_one_answer(target):
    node, formats = convolution()
    other = node.with_(name="conv_2", origin="elsewhere")
    first = next(iter(target.candidates(node, request(node, formats))))
    assert next(iter(target.candidates(other, request(other, formats)))).handle is first.handle
    tailed = node.with_(post_ops=(RELU,))
    assert next(iter(target.candidates(tailed, request(tailed, formats)))).handle is not first.handle


def test_offers_end_although_their_primitives_are_made_on_the_way(target):
    """OneDNN's iterator goes back to the start for what its primitive cache holds."""
    node, formats = convolution()
    offers = []
    for offer in target.candidates(node, request(node, formats)):
        offers.append((offer.impl, *offer.results))
        dnnl.Primitive(offer.handle.pd)
        assert len(offers) < 50
    assert len(set(offers)) == len(offers) > 1
    again = [(offer.impl, *offer.results) for offer in OneDnnTarget().candidates(node, request(node, formats))]
    assert again == offers


# ---------------------------------------------------------------- post-ops


def test_a_sum_reads_the_format_of_dst(target):
    node, formats = convolution(post_ops=[PostOp("sum", Sum((1.0,)), "post_op_0"), RELU])
    residual = MemoryDesc.any((2, 32, 10, 10), "f32")
    offers = list(target.candidates(node, request(node, {**formats, "post_op_0": residual})))
    assert offers
    assert all(offer.operands["post_op_0"] == offer.results[0] for offer in offers)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sum_scales_what_it_adds(target, scale):
    node, formats = convolution(post_ops=[PostOp("sum", Sum((scale,)), "post_op_0")])
    residual = MemoryDesc.any((2, 32, 10, 10), "f32")
    step = step_of(chosen(target, node, {**formats, "post_op_0": residual}))
    assert selfcheck.check_node(step.node, step.executable) is None


def test_a_binary_tail_comes_in_the_format_asked_for_or_in_onednns(target):
    node, formats = convolution(post_ops=[PostOp("binary", Binary("add"), "post_op_0")])
    plain = MemoryDesc((1, 32, 1, 1), "f32")
    assert chosen(target, node, {**formats, "post_op_0": plain}).choice.operands["post_op_0"] == plain
    wanted = MemoryDesc.any((2, 32, 10, 10), "f32")
    free = chosen(target, node, {**formats, "post_op_0": wanted})
    assert free.choice.operands["post_op_0"].kind == "blocked"
    assert selfcheck.check_node(free) is None


def test_a_tail_that_onednn_has_not_is_refused_by_name(target):
    node, formats = convolution(post_ops=[PostOp("softmax", Softmax(1), "post_op_0")])
    slope = MemoryDesc((1, 32, 1, 1), "f32")
    with pytest.raises(GraphError, match=r"node conv_1 \(convolution\): oneDNN has no post-op 'softmax'"):
        list(target.candidates(node, request(node, {**formats, "post_op_0": slope})))


# ---------------------------------------------------------------- refusals


def test_what_onednn_declines_is_not_offered(target):
    node = node_of("pooling", Pooling("max", (2, 2), (2, 2), (0, 0), (0, 0), (0, 0)), {"src": TensorType(IMAGE)})
    ask = {"src": MemoryDesc(IMAGE, "f32"), "dst": MemoryDesc((2, 16, 6, 6), "f32", tag="aBcd8b")}
    fast = [offer for offer in target.candidates(node, ask) if not offer.is_ref]
    assert fast == []
    blocked = {"src": MemoryDesc.any(IMAGE, "f32"), "dst": ask["dst"]}  # of a pooling, src must be given
    assert list(target.candidates(node, blocked)) == []


def test_failures_are_not_refusals(target, monkeypatch):
    node, formats = convolution()

    def fail(*_):
        raise DnnlError("dnnl_convolution_forward_primitive_desc_create", "out_of_memory", "details", "")

    declaration = opdef("convolution")
    monkeypatch.setattr(onednn, "opdef", lambda op: replace(declaration, primitive=fail))
    with pytest.raises(DnnlError, match="out_of_memory"):
        list(target.candidates(node, request(node, formats)))


def test_an_op_without_a_primitive_has_no_candidates(target):
    node = node_of("reshape", opdef("reshape").attrs((4, 6)), {"src": TensorType((2, 12))})
    assert list(target.candidates(node, {"src": MemoryDesc((2, 12), "f32")})) == []
    assert opdef("aten").primitive is None


# ---------------------------------------------------------------- data types


@pytest.mark.parametrize("dtype", ["f64", "s64", "s32", "boolean"])
def test_other_types_than_floats_are_left_to_the_reference_target(target, dtype):
    node = node_of("pooling", Pooling("max", (2, 2), (2, 2), (0, 0), (0, 0), (0, 0)), {"src": TensorType(IMAGE, dtype)})
    assert list(target.candidates(node, request(node, {"src": MemoryDesc(IMAGE, dtype)}))) == []


@pytest.mark.parametrize(
    ("src", "dst", "served"),
    [
        ("f32", "f32", True),
        ("f32", "bf16", dnnl.supports("bf16")),  # elsewhere oneDNN copies number by number
        ("bf16", "f32", dnnl.supports("bf16")),
        ("bf16", "bf16", dnnl.supports("bf16")),
        ("s8", "s8", True),
        ("s32", "s32", True),
        ("s64", "s64", False),
        ("f64", "f64", False),
        ("s8", "u8", False),  # oneDNN saturates where PyTorch wraps
        ("f32", "s8", False),  # oneDNN rounds where PyTorch truncates
        ("f32", "f64", False),
        ("f16", "f32", dnnl.supports("f16")),
        ("f32", "f16", dnnl.supports("f16")),
        ("f16", "f16", dnnl.supports("f16")),
    ],
)
def test_reorders_of_types(target, src, dst, served):
    attrs = Reorder("" if src == dst else dst)
    node = node_of("reorder", attrs, {"src": TensorType(IMAGE, src)})
    ask = {"src": MemoryDesc(IMAGE, src), "dst": MemoryDesc(IMAGE, dst, tag="acdb")}
    offers = list(target.candidates(node, ask))
    assert bool(offers) is served
    assert all((offer.operands["src"], offer.results[0]) == tuple(ask.values()) for offer in offers)


@pytest.mark.parametrize(
    ("src", "dst", "served"), [("f16", "f16", True), ("f16", "f32", False), ("f32", "f16", False), ("f32", "f32", True)]
)
@pytest.mark.skipif(dnnl.supports("f16"), reason="this CPU has f16")
def test_blocks_of_a_type_that_the_cpu_lacks_are_not_converted_number_by_number(target, src, dst, served):
    node = node_of("reorder", Reorder("" if src == dst else dst), {"src": TensorType(IMAGE, src)})
    ask = {"src": MemoryDesc(IMAGE, src), "dst": MemoryDesc(IMAGE, dst, tag="aBcd8b")}
    assert bool(list(target.candidates(node, ask))) is served


@needs_bf16
def test_a_product_of_bf16_may_store_f32(target):
    node, formats = convolution(dtype="bf16")
    node = node.with_(results=(TensorType(node.results[0].dims, "f32"),))
    best = chosen(target, node, formats)
    assert not best.choice.handle.pd.is_reference
    assert selfcheck.check_node(best) is None


# ---------------------------------------------------------------- routed around


def test_a_rejected_implementation_is_not_offered_again(target):
    node, formats = convolution()
    first = chosen(target, node, formats)
    target.reject(first)
    offers = list(target.candidates(node, request(node, formats)))
    assert offers
    assert all((offer.impl, offer.results) != (first.choice.impl, first.descs) for offer in offers)
    second = chosen(target, node, formats)
    target.reject(second)
    assert chosen(target, node, formats).choice.impl not in (first.choice.impl, second.choice.impl)


def test_rejecting_is_about_one_problem_only(target):
    node, formats = convolution()
    target.reject(chosen(target, node, formats))
    other, others = convolution(channels=24)
    assert chosen(target, other, others).choice.impl == chosen(OneDnnTarget(), other, others).choice.impl


def test_rejecting_a_node_without_a_choice_changes_nothing(target):
    node, formats = convolution()
    target.reject(node)
    assert chosen(target, node, formats).choice.impl == chosen(OneDnnTarget(), node, formats).choice.impl


def resampling(tag: str, tail: str = "binary"):
    node = node_of(
        "resampling",
        Resampling("nearest", (12, 12)),
        {"src": TensorType((2, 16, 6, 6))},
        {"binary": [PostOp("binary", Binary("add"), "post_op_0")], "eltwise": [RELU]}[tail],
    )
    formats = {"src": MemoryDesc((2, 16, 6, 6), "f32", tag=tag)}
    return node, formats | ({"post_op_0": MemoryDesc(IMAGE, "f32", tag=tag)} if tail == "binary" else {})


@pytest.mark.parametrize(
    ("version", "tag", "tail", "bad"),
    [
        ((3, 2, 0), "aBcd8b", "binary", True),
        ((3, 2, 0), "acdb", "binary", True),
        ((3, 2, 0), "abcd", "binary", False),
        ((3, 2, 0), "aBcd8b", "eltwise", False),
        ((3, 4, 0), "aBcd8b", "binary", False),
        ((3, 0, 0), "aBcd8b", "binary", True),
    ],
)
def test_known_bad_resampling(version, tag, tail, bad):
    node, formats = resampling(tag, tail)
    why = known_bad(version, node, formats, "simple:any")
    assert (why is not None) is bad
    assert why is None or "resampling" in why


def test_known_bad_binary_tail():
    node, formats = convolution(post_ops=[PostOp("binary", Binary("add"), "post_op_0")])
    dense = MemoryDesc((2, 32, 10, 10), "f32", tag="acdb")
    gaps = MemoryDesc((2, 32, 10, 10), "f32", strides=(6400, 200, 20, 1))
    assert known_bad((3, 2, 0), node, {**formats, "post_op_0": dense}, "jit:avx2") is None
    padded = MemoryDesc((2, 30, 10, 10), "f32", tag="aBcd8b")
    assert known_bad((3, 2, 0), node, {**formats, "post_op_0": padded}, "jit:avx2") is None
    assert "non-dense" in known_bad((3, 2, 0), node, {**formats, "post_op_0": gaps}, "jit:avx2")
    assert known_bad((3, 4, 0), node, {**formats, "post_op_0": gaps}, "jit:avx2") is None


@pytest.mark.parametrize(
    ("channels", "post_ops", "impl", "bad"),
    [
        (256, [RELU], "brg_conv:avx512_core+brgconv_strided:avx512_core", True),
        (240, [RELU], "brg_conv:avx512_core+brgconv_strided:avx512_core", False),
        (256, [], "brg_conv:avx512_core+brgconv_strided:avx512_core", False),
        (256, [RELU], "brg_conv:avx2+brgconv_strided:avx2", False),
    ],
)
def test_known_bad_strided_deconvolution(channels, post_ops, impl, bad):
    src, weights, dst = (1, channels, 8, 8), (32, channels, 4, 4), (1, 32, 16, 16)
    types = {"src": TensorType(src, "f32"), "weights": TensorType(weights, "f32")}
    node = node_of("deconvolution", Deconv.make(2, strides=2, pad_l=1), types, post_ops)
    formats = {name: MemoryDesc(dims, "f32", tag="acdb") for name, dims in (("src", src), ("weights", weights))}
    formats["dst"] = MemoryDesc(dst, "f32", tag="acdb")
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad
    assert known_bad((3, 6, 2), node, formats, impl) is None


@pytest.mark.parametrize(
    ("rows", "impl", "bad"),
    [
        ((48,), "convolution:jit_1x1:avx512_core_amx", True),
        ((2, 24), "convolution:jit_1x1:avx512_core_amx+gelu", True),
        ((49,), "convolution:jit_1x1:avx512_core_amx", False),
        ((48,), "convolution:jit_1x1:avx512_core_bf16", False),
        ((48,), "brgemm:avx512_core_amx", False),
    ],
)
def test_known_bad_products_of_few_rows_on_amx(rows, impl, bad):
    """A self-check may see another number of rows: sizes with equal tails are alike."""
    node = node_of(
        "matmul", MatMul(), {"src": TensorType((*rows, 64), "bf16"), "weights": TensorType((64, 64), "bf16")}
    )
    formats = {"src": MemoryDesc((*rows, 64), "bf16"), "dst": MemoryDesc((*rows, 64), "bf16")}
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


@pytest.mark.parametrize(
    ("channels", "dilate", "impl", "bad"),
    [
        (33, 1, "jit:avx512_core_amx", True),
        (33, 0, "jit:avx512_core_amx", False),
        (31, 1, "jit:avx512_core_amx", False),
        (48, 1, "jit:avx512_core_amx", False),
        (33, 1, "brgconv_bwd_w:avx512_core_amx", False),
    ],
)
def test_known_bad_gradient_by_dilated_weights_on_amx(channels, dilate, impl, bad):
    node, formats = gradient_by_weights(channels, dilate)
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


@pytest.mark.parametrize(
    ("kind", "dtype", "impl", "bad"),
    [
        ("lbr_gru", "bf16", "ref", True),
        ("lbr_gru", "f32", "ref", False),
        ("lstm", "bf16", "ref", False),
        ("lstm", "bf16", "brgemm:avx512_core_amx", False),
    ],
)
def test_known_bad_gru_by_gemm_in_bf16(kind, dtype, impl, bad):
    types = KINDS[kind].problem_types(29, 2, 64, 48, 1)
    node = node_of(kind, Recurrent(), types)
    formats = {name: MemoryDesc(type_.dims, dtype) for name, type_ in types.items()}
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


@pytest.mark.parametrize(
    ("low", "dilate", "pad", "impl", "bad"),
    [
        (-117, 1, 4, "jit:avx512_core_amx", True),
        (-117, 1, 4, "brgconv:avx2_vnni", True),
        (-117, 1, 4, "brgconv:avx512_core_vnni", False),
        (0, 1, 4, "jit:avx512_core_amx", False),
        (-117, 0, 4, "jit:avx512_core_amx", False),
        (-117, 1, 0, "jit:avx512_core_amx", False),
    ],
)
def test_known_bad_zero_point_under_dilated_windows(low, dilate, pad, impl, bad):
    types = {"src": TensorType((2, 32, 20, 20)), "weights": TensorType((24, 32, 5, 5))}
    node = node_of("convolution", Conv.make(2, 1, dilate, pad_l=pad), types)
    node = node.with_(grids={"src": Grid((0.02,), low, low + 255)})
    formats = {name: MemoryDesc(t.dims, "u8") for name, t in types.items()}
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


def gradient_by_weights(channels, dilate, outputs=16):
    """Return a 3x3 convolution's gradient by its weights, in bf16, and the formats of its operands."""
    window = (1, 1), (dilate, dilate), (1 + dilate,) * 2, (1 + dilate,) * 2
    dims = {"src": (1, channels, 14, 14), "diff_dst": (1, outputs, 14, 14)}
    types = {name: TensorType(size, "bf16") for name, size in dims.items()}
    node = node_of("convolution_backward_weights", ConvGradient(*window, 1, (outputs, channels, 3, 3), False), types)
    return node, {name: MemoryDesc(size, "bf16", tag="acdb") for name, size in dims.items()}


@pytest.mark.parametrize("dilate", [0, 1, 4])
def test_gradients_by_weights_of_every_tail_are_right(dilate):
    target = OneDnnTarget()
    for channels in (16, 24, 33, 40, 47, 48, 81):
        node, formats = gradient_by_weights(channels, dilate)
        for candidate in target.candidates(node, request(node, formats)):
            way = node.with_(descs=candidate.results, choice=candidate.choice("tried"))
            assert check_node(way) is None, (channels, candidate.impl)


def test_products_of_every_number_of_rows_are_right():
    """Of few rows by each implementation that there is for them: its tiles and tails differ."""
    target = OneDnnTarget()
    dtype = "bf16" if target.computes_in(DataType("bf16")) else "f32"
    for rows in range(1, 66):
        node = node_of(
            "matmul", MatMul(), {"src": TensorType((rows, 64), dtype), "weights": TensorType((64, 48), dtype)}
        )
        asked = request(node, {"src": MemoryDesc((rows, 64), dtype), "weights": MemoryDesc.any((64, 48), dtype)})
        for candidate in target.candidates(node, asked):
            way = node.with_(descs=candidate.results, choice=candidate.choice("tried"))
            assert check_node(way) is None, (rows, candidate.impl)


@pytest.mark.parametrize(("padded", "impl", "bad"), [(4, "jit", True), (16, "jit", False), (4, "ref:any", False)])
def test_known_bad_normalization_of_a_part_of_a_block(padded, impl, bad):
    types = {"src": TensorType((4, 4, 14, 25), "f32"), **dict.fromkeys(("mean", "variance"), TensorType((4,), "f32"))}
    node = node_of("batch_normalization", BatchNorm(), types)
    strides = (5600, 5600, 400, 16)
    src = MemoryDesc((4, 4, 14, 25), "f32", strides=strides, inner_blocks=[(1, 16)], padded_dims=(4, padded, 14, 25))
    assert (known_bad((3, 2, 0), node, {"src": src, "dst": src}, impl) is not None) is bad


@pytest.mark.parametrize(
    ("op", "src", "weights", "impl", "bad"),
    [
        ("matmul", "aBc8b", "Ba8b", "inner_product:x64:gemm:jit", True),
        ("matmul", "aBc8b", "Ba8b", "gemm:jit", False),
        ("matmul", "aBc8b", "Ba8b", "inner_product:brgemm:avx2", False),
        ("matmul", "abc", "ab", "inner_product:x64:gemm:jit", False),
        ("matmul", "abC8c", "Ab8a", "inner_product:x64:gemm:jit", True),
        ("inner_product", "acb", "acb", "x64:gemm:jit", False),
        ("inner_product", "aBc8b", "aBc8b", "x64:gemm:jit", False),
        ("inner_product", "cba", "cba", "x64:gemm:jit", False),
        ("inner_product", "bac", "bac", "x64:gemm:jit", True),
        ("inner_product", "Abc8a", "Abc8a", "x64:gemm:jit", True),
    ],
)
def test_known_bad_inner_product_of_no_matrices(op, src, weights, impl, bad):
    is_matmul = op == "matmul"
    dims = {"src": (2, 16, 24), "weights": (24, 8) if is_matmul else (8, 16, 24)}
    types = {name: TensorType(size, "f32") for name, size in dims.items()}
    node = node_of(op, MatMul() if is_matmul else InnerProduct(), types)
    formats = {name: MemoryDesc(dims[name], "f32", tag=tag) for name, tag in (("src", src), ("weights", weights))}
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


def test_a_strided_deconvolution_of_many_channels_is_right_at_once():
    module = torch.nn.Sequential(torch.nn.ConvTranspose2d(256, 64, 4, 2, 1), torch.nn.ReLU()).eval()
    example = torch.randn(1, 256, 16, 16)
    with torch.no_grad():  # a warning is an error
        torch.testing.assert_close(compile(module, (example,), tune="model")(example), module(example))


def pooling(tag: str, tail: str, dtype: str = "f32"):
    node = node_of(
        "pooling",
        Pooling.make("max", (3, 3), strides=2, pad_l=1),
        {"src": TensorType((2, 32, 12, 12), dtype)},
        [PostOp("binary", Binary("add"), "post_op_0")],
    )
    return node, {
        "src": MemoryDesc((2, 32, 12, 12), dtype, tag=tag),
        "post_op_0": MemoryDesc((2, 32, 6, 6), dtype, tag=tail),
    }


@pytest.mark.parametrize(
    ("version", "tag", "tail", "impl", "bad"),
    [
        ((3, 2, 0), "acdb", "acdb", "jit:avx512_core", False),
        ((3, 2, 0), "acdb", "abcd", "jit:avx512_core", True),
        ((3, 2, 0), "aBcd8b", "abcd", "jit:avx2", True),
        ((3, 2, 0), "abcd", "abcd", "jit:avx512_core", True),
        ((3, 2, 0), "abcd", "abcd", "simple_nchw:any", False),
        ((3, 6, 2), "acdb", "abcd", "jit:avx512_core", True),
        ((3, 13, 2), "acdb", "abcd", "jit:avx512_core", False),
        ((3, 13, 2), "abcd", "abcd", "jit:avx512_core", True),
        ((3, 13, 2), "abcd", "acdb", "jit:avx512_core", True),
    ],
)
def test_known_bad_pooling(version, tag, tail, impl, bad):
    node, formats = pooling(tag, tail)
    formats["dst"] = MemoryDesc((2, 32, 6, 6), "f32", tag=tag)
    assert (known_bad(version, node, formats, impl) is not None) is bad
    formats["post_op_0"] = MemoryDesc((1, 32, 1, 1), "f32")
    assert known_bad(version, node, formats, impl) is None  # only a source of dst's size is misread


@pytest.mark.parametrize(
    ("channels", "tag", "impl", "bad"),
    [
        (5, "acdb", "jit_bf16_1x1:avx512_core_bf16", True),
        (33, "acdb", "jit_bf16_1x1:avx512_core_bf16+swish", True),
        (6, "acdb", "jit_bf16_1x1:avx512_core_bf16", False),
        (5, "aBcd16b", "jit_bf16_1x1:avx512_core_bf16", False),
        (5, "acdb", "brgconv_1x1:avx512_core_bf16", False),
    ],
)
def test_known_bad_pointwise_convolution_of_odd_channels(channels, tag, impl, bad):
    types = {"src": TensorType((2, channels, 2, 60), "bf16"), "weights": TensorType((33, channels, 1, 1), "bf16")}
    node = node_of("convolution", Conv((1, 1), (0, 0), (0, 0), (0, 0), 1), types)
    formats = {"src": MemoryDesc((2, channels, 2, 60), "bf16", tag=tag)}
    assert (known_bad((3, 2, 0), node, formats, impl) is not None) is bad


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
@pytest.mark.parametrize("size", [(2, 60), (1, 30), (7, 7)])
def test_pointwise_convolutions_of_odd_channels_pass_their_check(size):
    types = {"src": TensorType((2, 5, *size), "bf16"), "weights": TensorType((33, 5, 1, 1), "bf16")}
    node = node_of("convolution", Conv((1, 1), (0, 0), (0, 0), (0, 0), 1), types)
    formats = {"src": MemoryDesc((2, 5, *size), "bf16", tag="acdb"), "weights": MemoryDesc.any((33, 5, 1, 1), "bf16")}
    for candidate in OneDnnTarget().candidates(node, request(node, formats)):
        chosen = node.with_(descs=candidate.results, choice=candidate.choice("offered"))
        assert check_node(chosen) is None, candidate.impl


VOLUME = (2, 8, 4, 8, 5)


@pytest.mark.parametrize(
    ("dims", "weights", "tag", "bad"),
    [
        (VOLUME, (1, 8, 1, 1, 1), "adebc", "other axes lie on both sides"),
        (VOLUME, (1, 8, 1, 1, 1), "adbce", "other axes lie on both sides"),
        (VOLUME, (1, 8, 1, 1, 1), "acdeb", None),
        (VOLUME, (1, 8, 1, 1, 1), "abecd", None),
        (VOLUME, (1, 8, 1, 1, 1), "aBcde16b", None),
        ((1, 8, 1, 7), (1, 8, 1, 1), "acbd", None),
        (VOLUME, VOLUME, "adebc", None),
        ((1, 17, 2), (1, 17, 2), "aBc4b", "without padding"),
        ((1, 17, 2), (1, 17, 2), "aBc16b", None),
        ((1, 16, 2), (1, 16, 2), "aBc4b", None),
    ],
)
@pytest.mark.parametrize("op", ["prelu", "prelu_backward"])
def test_known_bad_prelu(op, dims, weights, tag, bad):
    gradient = {"diff_dst": TensorType(dims)} if op == "prelu_backward" else {}
    node = node_of(op, Prelu(), {"src": TensorType(dims), "weights": TensorType(weights), **gradient})
    formats = {"src": MemoryDesc(dims, "f32", tag=tag), "weights": MemoryDesc(weights, "f32")}
    why = known_bad((3, 2, 0), node, formats, "jit_uni")
    assert (why is None) if bad is None else (bad in why)
    assert known_bad((3, 2, 0), node, formats, "ref:any") is None


@pytest.mark.parametrize(
    ("dims", "weights", "tag"),
    [(VOLUME, (1, 8, 1, 1, 1), tag) for tag in ("adebc", "adbce", "acdeb", "abecd")]
    + [((1, 17, 2), (1, 17, 2), "aBc4b"), ((3, 5, 5, 3), (3, 5, 5, 3), "aBcd8b")],
)
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=needs_bf16)])
def test_prelu_in_any_order_of_axes_passes_its_check(target, dims, weights, tag, dtype):
    node = node_of("prelu", Prelu(), {"src": TensorType(dims, dtype), "weights": TensorType(weights, dtype)})
    src, slopes = MemoryDesc(dims, dtype, tag=tag), MemoryDesc(weights, dtype)
    formats = {"src": src, "weights": src if dims == weights else slopes}
    for candidate in target.candidates(node, request(node, formats)):
        done = node.with_(descs=candidate.results, choice=candidate.choice("offered"))
        assert check_node(done) is None, candidate.impl


def binary(tag: str, small: tuple[int, ...], tail: tuple[int, ...] = (), dtype: str = "f32", other: str = ""):
    """Return a binary node over an image in a format, and its operands' formats; the tail is row-major."""
    dims = (2, 12, 5, 9)
    types = {"src_0": TensorType(dims, dtype), "src_1": TensorType(small, dtype)}
    node = node_of("binary", Binary("add"), types, [PostOp("binary", Binary("add"), "post_op_0")] if tail else [])
    formats = {
        "src_0": MemoryDesc(dims, dtype, tag=tag),
        "src_1": MemoryDesc(small, dtype, tag=other or tag),
        "dst": MemoryDesc(dims, dtype, tag=tag),
    }
    return node, formats | ({"post_op_0": MemoryDesc(tail, dtype)} if tail else {})


@pytest.mark.parametrize(
    ("tag", "small", "tail", "bad"),
    [
        ("aBdc8b", (1, 1, 1, 9), (), True),
        ("aBcd8b", (1, 1, 1, 9), (), False),
        ("acBd8b", (2, 12, 5, 9), (), True),
        ("acBd8b", (2, 12, 5, 9), (2, 12, 5, 9), True),
        ("acbd", (2, 12, 5, 9), (1, 12, 1, 1), True),
        ("acbd", (2, 12, 5, 9), (2, 12, 5, 9), False),
        ("acdb", (2, 12, 5, 9), (1, 12, 1, 1), False),
        ("abcd", (1, 12, 1, 1), (1, 12, 1, 1), False),
    ],
)
def test_known_bad_binary_in_other_orders(tag, small, tail, bad):
    node, formats = binary(tag, small, tail)
    why = known_bad((3, 2, 0), node, formats, "jit:uni")
    assert (why is not None) is bad
    assert known_bad((3, 2, 0), node, formats, "ref:any") is None


@pytest.mark.parametrize(
    ("dims", "tail", "bad"),
    [
        ((8, 17, 1, 1), (1, 17, 1, 1), True),
        ((1, 17, 1, 1), (1, 17, 1, 1), False),
        ((8, 17, 1, 2), (1, 17, 1, 1), False),
    ],
)
def test_known_bad_binary_of_single_places(target, dims, tail, bad):
    types = dict.fromkeys(("src_0", "src_1"), TensorType(dims, "f32"))
    node = node_of("binary", Binary("mul"), types, [PostOp("binary", Binary("min"), "post_op_0")])
    formats = dict.fromkeys(("src_0", "src_1", "dst"), MemoryDesc(dims, "f32"))
    formats["post_op_0"] = MemoryDesc(tail, "f32")
    assert (known_bad((3, 2, 0), node, formats, "jit:uni") is not None) is bad
    for offer in target.candidates(node, request(node, formats)):
        assert selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("test"))) is None


@pytest.mark.parametrize(("other", "bad"), [("aBcd8b", True), ("Abcd8a", False)])
def test_known_bad_binary_of_two_kinds_of_blocks(other, bad):
    node, formats = binary("Abcd8a", (2, 12, 5, 9), other=other)
    assert (known_bad((3, 2, 0), node, formats, "jit:uni") is not None) is bad


@pytest.mark.parametrize(
    ("op", "attrs", "dims", "tag", "bad"),
    [
        ("eltwise", Eltwise("exp"), (2, 12, 5, 9), "acBd8b", True),
        ("eltwise", Eltwise("exp"), (2, 16, 5, 9), "acBd8b", False),
        ("eltwise", Eltwise("exp"), (2, 12, 5, 9), "aBcd8b", False),
        ("softmax", Softmax(3), (1, 4, 9, 33), "acbd", True),
        ("softmax", Softmax(3), (1, 4, 9, 33), "abcd", False),
        ("softmax", Softmax(1), (1, 4, 9, 33), "acbd", False),
        ("reduction", Reduction("sum", (0,)), (2, 17, 5, 7), "bcAd8a", True),
        ("reduction", Reduction("sum", (0,)), (2, 17, 5, 7), "bAcd8a", False),
    ],
)
def test_known_bad_reference_code(target, op, attrs, dims, tag, bad):
    node = node_of(op, attrs, {"src": TensorType(dims, "f32")})
    src = MemoryDesc(dims, "f32", tag=tag)
    dst = MemoryDesc.any(node.results[0].dims, "f32") if op == "reduction" else src
    offers = [one for one in target.candidates(node, request(node, {"src": src, "dst": dst})) if one.is_ref]
    if bad and dnnl.lib().version < (3, 6):
        assert not offers
    for offer in offers:
        assert selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("test"))) is None


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=needs_bf16)])
@pytest.mark.parametrize("tail", [(), (1, 1, 1, 1), (1, 12, 1, 1), (2, 12, 5, 9)])
@pytest.mark.parametrize("small", [(1, 1, 1, 9), (1, 12, 1, 1), (2, 12, 1, 1), (1, 1, 5, 9), (2, 12, 5, 9)])
@pytest.mark.parametrize("tag", ["aBdc8b", "acBd8b", "adcB16b", "bAcd8a", "Bcda8b", "acbd", "dbca", "acdb", "aBcd8b"])
def test_every_binary_offered_finds_the_elements_of_its_operands(target, tag, small, tail, dtype):
    node, formats = binary(tag, small, tail, dtype)
    formats["src_1"] = MemoryDesc(small, dtype, tag="aBcd8b" if tag == "bAcd8a" else tag)
    for offer in target.candidates(node, request(node, formats)):
        error = selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("test")))
        assert error is None, f"{offer.impl}: {error}"


@pytest.mark.parametrize(
    ("version", "stride", "bias", "impl", "bad"),
    [
        ((3, 13, 2), 3, False, "brg_deconv:avx10_1_512_amx+brgconv_strided:avx10_1_512_amx", True),
        ((3, 6, 2), 3, True, "brg_deconv:avx10_1_512_amx+brgconv_strided:avx10_1_512_amx", False),
        ((3, 6, 2), 1, True, "brg_deconv:avx10_1_512_amx", False),
        ((3, 6, 2), 1, True, "jit_deconvolution:avx10_1_512_amx", True),
        ((3, 6, 2), 2, False, "jit_deconvolution:avx10_1_512_amx", False),
        ((3, 6, 2), 1, True, "jit_deconvolution:avx512_core_bf16", False),
        ((3, 2, 0), 2, True, "jit_deconvolution:avx512_core_amx", False),
    ],
)
def test_known_bad_deconvolution(version, stride, bias, impl, bad):
    types = {"src": TensorType((1, 16, 5, 5), "bf16"), "weights": TensorType((16, 16, 3, 3), "bf16")}
    node = node_of("deconvolution", Deconv.make(2, stride), types)
    formats = {name: MemoryDesc(kind.dims, kind.dtype) for name, kind in types.items()}
    formats |= {"bias": MemoryDesc((16,), "f32")} if bias else {}
    assert (known_bad(version, node, formats, impl) is not None) is bad


affected = pytest.mark.skipif(
    not (3, 0) <= dnnl.lib().version < (3, 4), reason="this oneDNN version does not have the defect"
)


@affected
@pytest.mark.parametrize("tag", ["aBcd8b", "acdb"])
def test_known_bad_is_not_offered(target, tag):
    node, formats = resampling(tag)
    assert list(target.candidates(node, request(node, formats))) == []


@affected
@pytest.mark.parametrize("tag", ["aBcd8b", "acdb"])
def test_known_bad_is_bad_and_the_plans_own_check_would_find_it(target, monkeypatch, tag):
    monkeypatch.setattr(onednn, "known_bad", lambda *_: None)
    node, formats = resampling(tag)
    error = selfcheck.check_node(chosen(target, node, formats))
    assert error is not None
    assert error > 0.5


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=needs_bf16)])
@pytest.mark.parametrize("tag", ["abcd", "acdb", "aBcd8b", "aBcd16b"])
@pytest.mark.parametrize("tail", ["abcd", "acdb", "aBcd8b", "aBcd16b"])
def test_every_pooling_offered_reads_its_tail_where_it_lies(target, tag, tail, dtype):
    node, formats = pooling(tag, tail, dtype)
    for offer in target.candidates(node, request(node, formats)):
        error = selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("test")))
        assert error is None, f"{offer.impl}: {error}"


# ---------------------------------------------------------------- costs and arguments


def test_reorder_costs_grow_with_the_bytes():
    target = OneDnnTarget()
    small, large = MemoryDesc((1, 16, 8, 8), "f32"), MemoryDesc((1, 16, 80, 80), "f32")
    last = MemoryDesc((1, 16, 80, 80), "f32", tag="acdb")
    assert target.reorder_cost(small, small) == 0.0
    small_cost = target.reorder_cost(small, MemoryDesc((1, 16, 8, 8), "f32", tag="acdb"))
    assert 0 < small_cost < target.reorder_cost(large, last)
    assert target.reorder_cost(large, MemoryDesc((1, 16, 80, 80), "f32", strides=(102400, 0, 80, 1))) is None


def test_arguments_name_every_operand_and_result(target):
    node, formats = convolution(
        post_ops=[PostOp("binary", Binary("add"), "post_op_0"), RELU],
    )
    best = chosen(target, node, {**formats, "post_op_0": MemoryDesc((1, 32, 1, 1), "f32")})
    found = {name: number for name, number, _ in arguments(best, best.choice.handle.pd)}
    assert found == {
        "src": dnnl.Arg.SRC,
        "weights": dnnl.Arg.WEIGHTS,
        "bias": dnnl.Arg.BIAS,
        "dst": dnnl.Arg.DST,
        "post_op_0": dnnl.Arg.ATTR_MULTIPLE_POST_OP(0) | dnnl.Arg.SRC_1,
    }


def test_an_operand_that_the_primitive_has_not_is_named(target):
    node, formats = convolution()
    bare = chosen(target, node, {name: desc for name, desc in formats.items() if name != "bias"})
    choice = chosen(target, node, formats).choice
    with pytest.raises(PlanError, match=r"takes no argument \d+ for operand bias"):
        arguments(bare.with_(choice=choice), bare.choice.handle.pd)


@pytest.mark.parametrize("strides", [(16384, 256, 1), (8192, 128, 1)])
def test_layer_normalization_of_rows_with_gaps_runs_by_no_compiled_kernel(strides):
    dims = (2, 64, 128)
    src, vector = MemoryDesc(dims, strides=strides), MemoryDesc((128,))
    node = Node("norm", "layer_normalization", opdef("layer_normalization").attrs(epsilon=1e-5), (TensorType(dims),))
    request = {"src": src, "scale": vector, "shift": vector, "dst": MemoryDesc.any(dims)}
    found = list(OneDnnTarget().candidates(node, request))
    assert all(check_node(node.with_(descs=one.results, choice=one.choice("test"))) is None for one in found)
    assert all(one.is_ref for one in found) == (strides != MemoryDesc(dims).strides)


def test_layer_normalization_of_one_row_of_a_larger_tensor_runs_by_a_compiled_kernel():
    src, vector = MemoryDesc((2, 108)).slice((1, 3), (1, 105)), MemoryDesc((105,))
    attrs = opdef("layer_normalization").attrs(epsilon=1e-5)
    node = Node("norm", "layer_normalization", attrs, (TensorType(src.dims),))
    request = {"src": src, "scale": vector, "shift": vector, "dst": MemoryDesc(src.dims)}
    found = list(OneDnnTarget().candidates(node, request))
    assert not all(one.is_ref for one in found)
    assert all(check_node(node.with_(descs=one.results, choice=one.choice("test"))) is None for one in found)


@pytest.mark.parametrize("order", [(128, 384, 1), (1024, 128, 1)])
def test_layer_normalization_into_another_order_runs_by_no_compiled_kernel(order):
    dims = (3, 8, 128)
    src, dst, vector = MemoryDesc(dims), MemoryDesc(dims, strides=order), MemoryDesc((128,))
    node = Node("norm", "layer_normalization", opdef("layer_normalization").attrs(epsilon=1e-5), (TensorType(dims),))
    found = list(OneDnnTarget().candidates(node, {"src": src, "scale": vector, "shift": vector, "dst": dst}))
    assert all(check_node(node.with_(descs=one.results, choice=one.choice("test"))) is None for one in found)
    assert all(one.is_ref for one in found) == (dst != src)


@needs_bf16
@pytest.mark.parametrize(
    "tag, is_misread",
    [("aBcd4b", True), ("ABcd4b8a", True), ("ABcd8b4a", False), ("aBcd8b", False), ("aBcd16b", False), ("abcd", False)],
)
def test_binary_in_bf16_of_blocks_of_4_runs_by_no_compiled_kernel(tag, is_misread):
    dims = (16, 32, 5, 3)
    src = MemoryDesc(dims, "bf16", tag=tag)
    node = Node("add", "binary", opdef("binary").attrs(alg="add"), (TensorType(dims, "bf16"),))
    found = list(OneDnnTarget().candidates(node, {"src_0": src, "src_1": src, "dst": MemoryDesc.any(dims, "bf16")}))
    assert all(check_node(node.with_(descs=one.results, choice=one.choice("test"))) is None for one in found)
    assert all(one.is_ref for one in found) == is_misread


def test_one_row_of_a_block_is_read_only_where_there_is_a_reorder():
    whole = MemoryDesc((1, 4, 4), "f32", tag="aBc16b")
    row = MemoryDesc((1, 4), "f32", strides=(64, 64), inner_blocks=((1, 16),), padded_dims=(1, 16))
    column = MemoryDesc((2, 4), "f32", strides=(64, 128), inner_blocks=((1, 16),), padded_dims=(2, 16))
    assert can_be_read(whole, OneDnnTarget()) and can_be_read(row, OneDnnTarget())
    assert not can_be_read(column, OneDnnTarget()), "oneDNN's API cannot create it"
    node = Node("reorder", "reorder", Reorder(), (TensorType((1, 4), "f32"),))
    (found, *_) = OneDnnTarget().candidates(node, {"src": row, "dst": MemoryDesc((1, 4), "f32")})
    assert found.operands == {"src": row}
