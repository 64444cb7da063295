"""Operators of ``com.microsoft`` with their optional inputs and attributes: equal to ONNX Runtime, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import fmtprop as fp
from fmtprop.errors import FmtpropError

RNG = np.random.default_rng(0)


@dataclass
class Case:
    """One node: its inputs by name (None: left out), the number of outputs and its attributes."""

    op: str
    inputs: dict[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    #: indices of the outputs that are compared, all by default: ONNX Runtime leaves some unwritten
    compared: tuple[int, ...] | None = None
    weights: frozenset[str] = frozenset()

    def rank(self, output: int) -> int:
        """Return the number of axes of a result: those of the first input, or of a cache of keys and values."""
        first = next(iter(self.inputs.values()))
        if not output or self.op.startswith("S"):
            return max(2, first.ndim) if self.op != "FusedMatMul" or first.ndim > 1 else 1
        return 5 if self.op == "Attention" else 4


def f32(*dims: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(dims) * scale).astype(np.float32)


def i32(*numbers: Any) -> Any:
    return np.array(numbers, np.int32)


def i64(*numbers: Any) -> Any:
    return np.array(numbers, np.int64)


def u8(*dims: int) -> Any:
    return RNG.integers(0, 256, dims).astype(np.uint8)


def angles(places: int, pairs: int) -> tuple[Any, Any]:
    turns = RNG.uniform(0, 6, (places, pairs)).astype(np.float32)
    return np.cos(turns), np.sin(turns)


COS, SIN = angles(16, 4)
WIDE_COS, WIDE_SIN = angles(16, 8)
X, IMAGE = f32(2, 5, 16), f32(1, 4, 7, 7)


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


def nbits(bits: int, k: int = 40, n: int = 6, block: int = 16, **more: Any) -> Case:
    blocks = -(-k // block)
    inputs = {"a": f32(3, k), "b": u8(n, blocks, block * bits // 8), "scales": f32(n, blocks, scale=0.1)}
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    given = {"zeros": None, "groups": None, "bias": None, **more}
    return Case("MatMulNBits", {**inputs, **given}, attributes, weights=frozenset({"b", "scales", "zeros", "bias"}))


FUSED = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
HEADS = {"num_heads": 2}
GROUPED = {"num_heads": 4, "kv_num_heads": 2}
NORM = {"x": X, "skip": f32(2, 5, 16), "gamma": f32(16)}

CASES = {
    "gelu": Case("Gelu", {"x": X}),
    "bias_gelu": Case("BiasGelu", {"x": X, "b": f32(16)}),
    "fast_gelu": Case("FastGelu", {"x": X}),
    "fast_gelu_bias": Case("FastGelu", {"x": X, "b": f32(16)}),
    "quick_gelu": Case("QuickGelu", {"x": X}),
    "quick_gelu_alpha": Case("QuickGelu", {"x": X}, {"alpha": 0.5}),
    **{
        f"fused_conv_{name or 'none'}_{len(parameters)}": Case(
            "FusedConv",
            {"x": IMAGE, "w": f32(6, 4, 3, 3), "b": f32(6), "z": f32(1, 6, 7, 7) if z else None},
            {
                **FUSED,
                **({"activation": name} if name else {}),
                **({"activation_params": parameters} if parameters else {}),
            },
            weights=frozenset({"w", "b"}),
        )
        for name, parameters, z in [
            ("Relu", [], False),
            ("Relu", [], True),
            ("Tanh", [], False),
            ("Sigmoid", [], True),
            ("LeakyRelu", [0.2], True),
            ("Clip", [-0.5, 0.5], False),
            ("HardSigmoid", [0.3, 0.4], False),
        ]
    },
    "fused_conv_strided": Case(
        "FusedConv",
        {"x": IMAGE, "w": f32(4, 2, 3, 3), "b": f32(4)},
        {
            "kernel_shape": [3, 3],
            "group": 2,
            "strides": [2, 2],
            "dilations": [2, 1],
            "pads": [2, 0, 1, 1],
            "activation": "Relu",
        },
        weights=frozenset({"w", "b"}),
    ),
    **{
        f"fused_gemm_{name}": Case(
            "FusedGemm",
            {"a": f32(3, 5), "b": f32(5, 4), "c": f32(4)},
            {"activation": name, "alpha": 0.5, "beta": 2.0, **more},
        )
        for name, more in {
            "Relu": {},
            "Tanh": {},
            "Sigmoid": {},
            "LeakyRelu": {"activation_alpha": 0.2},
            "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.4},
            "Elu": {"activation_alpha": 0.7},
            "Softplus": {},
            "Softsign": {},
            "ThresholdedRelu": {"activation_alpha": 0.3},
        }.items()
    },
    "fused_gemm_transposed": Case(
        "FusedGemm", {"a": f32(5, 3), "b": f32(4, 5)}, {"activation": "Relu", "transA": 1, "transB": 1}
    ),
    "fused_matmul": Case("FusedMatMul", {"a": f32(2, 3, 5), "b": f32(2, 5, 4)}, {"alpha": 0.5}),
    "fused_matmul_transposed": Case("FusedMatMul", {"a": f32(2, 5, 3), "b": f32(2, 4, 5)}, {"transA": 1, "transB": 1}),
    "fused_matmul_batch_a": Case("FusedMatMul", {"a": f32(3, 2, 5), "b": f32(2, 5, 4)}, {"transBatchA": 1}),
    "fused_matmul_batch_b": Case("FusedMatMul", {"a": f32(2, 3, 5), "b": f32(5, 2, 4)}, {"transBatchB": 1}),
    "fused_matmul_batch_both": Case(
        "FusedMatMul",
        {"a": f32(5, 2, 6, 3), "b": f32(4, 2, 6, 5)},
        {"transA": 1, "transBatchA": 1, "transB": 1, "transBatchB": 1},
    ),
    "fused_matmul_vector": Case("FusedMatMul", {"a": f32(5), "b": f32(5, 4)}, {"transA": 1, "alpha": 2.0}),
    "transpose_matmul": Case("TransposeMatMul", {"a": f32(5, 3), "b": f32(5, 4)}, {"transA": 1}),
    "simplified_norm": Case("SimplifiedLayerNormalization", {"x": X, "s": f32(16)}, {"epsilon": 1e-3}),
    "simplified_norm_two_axes": Case("SimplifiedLayerNormalization", {"x": X, "s": f32(5, 16)}, {"axis": 1}),
    "simplified_norm_axis_0": Case("SimplifiedLayerNormalization", {"x": X, "s": f32(2, 5, 16)}, {"axis": 0}),
    "simplified_norm_statistics": Case("SimplifiedLayerNormalization", {"x": X, "s": f32(16)}, {}, outputs=2),
    "skip_norm": Case("SkipLayerNormalization", {**NORM}),
    "skip_norm_all": Case(
        "SkipLayerNormalization", {**NORM, "beta": f32(16), "bias": f32(16)}, {"epsilon": 1e-3}, 4, (0, 3)
    ),
    "skip_norm_broadcast": Case("SkipLayerNormalization", {**NORM, "skip": f32(1, 5, 16), "beta": f32(16)}, {}),
    "skip_norm_2d": Case("SkipLayerNormalization", {"x": f32(5, 16), "skip": f32(5, 16), "gamma": f32(16)}, {}),
    "skip_norm_rows": Case("SkipLayerNormalization", {**NORM, "skip": f32(5, 16), "beta": f32(16)}, {}),
    "skip_simplified": Case("SkipSimplifiedLayerNormalization", {**NORM}),
    "skip_simplified_all": Case(
        "SkipSimplifiedLayerNormalization", {**NORM, "bias": f32(16)}, {"epsilon": 1e-3}, 4, (0, 3)
    ),
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
    "grouped_unequal_prompt": Case(
        "GroupQueryAttention",
        grouped(5, 0, past_k=None, past_v=None, lengths=i32(4, 2)),
        {**GROUPED, "do_rotary": 1},
        3,
    ),
    "grouped_window": Case("GroupQueryAttention", grouped(), {**GROUPED, "local_window_size": 3}, 3),
    "grouped_softcap": Case("GroupQueryAttention", grouped(), {**GROUPED, "softcap": 2.0}, 3),
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
    "nbits_4": nbits(4),
    "nbits_2": nbits(2),
    "nbits_8": nbits(8),
    "nbits_zeros": nbits(4, zeros=u8(6, 2)),
    "nbits_zeros_8": nbits(8, zeros=u8(6, 3)),
    "nbits_zeros_2": nbits(2, zeros=u8(6, 1)),
    "nbits_float_zeros": nbits(4, zeros=f32(6, 3, scale=3.0)),
    "nbits_bias": nbits(4, bias=f32(6)),
    "nbits_groups": nbits(4, k=32, groups=i32(*[0] * 16, *[1] * 16)),
    "nbits_block_32": nbits(4, 64, 5, 32, zeros=u8(5, 1)),
}

#: what is refused, and the reason
REFUSED = {
    "attention_rotary": "rotary positions or a shared buffer",
    "attention_4d_mask": "cannot run on",
    "multi_head_starts": "a mask of lengths and offsets",
    "multi_head_packed": "packed keys and values",
    "multi_head_packed_keys": "packed keys and values",
    "rotary_scale": "packed batches, or a scale",
    "grouped_unequal": "rows of unequal lengths",
    "grouped_unequal_prompt": "rows of unequal lengths",
    "nbits_groups": "in another order",
}


def model_of(case: Case) -> ModelProto:
    given = {name: value for name, value in case.inputs.items() if value is not None}
    names = [name if value is not None else "" for name, value in case.inputs.items()]
    while not names[-1]:
        names.pop()
    results = [f"y{index}" for index in range(case.outputs)]
    compared = case.compared or tuple(range(case.outputs))
    node = helper.make_node(
        case.op, names, [name if index in compared else "" for index, name in enumerate(results)],
        domain="com.microsoft", **case.attributes,
    )  # fmt: skip
    if case.op == "SimplifiedLayerNormalization":  # it is ONNX Runtime's, but in ONNX's domain
        node.domain = ""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items() if name not in case.weights
    ]  # fmt: skip
    unknown = ["a", "b", "c", "d", "e"]
    outputs = [helper.make_tensor_value_info(results[i], TensorProto.FLOAT, unknown[: case.rank(i)]) for i in compared]
    weights = [
        helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape, v.tobytes(), raw=True)
        for n, v in given.items() if n in case.weights
    ]  # fmt: skip
    graph = helper.make_graph([node], case.op, inputs, outputs, initializer=weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def feed_of(case: Case) -> dict[str, Any]:
    return {name: v for name, v in case.inputs.items() if v is not None and name not in case.weights}


def theirs(model: ModelProto, feed: dict[str, Any]) -> list[Any]:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    return list(runtime.InferenceSession(model.SerializeToString(), options).run(None, feed))


def ours(case: Case) -> list[Any]:
    session = fp.onnx.InferenceSession(model_of(case), policy="propagate", confirm=False)
    return session.run(None, feed_of(case))


@pytest.mark.peers
@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED.keys()))
def test_equal_to_onnx_runtime(name: str) -> None:
    case = CASES[name]
    for got, want in zip(ours(case), theirs(model_of(case), feed_of(case)), strict=True):
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= 2e-5 * max(1.0, np.abs(want).max())


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


def test_an_operator_without_its_domain() -> None:
    """ONNX Runtime's optimiser writes it so; ONNX's checker knows no such operator."""
    model = model_of(CASES["simplified_norm"])
    assert model.graph.node[0].domain == ""
    model.opset_import.pop()
    x, s = feed_of(CASES["simplified_norm"]).values()
    (got,) = fp.onnx.InferenceSession(model, policy="propagate", confirm=False).run(None, {"x": x, "s": s})
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * s
    assert np.abs(got - want).max() <= 1e-5


def test_an_output_of_unknown_rank() -> None:
    """Writers of models leave the shape out; ONNX's checker refuses that, ONNX Runtime does not."""
    model = model_of(CASES["gelu"])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    (got,) = fp.onnx.InferenceSession(model, policy="propagate", confirm=False).run(None, {"x": X})
    assert np.array_equal(got, ours(CASES["gelu"])[0])
