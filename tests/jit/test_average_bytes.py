"""Averages of channels by machine code: of reals and of bytes, rounded and not."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fmtprop.ir.grid import Grid
from fmtprop.jit import AverageBytesKernel, Quantized, Rounding, offered
from fmtprop.layout import DataType
from fmtprop.ops.quantization import to_bytes, to_reals

TYPES = {DataType.F32: torch.float32, DataType.U8: torch.uint8, DataType.S8: torch.int8}
U8, S8, SHIFTED = Grid((0.02,), 0, 255), Grid((0.03,), -128, 127), Grid((0.02,), -117, 138)


#: images, places, channels
SIZES = [(1, 49, 16), (3, 5, 67), (2, 1, 200), (1, 3136, 40)]
#: a rounding behind the averages, and whether its numbers are stored as reals
MADE = [(None, True), *product((U8, S8, Grid((0.05,), -3, 12)), (True, False))]
#: each pair of ends, with one of the sizes in turn
ENDS = [
    (read, *made, SIZES[(i + j) % len(SIZES)])
    for i, read in enumerate([None, U8, S8, SHIFTED])
    for j, made in enumerate(MADE)
]


@pytest.mark.parametrize(("read", "made", "in_reals", "size"), ENDS)
def test_averages(isa, read, made, in_reals, size):
    images, places, channels = size
    real = torch.randn(images, places, channels, generator=torch.Generator().manual_seed(0)) * 2 + 0.3
    stored, meaning = real, None
    if read is not None:
        stored = to_bytes(real, read)
        real, meaning = to_reals(stored, read), Quantized(read.stored, read.scale, read.zero)
    rounding = None if made is None else Rounding(made.scale, made.low, made.high, made.zero)
    dtype = DataType.F32 if in_reals else made.stored
    kernel = offered(AverageBytesKernel(images, places, channels, meaning, dtype, rounding))
    work, got = kernel.work(2), torch.empty(images, channels, dtype=TYPES[dtype])
    work.point["src"](stored.data_ptr())
    work.point["dst"](got.data_ptr())
    work.run()
    expected = real.double().mean(1)
    if made is None:
        assert (got - expected).abs().max() <= 1e-5
        return
    steps = expected / torch.tensor(made.scale).double()
    found = ((got if in_reals else to_reals(got, made)).double() / torch.tensor(made.scale).double()).round()
    ends = [(steps + sign * 1e-3).round().clamp(made.low, made.high) for sign in (-1, 1)]
    assert bool(((found >= ends[0]) & (found <= ends[1])).all())


def test_few_channels_have_no_kernel(isa):
    assert offered(AverageBytesKernel(1, 49, isa.lanes - 1, None, DataType.F32)) is None
