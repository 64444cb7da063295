from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import FormatError, ShapeError, UnsupportedOpError
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import MatMul
from fmtprop.ops.matmul import MATMUL
from tests.ops.fake_call import FakeCall, check_import

NEEDS_BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")


def types(src, weights, bias=None):
    found = {"src": TensorType(src), "weights": TensorType(weights)}
    return found if bias is None else {**found, "bias": TensorType(bias)}


def dst(*given):
    return MATMUL.infer(MatMul(), types(*given))[0].dims


# ---------------------------------------------------------------- shapes


def test_batch_axes_broadcast():
    assert dst((4, 8), (8, 5)) == (4, 5)
    assert dst((3, 4, 8), (3, 8, 5), (1, 1, 5)) == (3, 4, 5)
    assert dst((3, 1, 4, 8), (1, 2, 8, 5)) == (3, 2, 4, 5)


def test_one_matrix_multiplies_a_batch():
    assert dst((2, 3, 4, 8), (8, 5)) == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (types((4, 8), (9, 5)), "src axis 1 has 8 elements but weights axis 0 has 9"),
        (types((2, 4, 8), (3, 8, 5)), "src axis 0 has 2 elements but weights axis 0 has 3; equal or 1 is needed"),
        (types((8,), (8, 5)), "src has 1 and weights 2 axes; both need 2 or more"),
        (types((4, 8), (2, 8, 5)), "weights has 3 axes but src has 2: expected 2 or 2"),
        (types((4, 8), (8, 5), (5,)), "bias has dims (5,) but dst (4, 5) needs as many axes"),
    ],
)
def test_operands_that_do_not_fit_are_named(given, message):
    with pytest.raises(ShapeError) as error:
        MATMUL.infer(MatMul(), given)
    assert message in str(error.value)


# ---------------------------------------------------------------- one matrix for a whole batch


def natives(*, src, weights, bias=None, dst):
    given = {"src": src, "weights": weights, "bias": bias, "dst": dst}
    return {name: dnnl.NativeDesc.from_desc(desc) for name, desc in given.items() if desc is not None}


def any_(*dims):
    return MemoryDesc.any(dims, "f32")


def test_formats_come_back_in_the_ops_own_dims():
    descs = natives(src=any_(2, 7, 32), weights=any_(32, 24), dst=any_(2, 7, 24))
    lowering = MATMUL.primitive(MatMul(), descs, dnnl.PrimitiveAttr())
    formats = lowering.resolve(lowering.pd)
    assert formats["src"] == MemoryDesc((2, 7, 32), "f32", tag="abc")
    assert formats["dst"] == MemoryDesc((2, 7, 24), "f32", tag="abc")
    assert formats["weights"].dims == (32, 24)
    assert lowering.pd.query_md("src").dims == (14, 32)


def test_a_format_that_cannot_become_rows_is_refused():
    nhwc = MemoryDesc((2, 7, 32), "f32", tag="acb")
    with pytest.raises(FormatError, match=r"src .* cannot be seen as \(14, 32\): reorder it to plain first"):
        MATMUL.primitive(MatMul(), natives(src=nhwc, weights=any_(32, 24), dst=any_(2, 7, 24)), None)


def test_a_bias_that_varies_along_some_leading_axes_is_refused():
    bias = MemoryDesc((2, 1, 24), "f32", tag="abc")
    descs = natives(src=any_(2, 7, 32), weights=any_(32, 24), bias=bias, dst=any_(2, 7, 24))
    with pytest.raises(UnsupportedOpError, match=r"sees \(2, 7\) as one axis, but bias has \(2, 1\) there"):
        MATMUL.primitive(MatMul(), descs, None)


def post_ops(*dims):
    other = dnnl.NativeDesc.from_desc(MemoryDesc(dims, "f32", tag="abc"))
    return dnnl.PostOps().append_eltwise("eltwise_relu").append_binary("binary_add", other)


def test_the_operand_of_a_binary_post_op_is_seen_as_rows_too():
    descs = natives(src=any_(2, 7, 32), weights=any_(32, 24), dst=any_(2, 7, 24))
    for dims, rows in (((2, 7, 24), (14, 24)), ((1, 1, 24), (1, 24))):
        attr = dnnl.PrimitiveAttr(post_ops(*dims).append_sum(0.5))
        lowering = MATMUL.primitive(MatMul(), descs, attr)
        second = lowering.pd.arg_md(dnnl.Arg.ATTR_MULTIPLE_POST_OP(1) | dnnl.Arg.SRC_1)
        assert second is not None
        assert second.dims == rows


def test_post_ops_that_rows_cannot_carry_are_refused():
    descs = natives(src=any_(2, 7, 32), weights=any_(32, 24), dst=any_(2, 7, 24))
    some = dnnl.PrimitiveAttr(post_ops(1, 7, 24))
    with pytest.raises(UnsupportedOpError, match=r"the operand of post-op 1 has \(1, 7\) there: give it all of these"):
        MATMUL.primitive(MatMul(), descs, some)
    prelu = dnnl.PrimitiveAttr(dnnl.PostOps().append_prelu(2))
    with pytest.raises(UnsupportedOpError, match="cannot carry a prelu post-op: keep it as a node of its own"):
        MATMUL.primitive(MatMul(), descs, prelu)


# ---------------------------------------------------------------- importers


