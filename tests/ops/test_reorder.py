from __future__ import annotations

import pytest
import torch

from fmtprop import dnnl
from fmtprop.errors import ShapeError
from fmtprop.ir.node import Value
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Reorder
from fmtprop.ops.reorder import REORDER
from tests.ops.fake_call import FakeCall, check_import

X, NARROW = TensorType((2, 3, 4)), TensorType((2, 3, 4), "bf16")


def test_keeps_or_changes_the_type():
    assert REORDER.infer(Reorder(), {"src": NARROW}) == (NARROW,)
    assert REORDER.infer(Reorder("f32"), {"src": NARROW}) == (X,)


def test_reference_copies_into_row_major_order():
    src = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (dst,) = REORDER.reference(Reorder(), {"src": src})
    assert dst.is_contiguous()
    assert dst.data_ptr() != src.data_ptr()
    assert torch.equal(dst, src)


def test_unknown_type_is_named():
    with pytest.raises(ShapeError, match="unknown data type 'f24'"):
        Reorder("f24")


@pytest.mark.parametrize(
    ("src", "tag"),
    [
        (MemoryDesc((2, 17, 5, 7), tag="aBcd8b"), "aBcd8b"),
        (MemoryDesc((2, 17, 5, 7), tag="acdb"), "acdb"),
        (MemoryDesc((2, 34, 5, 7), tag="acdb").submemory((2, 17, 5, 7), (0, 17, 0, 0)), "abcd"),
        (MemoryDesc((1, 17, 1, 1)).expand((2, 17, 5, 7)), "abcd"),
    ],
)
def test_a_destination_without_format_takes_over_a_dense_one(src, tag):
    natives = {
        "src": dnnl.NativeDesc.from_desc(src),
        "dst": dnnl.NativeDesc.from_desc(MemoryDesc.any(src.dims, "bf16")),
    }
    lowering = REORDER.primitive(Reorder("bf16"), natives, None)
    assert lowering.resolve(lowering.pd)["dst"] == MemoryDesc(src.dims, "bf16", tag=tag)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten._to_copy.default", (X,), {"dtype": torch.bfloat16}),
        ("aten._to_copy.default", (NARROW,), {"dtype": torch.float32}),
        ("aten.to.dtype", (X, torch.float16), {}),
        ("aten.to.device", (X, "cpu", torch.bfloat16), {}),
        ("aten.to.other", (X, NARROW), {}),
        ("aten.type_as.default", (NARROW, X), {}),
        ("prims.convert_element_type.default", (X, torch.bfloat16), {}),
    ],
)
def test_conversions_between_floats_agree_with_torch(target, args, kwargs):
    assert check_import(target, *args, **kwargs).ops() == ["reorder"]


def test_a_conversion_to_the_same_type_is_the_argument():
    assert FakeCall("aten.to.dtype", X, torch.float32).run() == Value("x0")
    assert FakeCall("aten._to_copy.default", X, memory_format=torch.contiguous_format).run() == Value("x0")
    ints = TensorType((2,), "s64")
    assert FakeCall("aten.to.dtype", ints, torch.int64).run() == Value("x0")


@pytest.mark.parametrize(
    ("type_", "dtype"),
    [
        (X, torch.int32),  # PyTorch truncates, oneDNN rounds
        (TensorType((2,), "s64"), torch.float32),
        (TensorType((2,), "boolean"), torch.float32),
        (X, torch.float64),
        (TensorType(()), torch.bfloat16),
    ],
)
def test_declined_conversions(type_, dtype):
    assert FakeCall("aten.to.dtype", type_, dtype).run() is None
