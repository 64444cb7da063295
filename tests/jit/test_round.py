"""Roundings to a grid by machine code: the same numbers as the op's meaning, bit by bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fmtprop.ir.grid import Grid
from fmtprop.jit import Quantized, Rounding, RoundKernel, offered
from fmtprop.layout import DataType
from fmtprop.ops.quantization import FakeQuantize, reference_fake_quantize, to_bytes, to_reals

TYPES = {DataType.F32: torch.float32, DataType.U8: torch.uint8, DataType.S8: torch.int8}
GRIDS = {
    "u8": Grid((0.1,), 0, 255),
    "s8": Grid((0.03,), -128, 127),
    "shifted": Grid((0.02,), -117, 138),
    "few": Grid((0.05,), -3, 12),
}


def rounded(src, kernel, threads=2):
    work = kernel.work(threads)
    dst = torch.empty(kernel.rows * kernel.length, dtype=TYPES[kernel.dst])
    work.point["src"](src.data_ptr())
    work.point["dst"](dst.data_ptr())
    work.run()
    return dst


#: rows, their length, and elements from row to row
SIZES = [(1, 16, 16), (1, 4097, 4097), (3, 5001, 5001), (7, 49, 81)]
#: each pair of ends, with one of the sizes in turn
ENDS = [
    (read, made, in_reals, SIZES[(i + j) % len(SIZES)])
    for i, read in enumerate([None, *GRIDS])
    for j, (made, in_reals) in enumerate(product(GRIDS, (True, False)))
]


@pytest.mark.parametrize(("read", "made", "in_reals", "size"), ENDS)
def test_roundings_are_those_of_the_op(isa, read, made, in_reals, size):
    rows, length, pitch = size
    generator, grid = torch.Generator().manual_seed(0), GRIDS[made]
    numbers = torch.randn(rows, pitch, generator=generator) * 8
    numbers[0, :16] = torch.arange(-8, 8) * grid.scale + grid.scale / 2  # halves
    numbers[-1, :2] = torch.tensor([1e30, -1e30])
    stored = real = numbers
    source = None if read is None else GRIDS[read]
    if source is not None:
        stored = to_bytes(numbers, source)
        real = to_reals(stored, source)
    meaning = None if source is None else Quantized(source.stored, source.scale, source.zero)
    rounding, dst = Rounding(grid.scale, grid.low, grid.high, grid.zero), DataType.F32 if in_reals else grid.stored
    kernel = offered(RoundKernel(rows, length, pitch, meaning, dst, rounding))
    attrs = FakeQuantize(grid.scale, grid.low, grid.high)
    expected = reference_fake_quantize(attrs, {"src": real[:, :length].reshape(-1)})[0]
    got = rounded(stored, kernel)
    assert torch.equal(got, expected if in_reals else to_bytes(expected, grid))


def test_infinities_are_the_ends(isa):
    src = torch.tensor([torch.inf, -torch.inf] * 16)
    kernel = RoundKernel(1, 32, 32, None, DataType.F32, Rounding(0.5, -3, 12, 3))
    assert rounded(src, kernel).tolist() == [6.0, -1.5] * 16


def test_few_numbers_have_no_kernel(isa):
    assert offered(RoundKernel(9, isa.lanes - 1, 64, None, DataType.U8, Rounding(0.5, 0, 255, 0))) is None
