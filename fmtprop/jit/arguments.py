"""Arguments of kernels' code: what a program reads of memory, by name, and the OpenMP functions that it calls.

A kernel fills them and its program reads them; neither needs the other for it, and no assembler is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

from fmtprop.dnnl import lib

#: threads share a row in pieces of this size; a row is a multiple of it
CHUNK_NBYTES = 64

#: vectors per turn of a loop
UNROLLED = 4

#: vectors of queries of a block of attention
VECTORS = 2

#: numbers of the widest vector, as an argument
FloatVector = c_float * 16
BitVector = c_uint32 * 16


def filled(number: float) -> ctypes.Array[c_float]:
    """Return a vector of one number, as an argument."""
    return FloatVector(*[number] * 16)


class Arguments(ctypes.Structure):
    """Arguments of a kernel's code; each program adds its own fields."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("threads", c_void_p), ("thread", c_void_p))

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.threads, self.thread = address_of("omp_get_num_threads"), address_of("omp_get_thread_num")


class FunctionArguments(Arguments):
    """Arguments of the code of an element-wise function."""

    _fields_ = (("data", c_void_p), ("chunks", c_uint64), ("table", c_void_p))


class EltwiseArguments(Arguments):
    """Arguments of the code of an element-wise function of another tensor."""

    _fields_ = (("src", c_void_p), ("dst", c_void_p), ("chunks", c_uint64), ("table", c_void_p))


class BroadcastArguments(Arguments):
    """Arguments of the code of a broadcast."""

    _fields_ = (
        *((name, c_void_p) for name in ("src_0", "src_1", "dst", "table")),
        *((name, c_uint64) for name in ("rows", "row", "pitch", "gap", "blocks", "vectors", "rest")),
    )


class FoldArguments(Arguments):
    """Arguments of the code of a fold."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "dst")),
        *((name, c_uint64) for name in ("tasks", "groups", "group", "last", "row", "image", "count")),
        *((name, c_uint64) for name in ("blocks", "vectors", "rest")),
        *(("start", FloatVector), ("divisor", FloatVector), ("magnitude", BitVector)),
    )


class AverageArguments(Arguments):
    """Arguments of the code of an average."""

    _fields_ = (
        *((name, c_void_p) for name in ("barrier", "src", "dst", "sums")),
        *((name, c_uint64) for name in ("images", "image", "places", "row", "groups", "vectors", "thread_sums")),
        ("divisor", FloatVector),
    )


#: arguments of a code that checks its indices
GATHERED = (
    *((name, c_void_p) for name in ("src_0", "src_1", "dst")),
    *((name, c_uint64) for name in ("count", "limit", "below", "reach", "row", "pitch")),
)


class GatherArguments(Arguments):
    """Arguments of the code."""

    _fields_ = GATHERED


class BagArguments(Arguments):
    """Arguments of the code."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "indices", "offsets", "factors", "dst")),
        *((name, c_uint64) for name in ("bags", "starts", "count", "below", "reach", "padding", "pitch", "row")),
    )


class AttentionArguments(Arguments):
    """Arguments of the code of attention."""

    _fields_ = (
        *((name, c_void_p) for name in ("src", "key", "value", "mask_0", "mask_1", "dst", "offsets", "numbers")),
        *((name, c_uint64) for name in ("tasks", "blocks", "block", "queries", "keys", "limit", "entry", "mask_block")),
        *((name, c_uint64) for name in ("src_row", "key_row", "dst_row")),
        *((name, c_float) for name in ("scale", "start", "lowest")),
        *((name, FloatVector) for name in ("ones", "zeros", "infinity")),
        ("places", c_float * (VECTORS * 16)),
    )


def address_of(name: str) -> int | None:
    """Return the address of a function of the OpenMP runtime."""
    return ctypes.cast(runtime_function(name), c_void_p).value


@cache
def runtime_function(name: str) -> Any:
    """Return a function of the OpenMP runtime, or None if it has none of this name."""
    function = lib().runtime_function(name)
    if function is not None:
        function.restype = None  # and no argtypes: the conversion would take longer than the call
    return function
