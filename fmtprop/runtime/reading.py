"""The numbers that a step of a run has written, whatever their format."""

from __future__ import annotations

import numpy as np
import torch

from fmtprop.ir.grid import Grid
from fmtprop.layout import DataType, FormatKind, unpack
from fmtprop.ops.quantization import to_reals
from fmtprop.targets.bound import Place


def numbers_at(place: Place, grid: Grid | None = None) -> torch.Tensor | None:
    """Return a row-major copy of the numbers in a place, or of those for which bytes of a grid stand.

    Result: floats as f32; None for a format that only the library can read.
    """
    memory, desc = place.memory.tensor, place.desc
    if memory.layout is not torch.strided:
        found = memory.to_dense()
    elif desc.kind is not FormatKind.BLOCKED:
        return None
    elif desc.is_plain:
        found = place.tensor()
    else:
        array = unpack(memory.flatten().view(torch.uint8).numpy(), desc)
        found = torch.from_numpy(np.ascontiguousarray(array)).reshape(desc.dims)
        found = found.view(torch.bfloat16) if desc.dtype is DataType.BF16 else found
    if found.is_floating_point():
        return found.float().clone(memory_format=torch.contiguous_format)
    return found.clone(memory_format=torch.contiguous_format) if grid is None else to_reals(found, grid)
