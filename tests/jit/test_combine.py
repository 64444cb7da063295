"""Sums, differences and products of bytes, against the operation on the real numbers for which they stand."""

from __future__ import annotations

import pytest

from fmtprop.ir.grid import Grid
from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.jit import CombineKernel, Quantized, broadcast_kernel_for
from fmtprop.jit.kernel import isa
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Eltwise, FakeQuantize
from fmtprop.passes.precision.in_bytes import in_bytes
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget
from tests.targets.nodes import node_of

pytestmark = pytest.mark.skipif(isa().name == "avx2", reason="the kernel is written for AVX-512")

U8, S8, SHIFTED = Grid((0.02,), 0, 255), Grid((0.03,), -128, 127), Grid((0.02,), -117, 138)


def ways(alg, dims, other, grids, post_ops):
    types = {"src_0": TensorType(dims), "src_1": TensorType(other)}
    node = node_of("binary", Binary(alg), types, post_ops).with_(
        grids=dict(zip(("src_0", "src_1", "dst"), grids, strict=True))
    )
    tag = "acdb" if len(dims) == 4 else None
    request = {name: MemoryDesc(type_.dims, "f32", tag=tag) for name, type_ in types.items()}
    request["dst"] = MemoryDesc.any(dims, "f32")
    for asked in in_bytes(node, request):
        for candidate in OneDnnTarget().candidates(node, asked):
            results = (node.results[0].with_dtype(node.grids["dst"].stored),)
            yield node.with_(results=results, descs=candidate.results, choice=candidate.choice("test"))


@pytest.mark.parametrize("alg", ["add", "sub", "mul"])
@pytest.mark.parametrize(
    "grids", [(U8, U8), (SHIFTED, U8), (S8, SHIFTED), (S8, S8)], ids=["u8", "shifted", "mixed", "s8"]
)
@pytest.mark.parametrize(
    ("dims", "other"),
    [
        ((2, 32, 5, 7), (2, 32, 5, 7)),
        ((2, 35, 5, 7), (2, 35, 1, 1)),
        ((1, 35, 5, 7), (1, 35, 1, 1)),
        ((2, 128, 3, 3), (1, 1, 1, 1)),
        ((3, 83), (3, 83)),
        ((4, 83), (1, 83)),
    ],
    ids=str,
)
def test_combined_bytes_mean_the_operation(alg, grids, dims, other):
    tail = FakeQuantize(0.05, -117, 138)
    found = list(ways(alg, dims, other, (*grids, tail.grid), (PostOp("fake_quantize", tail),)))
    assert [node.choice.target for node in found] == ["jit"]
    assert check_node(found[0]) is None


def test_a_rectifier_is_the_least_number():
    relu = PostOp("eltwise", Eltwise("relu"))
    dims, tail = (1, 32, 4, 4), FakeQuantize(0.05, 0, 255)
    found = list(ways("add", dims, dims, (S8, S8, tail.grid), (relu, PostOp("fake_quantize", tail))))
    assert len(found) == 1 and check_node(found[0]) is None
    signed = FakeQuantize(0.05, -128, 127)
    assert not list(ways("add", dims, dims, (S8, S8, signed.grid), (relu, PostOp("fake_quantize", signed))))


def test_short_rows_have_no_kernel():
    assert broadcast_kernel_for("mul", ((5, 0), (7, 1)), DataType.F32) is None
    shape = broadcast_kernel_for("mul", ((5, 0), (32, 1)), DataType.F32)
    one = Quantized(DataType.U8, 0.5, 3)
    assert shape is not None and CombineKernel(shape, one, one, one, 0, 255).is_offered
