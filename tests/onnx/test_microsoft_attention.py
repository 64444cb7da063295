"""Attention of ``com.microsoft`` with its optional inputs and attributes: equal to ONNX Runtime, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import fmtprop as fp
from fmtprop.errors import FmtpropError
from tests.onnx.microsoft_cases import (
    RNG,
    Case,
    angles,
    compare,
    f32,
    feed_of,
    i8,
    i32,
    i64,
    model_of,
    ours,
    theirs,
    u8,
)

COS, SIN = angles(16, 4)
WIDE_COS, WIDE_SIN = angles(16, 8)
X = f32(2, 5, 16)

HEADS = {"num_heads": 2}
GROUPED = {"num_heads": 4, "kv_num_heads": 2}


def qkv(length: int = 5, keys: int = 5, size: int = 16) -> dict[str, Any]:
    return {"q": f32(2, length, size), "k": f32(2, keys, size), "v": f32(2, keys, size)}


def attention(**more: Any) -> dict[str, Any]:
    named = {"x": X, "w": f32(16, 48, scale=0.3), "b": f32(48), "mask": None, "past": None, "bias": None}
    return {**named, **more}


def multi_head(length: int = 5, keys: int = 5, **more: Any) -> dict[str, Any]:
    rest = {"b": None, "mask": None, "bias": None, "past_k": None, "past_v": None}
    return {**qkv(length, keys), **rest, **more}


def grouped(
    length: int = 3, past: int = 4, heads: int = 4, kv: int = 2, lengths: Any = None, **more: Any
) -> dict[str, Any]:
    total = past + length
    batch = 1 if past and length > 1 else 2  # ONNX Runtime has no more
    named = {
        "q": f32(batch, length, heads * 16),
        "k": f32(batch, length, kv * 16),
        "v": f32(batch, length, kv * 16),
        "past_k": f32(batch, kv, past, 16),
        "past_v": f32(batch, kv, past, 16),
        "lengths": i32(*[total - 1] * batch) if lengths is None else lengths,
        "total": np.array(total, np.int32),
        "cos": WIDE_COS,
        "sin": WIDE_SIN,
        "positions": None,
        "bias": None,
        "sink": None,
    }
    return {**named, **more}


def quantised(weights: Any, zero: Any, **more: Any) -> Case:
    inputs = {"x": u8(2, 5, 16), "w": weights, "b": f32(48), "xs": np.float32(0.02), "ws": np.float32(0.005)}
    named = {**inputs, "mask": None, "xz": np.uint8(128), "wz": zero, "past": None, **more}
    kept = frozenset({"w", "b", "ws", "wz"})
    return Case("QAttention", {n: v if v is None else np.asarray(v) for n, v in named.items()}, {**HEADS}, weights=kept)


CASES = {
    "attention": Case("Attention", attention(), HEADS),
    "attention_lengths": Case("Attention", attention(mask=i32(5, 3)), HEADS),
    "attention_lengths_and_starts": Case("Attention", attention(mask=i32(5, 4, 1, 0)), HEADS),
    "attention_keys": Case("Attention", attention(mask=i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1])), HEADS),
    "attention_scores_mask": Case("Attention", attention(mask=RNG.integers(0, 2, (2, 5, 5)).astype(np.int32)), HEADS),
    "attention_filter": Case(
        "Attention", attention(mask=i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1])), {**HEADS, "mask_filter_value": -2.0}
    ),
    "attention_scale": Case("Attention", attention(), {**HEADS, "scale": 0.3}),
    "attention_causal": Case("Attention", attention(), {**HEADS, "unidirectional": 1}),
    "attention_causal_keys": Case(
        "Attention", attention(mask=i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1])), {**HEADS, "unidirectional": 1}
    ),
    "attention_present": Case("Attention", attention(), {**HEADS, "unidirectional": 1}, 2),
    "attention_past": Case("Attention", attention(past=f32(2, 2, 2, 3, 8)), {**HEADS, "unidirectional": 1}, 2),
    "attention_past_mask": Case(
        "Attention",
        attention(past=f32(2, 2, 2, 3, 8), mask=np.array([[1] * 6 + [0] * 2, [1] * 8], np.int32)),
        HEADS,
        2,
    ),
    "attention_bias": Case("Attention", attention(bias=f32(2, 2, 5, 5)), HEADS),
    "attention_bias_broadcast": Case("Attention", attention(bias=f32(1, 1, 5, 5)), HEADS),
    "attention_bias_and_mask": Case("Attention", attention(bias=f32(2, 2, 5, 5), mask=i32(5, 3)), HEADS),
    "attention_sizes": Case(
        "Attention", {"x": X, "w": f32(16, 16 + 16 + 24), "b": f32(56)}, {**HEADS, "qkv_hidden_sizes": [16, 16, 24]}
    ),
    "attention_rotary": Case("Attention", attention(), {**HEADS, "do_rotary": 1}),
    "attention_4d_mask": Case("Attention", attention(mask=RNG.integers(0, 2, (2, 1, 8, 8)).astype(np.int32)), HEADS),
    "multi_head": Case("MultiHeadAttention", multi_head(), HEADS),
    "multi_head_bias": Case("MultiHeadAttention", multi_head(b=f32(48)), HEADS),
    "multi_head_cross": Case("MultiHeadAttention", multi_head(3, 7), HEADS),
    "multi_head_lengths": Case("MultiHeadAttention", multi_head(mask=i32(5, 3)), HEADS),
    "multi_head_keys": Case("MultiHeadAttention", multi_head(mask=i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1])), HEADS),
    "multi_head_starts": Case("MultiHeadAttention", multi_head(mask=i32(5, 3, 0, 5, 10, 0, 5, 10)), HEADS),
    "multi_head_scores_mask": Case(
        "MultiHeadAttention", multi_head(mask=RNG.integers(0, 2, (2, 5, 5)).astype(np.int32)), HEADS
    ),
    "multi_head_filter": Case(
        "MultiHeadAttention",
        multi_head(mask=i32([1, 1, 1, 0, 0], [0, 1, 1, 1, 1])),
        {**HEADS, "mask_filter_value": -2.0},
    ),
    "multi_head_scores": Case("MultiHeadAttention", multi_head(bias=f32(2, 2, 5, 5)), HEADS),
    "multi_head_scores_broadcast": Case(
        "MultiHeadAttention", multi_head(bias=f32(1, 2, 5, 5)), {**HEADS, "scale": 0.2}
    ),
    "attention_causal_by_one_only": Case("Attention", attention(), {**HEADS, "unidirectional": -7}),
    "multi_head_causal": Case("MultiHeadAttention", multi_head(), {**HEADS, "unidirectional": 1}),
    "multi_head_past": Case("MultiHeadAttention", multi_head(past_k=f32(2, 2, 3, 8), past_v=f32(2, 2, 3, 8)), HEADS, 3),
    "multi_head_past_causal": Case(
        "MultiHeadAttention",
        multi_head(past_k=f32(2, 2, 3, 8), past_v=f32(2, 2, 3, 8), b=f32(48)),
        {**HEADS, "unidirectional": 1},
        3,
    ),
    "multi_head_present": Case("MultiHeadAttention", multi_head(b=f32(48)), HEADS, 3),
    "multi_head_4d_keys": Case(
        "MultiHeadAttention", {"q": f32(2, 5, 16), "k": f32(2, 2, 7, 8), "v": f32(2, 2, 7, 8)}, HEADS
    ),
    "multi_head_4d_keys_bias": Case(
        "MultiHeadAttention", {"q": f32(2, 5, 16), "k": f32(2, 2, 7, 8), "v": f32(2, 2, 7, 8), "b": f32(48)}, HEADS
    ),
    "multi_head_wide_values": Case(
        "MultiHeadAttention", {"q": f32(2, 5, 16), "k": f32(2, 7, 16), "v": f32(2, 7, 24), "b": f32(56)}, HEADS
    ),
    "multi_head_packed": Case("MultiHeadAttention", {"q": f32(2, 5, 2, 3, 8)}, HEADS),
    "multi_head_packed_keys": Case("MultiHeadAttention", {"q": f32(2, 5, 16), "k": f32(2, 7, 2, 2, 8)}, HEADS),
    "rotary": Case(
        "RotaryEmbedding", {"x": f32(2, 5, 16), "p": i64([0, 1, 2, 3, 4], [3, 4, 5, 6, 7]), "c": COS, "s": SIN}
    ),
    "rotary_start": Case("RotaryEmbedding", {"x": f32(2, 5, 16), "p": i64(3), "c": COS, "s": SIN}),
    "rotary_interleaved": Case(
        "RotaryEmbedding", {"x": f32(2, 5, 16), "p": i64(3), "c": COS, "s": SIN}, {"interleaved": 1}
    ),
    "rotary_4d": Case("RotaryEmbedding", {"x": f32(2, 2, 5, 8), "p": i64(3), "c": COS, "s": SIN}),
    "rotary_part": Case(
        "RotaryEmbedding",
        {"x": f32(2, 5, 24), "p": i64(3), "c": COS, "s": SIN},
        {"num_heads": 2, "rotary_embedding_dim": 8},
    ),
    "rotary_part_4d": Case(
        "RotaryEmbedding",
        {"x": f32(2, 2, 5, 12), "p": i64(3), "c": COS, "s": SIN},
        {"num_heads": 2, "rotary_embedding_dim": 8, "interleaved": 1},
    ),
    "rotary_scale": Case("RotaryEmbedding", {"x": f32(2, 5, 16), "p": i64(3), "c": COS, "s": SIN}, {"scale": 2.0}),
    "rotary_other_size": Case(
        "RotaryEmbedding", {"x": f32(2, 5, 16), "p": i64(3), "c": COS, "s": SIN}, {"rotary_embedding_dim": 1 << 40}
    ),
    "rotary_batch_of_one": Case("RotaryEmbedding", {"x": f32(1, 1, 16), "p": i64([3]), "c": COS, "s": SIN}),
    "grouped": Case("GroupQueryAttention", grouped(), GROUPED, 3),
    "grouped_rotary": Case("GroupQueryAttention", grouped(), {**GROUPED, "do_rotary": 1}, 3),
    "grouped_interleaved": Case(
        "GroupQueryAttention", grouped(), {**GROUPED, "do_rotary": 1, "rotary_interleaved": 1}, 3
    ),
    "grouped_prompt": Case(
        "GroupQueryAttention", grouped(5, 0, past_k=None, past_v=None), {**GROUPED, "do_rotary": 1}, 3
    ),
    "grouped_empty_past": Case("GroupQueryAttention", grouped(5, 0), {**GROUPED, "do_rotary": 1}, 3),
    "grouped_token": Case("GroupQueryAttention", grouped(1, 6), {**GROUPED, "do_rotary": 1, "scale": 0.2}, 3),
    "grouped_packed": Case(
        "GroupQueryAttention", grouped(3, 4, q=f32(1, 3, 128), k=None, v=None), {**GROUPED, "do_rotary": 1}, 3
    ),
    "grouped_positions": Case("GroupQueryAttention", grouped(positions=i64([2, 3, 4])), {**GROUPED, "do_rotary": 1}, 3),
    "grouped_unequal": Case("GroupQueryAttention", grouped(1, 6, lengths=i32(6, 3)), {**GROUPED, "do_rotary": 1}, 3),
    "grouped_window": Case("GroupQueryAttention", grouped(), {**GROUPED, "local_window_size": 3}, 3),
    "grouped_softcap": Case("GroupQueryAttention", grouped(), {**GROUPED, "softcap": 2.0}, 3),
    "grouped_softcap_below_zero": Case("GroupQueryAttention", grouped(), {**GROUPED, "softcap": -2.0}, 3),
    "grouped_smooth": Case("GroupQueryAttention", grouped(), {**GROUPED, "smooth_softmax": 1}, 3),
    "grouped_bias": Case("GroupQueryAttention", grouped(bias=f32(1, 4, 3, 7)), GROUPED, 3),
    "grouped_sink": Case("GroupQueryAttention", grouped(sink=f32(4)), GROUPED, 3),
    **{
        f"grouped_window_{window}": Case(
            "GroupQueryAttention", grouped(5, 4), {**GROUPED, "local_window_size": window}, 3
        )
        for window in (1, 2, 5, 9)
    },
    "grouped_all": Case(
        "GroupQueryAttention",
        grouped(sink=f32(4), bias=f32(1, 1, 3, 7)),
        {**GROUPED, "softcap": 1.5, "local_window_size": 2, "do_rotary": 1, "scale": 0.4},
        3,
    ),
    "grouped_bias_of_all": Case("GroupQueryAttention", grouped(bias=f32(1, 1, 3, 7)), GROUPED, 3),
    "grouped_unequal_unrotated": Case("GroupQueryAttention", grouped(1, 6, lengths=i32(0, 5)), GROUPED, 3),
    "grouped_unequal_window": Case(
        "GroupQueryAttention", grouped(1, 6, lengths=i32(6, 3)), {**GROUPED, "local_window_size": 3, "softcap": 1.5}, 3
    ),
    "grouped_long_buffer": Case(
        "GroupQueryAttention",
        grouped(1, 9, lengths=i32(4, 4), total=np.array(5, np.int32)),
        {**GROUPED, "do_rotary": 1},
        3,
    ),
    "grouped_long_buffer_unequal": Case(
        "GroupQueryAttention",
        grouped(1, 9, lengths=i32(4, 2), total=np.array(5, np.int32)),
        {**GROUPED, "do_rotary": 1},
        3,
    ),
    "quantised": quantised(u8(16, 48), np.uint8(130), mask=i32(5, 3)),
    "quantised_signed": quantised(i8(16, 48), np.int8(0)),
    "quantised_columns": quantised(i8(16, 48), np.zeros(48, np.int8), ws=abs(f32(48)) * 0.01),
}

#: what is refused, and the reason
REFUSED = {
    "attention_rotary": "rotary positions or a shared buffer",
    "attention_4d_mask": "cannot run on",
    "multi_head_starts": "a mask of lengths and offsets",
    "multi_head_packed": "packed keys and values",
    "multi_head_packed_keys": "packed keys and values",
    "rotary_scale": "packed batches, or a scale",
    "rotary_other_size": "rotary_embedding_dim is 1099511627776, but the angles are for 8 numbers",
}


@pytest.mark.peers
@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED.keys()))
def test_equal_to_onnx_runtime(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(FmtpropError, match=REFUSED[name]):
        ours(CASES[name])


def test_attention_without_bias() -> None:
    """ONNX Runtime 1.31 crashes on it."""
    case = CASES["attention"]
    bias = case.inputs["b"] * 0
    with_zeros = Case(case.op, {**case.inputs, "b": bias}, case.attributes)
    without = Case(case.op, {**case.inputs, "b": None}, case.attributes)
    assert np.array_equal(ours(with_zeros)[0], ours(without)[0])


GENERATION = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (float[2,1,64] q, float[2,1,32] k, float[2,1,32] v, float[2,2,p,16] past_k, float[2,2,p,16] past_v, int64[2,t] mask,
   float[16,8] cos, float[16,8] sin) => (float[2,1,64] y, float[2,2,t,16] new_k, float[2,2,t,16] new_v) {
    one = Constant<value_int = 1>()
    axis = Constant<value_ints = [1]>()
    counts = ReduceSum<keepdims = 0>(mask, axis)
    before = Sub(counts, one)
    lengths = Cast<to = 6>(before)
    shape = Shape(mask)
    all = Gather(shape, one)
    total = Cast<to = 6>(all)
    y, new_k, new_v = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
        (q, k, v, past_k, past_v, lengths, total, cos, sin)
}"""


