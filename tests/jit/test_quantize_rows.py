"""Kernels of quantization by scales of the same run: bit for bit the op's meaning."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fmtprop.ir.op import opdef
from fmtprop.ir.tensors import torch_dtype
from fmtprop.jit import QuantizeRowsKernel
from fmtprop.jit.isa import Isa
from fmtprop.layout import DataType
from fmtprop.ops import DynamicQuantize
from tests.jit.work import statuses

#: one number, one row of less than a vector, one column, whole vectors and a rest, pieces that overlap
SHAPES = [(1, 1), (1, 37), (3, 1), (5, 64), (7, 83), (1, 4096), (1, 4097), (1, 20001), (33, 768)]
LIMITS = [(DataType.U8, 0, 255), (DataType.S8, -128, 127), (DataType.S8, -127, 127), (DataType.F32, -117, 138)]


def numbers(kind: str, rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    middle = x.numel() // 2
    if kind in ("nan", "inf", "-inf"):
        x.view(-1)[middle] = float(kind)
    changed = {"positive": x.abs(), "negative": -x.abs(), "zeros": 0 * x, "tiny": 1e-41 * x, "large": 1e37 * x}
    return changed.get(kind, x)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.nan_to_num(-7.0), wanted.nan_to_num(-7.0))


@pytest.mark.parametrize("kind", ["mixed", "positive", "negative", "zeros", "tiny", "large", "nan", "inf", "-inf"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounds", [False, True])
def test_rows_are_rounded_as_the_op_says(isa: Isa, rounds: bool, shape: tuple[int, int], kind: str) -> None:
    src = numbers(kind, *shape)
    for (dtype, low, high), symmetric, multiplies in product(LIMITS, (False, True), (False, True)):
        least = 2.0**-23 if multiplies else 0.0
        divisor = 127.5 if symmetric else 255.0
        attrs = DynamicQuantize(low, high, divisor, least, symmetric, shape[0] == 1, multiplies, rounds)
        kernel = QuantizeRowsKernel(*shape, low, high, divisor, least, symmetric, multiplies, rounds, dtype)
        assert kernel.is_offered
        dst = torch.full(shape, 77, dtype=torch_dtype(dtype))
        scale, zero = torch.full((shape[0],), 77.0), torch.full((shape[0],), 77.0)
        work = kernel.work(2)
        for name, tensor in (("src", src), ("dst", dst), ("scale", scale), ("zero", zero)):
            work.point[name](tensor.data_ptr())
        assert statuses(work) == [0] * len(work.calls)
        wanted, *vectors = opdef("dynamic_quantize").reference(attrs, {"src": src})
        if dtype is not DataType.F32:
            wanted = wanted.to(torch.int32).to(dst.dtype)  # a NaN is 0
        assert_same(dst.float(), wanted.float())
        for got, vector in zip((scale, zero), vectors, strict=True):
            assert_same(got, vector.flatten())


def test_a_tensor_without_numbers_has_no_kernel() -> None:
    assert not QuantizeRowsKernel(0, 5, 0, 255, 255.0, 0.0, False, False, False, DataType.U8).is_offered
    assert not QuantizeRowsKernel(1, 0, 0, 255, 255.0, 0.0, False, False, False, DataType.U8).is_offered