@pytest.mark.parametrize(
    ("target", "left", "right", "ops"),
    [
        ("aten.mm.default", (3, 8), (8, 5), ["matmul"]),
        ("aten.bmm.default", (2, 3, 8), (2, 8, 5), ["matmul"]),
        ("aten.mv.default", (3, 8), (8,), ["reshape", "matmul", "reshape"]),
        ("aten.matmul.default", (2, 3, 8), (8, 5), ["matmul"]),
        ("aten.matmul.default", (3, 8), (2, 8, 5), ["reshape", "matmul"]),
        ("aten.matmul.default", (4, 1, 3, 8), (2, 8, 5), ["reshape", "matmul"]),
        ("aten.matmul.default", (8,), (8, 5), ["reshape", "matmul", "reshape"]),
        ("aten.matmul.default", (2, 3, 8), (8,), ["reshape", "matmul", "reshape"]),
        ("aten.matmul.default", (8,), (2, 8, 5), ["reshape", "matmul", "reshape"]),
    ],
)
def test_products_of_matrices_and_vectors(target, left, right, ops):
    assert check_import(target, TensorType(left), TensorType(right)).ops() == ops


def test_the_product_of_two_vectors_is_a_scalar():
    call = check_import("aten.matmul.default", TensorType((8,)), TensorType((8,)))
    assert call.graph.nodes()[-1].results[0].dims == ()


@pytest.mark.parametrize(
    ("bias", "factors", "ops"),
    [
        ((2, 3, 5), {}, ["matmul", "binary"]),
        ((1, 1, 5), {}, ["matmul"]),
        ((5,), {}, ["reshape", "matmul"]),
        ((2, 3, 5), {"beta": 0, "alpha": 0.5}, ["matmul", "eltwise"]),
    ],
)
def test_baddbmm(bias, factors, ops):
    args = (TensorType(bias), TensorType((2, 3, 8)), TensorType((2, 8, 5)))
    assert check_import("aten.baddbmm.default", *args, **factors).ops() == ops


def test_integers_and_factors_are_declined():
    integer = FakeCall("aten.mm.default", TensorType((3, 8), "s64"), TensorType((8, 5), "s64"))
    args = (TensorType((2, 3, 5)), TensorType((2, 3, 8)), TensorType((2, 8, 5)))
    factors = FakeCall("aten.baddbmm.default", *args, alpha=2)
    for call in (integer, factors):
        assert call.run() is None
        assert call.ops() == []


# ---------------------------------------------------------------- attention

SDPA = "aten.scaled_dot_product_attention.default"
Q, K, V = TensorType((2, 3, 6, 8)), TensorType((2, 3, 7, 8)), TensorType((2, 3, 7, 4))


def test_attention_is_two_products_around_a_softmax():
    call = check_import(SDPA, Q, K, V)
    assert call.ops() == ["permute", "matmul", "eltwise", "softmax", "matmul"]


@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_share_a_key_are_rows_of_one_product(causal):
    query, key, value = (TensorType((2, heads, rows, 8)) for heads, rows in ((6, 5), (2, 7), (2, 7)))
    call = check_import(SDPA, query, key, value, is_causal=causal, enable_gqa=True)
    assert "host" not in call.ops()
    assert [op for op in call.ops() if op == "matmul"] == ["matmul", "matmul"]


def test_a_given_scale_and_three_axes():
    check_import(SDPA, *(TensorType(t.dims[1:]) for t in (Q, K, V)), scale=0.3)


@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (6, 7), (2, 1, 1, 7)])
def test_an_additive_mask_is_added_to_the_scores(shape):
    call = check_import(SDPA, Q, K, V, TensorType(shape))
    assert [op for op in call.ops() if op != "reshape"] == [
        "permute",
        "matmul",
        "eltwise",
        "binary",
        "eltwise",
        "softmax",
        "matmul",
        "reduction",
        "eltwise",
        "eltwise",
        "eltwise",
        "binary",
    ]


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=NEEDS_BF16)])
@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, False])
def test_rows_that_may_look_at_nothing_are_as_in_pytorch(hidden, dtype):
    query, key, value = (torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), hidden)
    mask[0, :, :, :3] = hidden
    if hidden is False:
        mask = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
        mask[0, :, :, :3] = hidden

    class Attention(torch.nn.Module):
        def forward(self, *args):
            return torch.nn.functional.scaled_dot_product_attention(*args)

    expected = Attention()(query, key, value, mask)
    net = fp.compile(Attention(), (query, key, value, mask), dtype, tune="model", confirm=False)
    tolerance = 1e-5 if dtype == "f32" else 3e-2
    result = net(query, key, value, mask)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert hidden is not False or not result[expected == 0].any(), "rows without a key are exactly 0"


@pytest.mark.parametrize("rows", [4, 7, 9])
def test_a_causal_mask_is_a_constant(rows):
    call = check_import(SDPA, TensorType((2, 3, rows, 8)), K, V, is_causal=True)
    assert "binary" in call.ops()


def test_a_constant_boolean_mask_becomes_additive():
    allowed = torch.rand(6, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    allowed[:, 0] = True
    assert "binary" in check_import(SDPA, Q, K, V, allowed).ops()


def test_attention_in_bf16_stays_in_bf16():
    call = FakeCall(SDPA, *(t.with_dtype("bf16") for t in (Q, K, V)), is_causal=True)
    assert call.type(call.run()) == TensorType((2, 3, 6, 4), "bf16")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Q, K, V, torch.zeros(6, 7, dtype=torch.bool)), {}),
        ((Q, K, V), {"dropout_p": 0.5}),
        ((Q, TensorType((1, 3, 7, 8)), TensorType((1, 3, 7, 4))), {}),
    ],
)
def test_what_softmax_cannot_say_is_declined(args, kwargs):
    call = FakeCall(SDPA, *args, **kwargs)
    assert call.run() is None
    assert call.ops() == []
