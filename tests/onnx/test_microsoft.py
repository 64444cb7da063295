"""Operators of ``com.microsoft`` but attention, with their optional inputs and attributes: equal to ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import fmtprop as fp
from fmtprop.errors import FmtpropError
from tests.onnx.microsoft_cases import Case, compare, f32, feed_of, i32, i64, model_of, ours, u8

X, IMAGE = f32(2, 5, 16), f32(1, 4, 7, 7)
FUSED = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
NORM = {"x": X, "skip": f32(2, 5, 16), "gamma": f32(16)}


def nbits(bits: int, k: int = 40, n: int = 6, block: int = 16, **more: Any) -> Case:
    blocks = -(-k // block)
    inputs = {"a": f32(3, k), "b": u8(n, blocks, block * bits // 8), "scales": f32(n, blocks, scale=0.1)}
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    given = {"zeros": None, "groups": None, "bias": None, **more}
    return Case("MatMulNBits", {**inputs, **given}, attributes, weights=frozenset({"b", "scales", "zeros", "bias"}))


def gathered(bits: int, data: Any, **more: Any) -> Case:
    inputs = {"data": data, "indices": i64([1, 0], [8, 3]), "scales": f32(9, 3, scale=0.1), **more}
    attributes = {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    return Case("GatherBlockQuantized", inputs, attributes, weights=frozenset({"data", "scales", "zeros"}))


EMBEDDED = {
    "ids": i32([1, 5, 2], [7, 0, 3]),
    "segments": i32([0, 1, 1], [0, 0, 1]),
    "words": f32(10, 8),
    "places": f32(6, 8),
    "kinds": f32(2, 8),
    "gamma": f32(8),
    "beta": f32(8),
}
TABLES = ("words", "places", "kinds", "gamma", "beta")
MASK = i32([1, 1, 0], [1, 0, 1])


def embedded(outputs: int = 2, **more: Any) -> Case:
    inputs = {**EMBEDDED, **more}
    types = {1: TensorProto.INT32}
    return Case("EmbedLayerNormalization", inputs, {}, outputs, weights=frozenset(TABLES), types=types)


def quantised_embedding() -> Case:
    inputs = {**EMBEDDED, **{name: u8(*EMBEDDED[name].shape) for name in TABLES}, "mask": MASK}
    inputs |= {f"{name}_scale": np.array(0.01 * (n + 1), np.float32) for n, name in enumerate(TABLES)}
    inputs |= {f"{name}_zero": np.array(100 + n, np.uint8) for n, name in enumerate(TABLES)}
    weights = frozenset(inputs.keys() - {"ids", "segments", "mask"})
    return Case("QEmbedLayerNormalization", inputs, {}, 2, weights=weights, types={1: TensorProto.INT32})


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
    "nbits_groups_ragged": nbits(4, groups=i32(*[2, 0, 1] * 13, 0), bias=f32(6)),
    "gathered_4": gathered(4, u8(9, 20), zeros=u8(9, 2)),
    "gathered_4_plain": gathered(4, u8(9, 20)),
    "gathered_8": gathered(8, u8(9, 40), zeros=u8(9, 3)),
    "embedded": embedded(mask=MASK),
    "embedded_without_segments": embedded(segments=None, kinds=None),
    "embedded_sum": embedded(3, mask=MASK),
    "embedded_places": embedded(mask=None, positions=i32([2, 0, 1], [3, 4, 5])),
    "embedded_places_of_all": embedded(mask=None, positions=i32([2, 0, 1])),
    "embedded_quantised": quantised_embedding(),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_equal_to_onnx_runtime(name: str) -> None:
    compare(CASES[name])


def test_groups_of_weights_with_zero_points() -> None:
    """ONNX Runtime 1.31 gives other numbers, even for the groups that it takes by default."""
    plain = nbits(4, zeros=u8(6, 2))
    with_groups = Case(
        plain.op,
        {**plain.inputs, "groups": np.arange(40, dtype=np.int32) // 16},
        plain.attributes,
        weights=plain.weights | {"groups"},
    )
    # a sum near 0 has the rounding errors of its summands, which are about 1
    np.testing.assert_allclose(ours(plain)[0], ours(with_groups)[0], rtol=1e-5, atol=1e-6)


def test_an_operator_without_its_domain() -> None:
    """ONNX Runtime's optimiser writes it so; ONNX's checker knows no such operator."""
    model = model_of(CASES["simplified_norm"])
    assert model.graph.node[0].domain == ""
    model.opset_import.pop()
    x, s = feed_of(CASES["simplified_norm"]).values()
    (got,) = fp.onnx.InferenceSession(model, policy="propagate", confirm=False).run(None, {"x": x, "s": s})
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * s
    assert np.abs(got - want).max() <= 1e-5


def bad(**changes: Any) -> Any:
    shapes = {"a": (3, 64), "b": (32, 2, 16), "scales": (32, 2), "zeros": (32, 1), **changes}
    attributes = {"K": 64, "N": 32, "bits": 4, "block_size": 32}
    attributes |= {name: value for name, value in changes.items() if name in attributes}
    inputs = {"a": f32(*shapes["a"]), "b": u8(*shapes["b"]), "scales": f32(*shapes["scales"])}
    given = {**inputs, "zeros": u8(*shapes["zeros"]), "groups": None, "bias": None}
    return Case("MatMulNBits", given, attributes, weights=frozenset({"b", "scales", "zeros"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, r"codes of 3 bits, where 2, 4 and 8 are known, is not supported"),
        ({"block_size": 0}, r"block_size is 0, but blocks have 16, 32, 64, … numbers"),
        ({"block_size": 24}, r"block_size is 24"),
        ({"a": (3, 63)}, r"K is 64, but A has rows of 63 numbers"),
        ({"b": (31, 2, 16)}, r"B has shape \(31, 2, 16\), but 32 rows of 64 codes of 4 bits in blocks of 32 need 1024"),
        ({"scales": (32, 3)}, r"scales has shape \(32, 3\), but .* need 64 elements"),
        ({"zeros": (32, 5)}, r"zero_points has shape \(32, 5\), but .* need 32 elements"),
    ],
)
def test_codes_of_other_sizes_are_one_error(changes, message):
    with pytest.raises(FmtpropError, match=message) as raised:
        fp.compile(model_of(bad(**changes)))
    assert "MatMulNBits" in str(raised.value)
