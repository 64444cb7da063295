"""Dequantizations by machine code: the same numbers as the op's meaning, bit by bit."""

from __future__ import annotations

import pytest
import torch

from fmtprop.jit import DequantizeKernel
from fmtprop.jit.isa import Isa
from fmtprop.layout import DataType
from fmtprop.ops.quantization import Dequantize, reference_dequantize

TYPES = {DataType.U8: torch.uint8, DataType.S8: torch.int8}


@pytest.mark.parametrize("has_zero_point", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES])
@pytest.mark.parametrize("count", [16, 23, 4096, 4099, 20011])
def test_numbers_are_those_of_the_op(isa: Isa, count: int, dtype: DataType, has_zero_point: bool) -> None:
    limits = torch.iinfo(TYPES[dtype])
    src = torch.randint(limits.min, limits.max + 1, (count,)).to(TYPES[dtype])
    given = {"src": src, "scale": torch.tensor(0.0371)}
    if has_zero_point:
        given["zero_point"] = torch.tensor(limits.max - 3, dtype=TYPES[dtype])
    kernel, dst = DequantizeKernel(count, dtype, has_zero_point), torch.full((count + 8,), 77.0)
    assert kernel.is_offered
    work = kernel.work(2)
    for name, tensor in {**given, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    work.run()
    assert torch.equal(dst[:count], reference_dequantize(Dequantize(), given)[0])
    assert (dst[count:] == 77.0).all()


def test_less_than_a_vector_is_left_to_others(isa: Isa) -> None:
    assert not DequantizeKernel(7, DataType.U8, has_zero_point=True).is_offered
