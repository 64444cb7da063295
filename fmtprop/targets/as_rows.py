"""How a node's tensors, as they lie in memory, become rows of numbers: axes that one could stand for are one."""

from __future__ import annotations

from collections.abc import Sequence

from fmtprop.ir import Node
from fmtprop.jit import Rounding, StandaloneKernel
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.assignment.formats import even_step
from fmtprop.passes.target import Request

#: data types of stored numbers of a grid, and of indices
BYTES = (DataType.U8, DataType.S8)
INDICES = (DataType.S32, DataType.S64)

#: a kernel, the formats that it reads, and those that it writes
Way = tuple[StandaloneKernel, Request, tuple[MemoryDesc, ...]]


def merged(desc: MemoryDesc, *steps: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a tensor from the outermost in: size, and steps of other tensors along it.

    Neighbours along which each other tensor goes on evenly, or stands still, are one; axes of size 1 are none.
    """
    order = sorted((axis for axis, size in enumerate(desc.dims) if size > 1), key=lambda axis: -desc.strides[axis])
    merged: list[tuple[int, ...]] = []
    for axis in reversed(order):
        size, here = desc.dims[axis], tuple(step[axis] for step in steps)
        if merged and here == tuple(merged[0][0] * step for step in merged[0][1:]):
            merged[0] = (size * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (size, *here))
    return tuple(merged)


def pitch_of(axes: tuple[tuple[int, int], ...]) -> int | None:
    """Return the elements from row to row, a row being the last axis: size and stride of each. None if uneven."""
    *outer, (length, step) = axes or ((0, 0),)
    if step != 1:
        return None
    return even_step(outer) if outer else length


def is_in_rows(desc: MemoryDesc) -> bool:
    """Return whether numbers have strides, and there are some."""
    return desc.kind == "blocked" and desc.is_plain and 0 not in desc.dims


def is_row_of_numbers(desc: MemoryDesc) -> bool:
    """Return whether numbers lie side by side, in any order of the axes."""
    return is_in_rows(desc) and desc.at_start().is_packed


def as_asked(asked: MemoryDesc, own: MemoryDesc) -> MemoryDesc | None:
    """Return the kernel's own format, at the place that is asked for; None if another format is asked for."""
    if asked.kind == "any":
        return own
    return asked if asked.at_start() == own else None


def rounding_of(node: Node, tail: Sequence[object]) -> Rounding | None:
    """Return the only function of a node's results, if it is a rounding to bytes."""
    if len(tail) != 1 or not isinstance(tail[0], FakeQuantize) or "dst" not in node.grids:
        return None
    return Rounding(tail[0].scale, tail[0].low, tail[0].high, node.grids["dst"].zero)