@pytest.mark.peers
def test_lengths_that_a_mask_gives_are_part_of_a_plan() -> None:
    """As exporters of language models write them: the plan has the lengths of rows as numbers of a run."""
    model = onnx.parser.parse_model(GENERATION)
    session = fp.onnx.InferenceSession(model, policy="propagate", confirm=False)
    for lengths in ((7, 7), (7, 3)):
        named = grouped(1, 6)
        feed = {name: named[name] for name in ("q", "k", "v", "past_k", "past_v", "cos", "sin")}
        feed["mask"] = (np.arange(7) < np.array(lengths).reshape(2, 1)).astype(np.int64)
        for got, want in zip(session.run(None, feed), theirs(model, feed), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)
    assert session.reason is None


@pytest.mark.peers
def test_a_prompt_with_rows_of_unequal_lengths() -> None:
    """What stands behind the end of a row is nobody's answer."""
    inputs = grouped(5, 0, past_k=None, past_v=None, lengths=i32(4, 2))
    case = Case("GroupQueryAttention", inputs, {**GROUPED, "do_rotary": 1}, 3)
    (y, *got), (expected, *want) = ours(case), theirs(model_of(case), feed_of(case))
    np.testing.assert_allclose(y[0], expected[0], atol=2e-5)
    np.testing.assert_allclose(y[1, :3], expected[1, :3], atol=2e-5)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
