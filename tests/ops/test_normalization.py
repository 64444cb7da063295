from __future__ import annotations

import pytest
import torch

from fmtprop import dnnl
from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import BatchNorm, GroupNorm, LayerNorm
from fmtprop.ops.normalization import BATCH_NORMALIZATION, GROUP_NORMALIZATION, LAYER_NORMALIZATION
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 5, 4))


def vector(size, low=0.0):
    return torch.rand(size, generator=torch.Generator().manual_seed(size)) + low


def bn_types(**changes):
    vectors = {name: TensorType((6,)) for name in ("mean", "variance", "scale", "shift")}
    return {"src": X, **vectors, **changes}


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("op", [BATCH_NORMALIZATION, LAYER_NORMALIZATION, GROUP_NORMALIZATION])
def test_normalizations_keep_the_type(op):
    for sample in op.samples():
        assert op.infer(sample.attrs, sample.types) == (sample.types["src"],)


@pytest.mark.parametrize(
    ("op", "attrs", "types", "message"),
    [
        (
            BATCH_NORMALIZATION,
            BatchNorm(),
            bn_types(scale=TensorType((7,))),
            "scale has dims (7,) but src axis 1 with 6 elements needs (6,)",
        ),
        (
            BATCH_NORMALIZATION,
            BatchNorm(),
            bn_types(src=TensorType((6,))),
            "src has 1 axes but batch normalization takes 2 to 5",
        ),
        (
            LAYER_NORMALIZATION,
            LayerNorm(),
            {"src": X, "shift": TensorType((6,))},
            "shift has dims (6,) but src axis 3 with 4 elements needs (4,)",
        ),
        (
            LAYER_NORMALIZATION,
            LayerNorm(),
            {"src": TensorType((6,))},
            "src has 1 axes but layer normalization takes 2 to 5",
        ),
        (GROUP_NORMALIZATION, GroupNorm(4), {"src": X}, "src axis 1 has 6 channels, which groups=4 does not divide"),
        (
            GROUP_NORMALIZATION,
            GroupNorm(2),
            {"src": TensorType((6,))},
            "src has 1 axes but group normalization takes 2 to 5",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(op, attrs, types, message):
    with pytest.raises(ShapeError) as error:
        op.infer(attrs, types)
    assert message in str(error.value)


def test_a_group_count_out_of_range_is_named():
    with pytest.raises(ShapeError, match="group_normalization groups is 0, but must be at least 1"):
        GroupNorm(0)


# ---------------------------------------------------------------- primitives


def native(dims, dtype="f32", any_=False):
    tag = "abcd"[: len(dims)]
    return dnnl.NativeDesc.from_desc(MemoryDesc.any(dims, dtype) if any_ else MemoryDesc(dims, dtype, tag=tag))


def test_vectors_that_are_not_f32_are_refused():
    vectors = {"mean": native((6,), "bf16"), "variance": native((6,))}
    descs = {"src": native(X.dims), "dst": native(X.dims, any_=True), **vectors}
    with pytest.raises(UnsupportedOpError, match="batch_normalization: mean is bf16 but oneDNN takes f32 here"):
        BATCH_NORMALIZATION.primitive(BatchNorm(), descs, None)


def test_vectors_come_back_plain():
    vectors = {name: native((6,), any_=True) for name in ("mean", "variance", "shift")}
    descs = {"src": native(X.dims), "dst": native(X.dims, any_=True), **vectors}
    lowering = BATCH_NORMALIZATION.primitive(BatchNorm(), descs, dnnl.PrimitiveAttr())
    formats = lowering.resolve(lowering.pd)
    assert set(formats) == {"src", "dst", "mean", "variance", "shift"}
    assert formats["shift"] == MemoryDesc((6,), "f32", tag="a")


# ---------------------------------------------------------------- importers


@pytest.mark.parametrize("src", [(2, 6), (2, 6, 7), (2, 6, 5, 4), (1, 6, 3, 4, 2)])
def test_batch_norm_of_every_rank(src):
    tensors = (vector(6), vector(6), vector(6), vector(6, 0.5))
    call = check_import("aten.batch_norm.default", TensorType(src), *tensors, False, 0.1, 1e-3, False)
    assert call.ops() == ["batch_normalization"]


def test_batch_norm_without_scale_and_shift():
    tensors = (None, None, vector(6), vector(6, 0.5))
    call = check_import("aten.batch_norm.default", X, *tensors, False, 0.1, 1e-5, False)
    assert list(call.graph.inputs(call.graph.nodes()[-1].name)) == ["src", "mean", "variance"]


def test_the_decomposed_batch_norm_gives_its_first_result():
    tensors = (vector(6), vector(6), vector(6), vector(6, 0.5))
    call = FakeCall("aten._native_batch_norm_legit_no_training.default", X, *tensors, 0.1, 1e-3)
    dst, *statistics = call.run()
    assert not any(torch.as_tensor(call.graph.constants[value.node]).any() for value in statistics)
    x = torch.randn(X.dims, generator=torch.Generator().manual_seed(0))
    wanted = torch.ops.aten._native_batch_norm_legit_no_training.default(x, *tensors, 0.1, 1e-3)[0]
    torch.testing.assert_close(call.evaluate(dst, x), wanted)


def test_batch_norm_of_its_own_batch_is_declined():
    tensors = (vector(6), vector(6), vector(6), vector(6, 0.5))
    training = FakeCall("aten.batch_norm.default", X, *tensors, True, 0.1, 1e-5, False)
    untracked = FakeCall("aten.batch_norm.default", X, None, None, None, None, True, 0.1, 1e-5, False)
    for call in (training, untracked):
        assert call.run() is None
        assert call.ops() == []


def test_vectors_are_read_in_f32():
    half = tuple(vector(6, 0.5).bfloat16() for _ in range(4))  # as a module has them after module.to(torch.bfloat16)
    call = FakeCall("aten.batch_norm.default", X.with_dtype("bf16"), *half, False, 0.1, 1e-5, False)
    assert call.type(call.run()) == X.with_dtype("bf16")
    assert call.ops() == [*["reorder"] * 4, "batch_normalization"]
    double = tuple(vector.double() for vector in half)
    assert FakeCall("aten.batch_norm.default", X.with_dtype("bf16"), *double, False, 0.1, 1e-5, False).run() is None
    tensors = (vector(6), vector(6), vector(6), vector(6, 0.5))
    mixed = FakeCall("aten.batch_norm.default", X.with_dtype("bf16"), *tensors, False, 0.1, 1e-5, False)
    assert mixed.type(mixed.run()) == X.with_dtype("bf16")


@pytest.mark.parametrize(
    ("src", "inner", "ops"),
    [
        ((2, 7, 8), 1, ["layer_normalization"]),
        ((2, 7, 8), 2, ["reshape", "reshape", "reshape", "layer_normalization", "reshape"]),
        ((5, 8), 1, ["layer_normalization"]),
        ((8,), 1, ["reshape", "layer_normalization", "reshape"]),
        ((2, 2, 2, 2, 2, 8), 1, ["reshape", "layer_normalization", "reshape"]),
    ],
)
def test_layer_norm_over_one_or_several_axes(src, inner, ops):
    shape = src[len(src) - inner :]
    tensors = (vector(int(torch.tensor(shape).prod())).reshape(shape) for _ in range(2))
    call = check_import("aten.layer_norm.default", TensorType(src), list(shape), *tensors, 1e-4)
    assert call.ops() == ops


def test_layer_norm_without_scale_and_shift_and_in_its_decomposed_form():
    check_import("aten.layer_norm.default", TensorType((2, 7, 8)), [8])
    call = check_import("aten.native_layer_norm.default", TensorType((2, 7, 8)), [8], vector(8), None, 1e-5)
    assert call.ops() == ["layer_normalization"]


def test_group_norm_and_its_decomposed_form():
    check_import("aten.group_norm.default", X, 3, vector(6), vector(6), 1e-4)
    check_import("aten.native_group_norm.default", X, vector(6), vector(6), 2, 6, 20, 2, 1e-4)


def test_instance_norm_is_group_norm_of_single_channels():
    call = check_import("aten.instance_norm.default", X, vector(6), vector(6), None, None, True, 0.1, 1e-5, False)
    assert call.graph.nodes()[-1].attrs == GroupNorm(6, 1e-5)


def test_group_norm_is_as_exact_in_channels_last_where_means_are_large():
    torch.manual_seed(0)
    src = 2 + 0.05 * torch.randn(2, 8, 12, 12)
    attrs = GroupNorm(4, 1e-5)
    (want,) = GROUP_NORMALIZATION.reference(attrs, {"src": src.double()})
    (got,) = GROUP_NORMALIZATION.reference(attrs, {"src": src.contiguous(memory_format=torch.channels_last)})
    assert (got - want).abs().max() < 2e-5  # PyTorch's own code for channels-last is off by 1e-3


def test_instance_norm_with_statistics_is_declined():
    call = FakeCall("aten.instance_norm.default", X, None, None, vector(6), vector(6), False, 0.1, 1e-5, False)
    assert call.run() is None
    assert call.ops() == []
