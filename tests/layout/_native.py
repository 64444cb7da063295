"""oneDNN's own descriptor functions and reorder, called directly: the second opinion on the layout algebra.

On purpose not through ``fmtprop.dnnl``, which itself leans on the algebra that is judged here. Only the library's
file is taken from there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fmtprop.errors import LoadError
from fmtprop.layout import MemoryDesc

_LINES = [
    line.split()
    for line in (Path(__file__).parent / "data" / "onednn_tags.txt").read_text().splitlines()
    if not line.startswith("#")
]
TAGS = {line[0]: number for number, line in enumerate((x for x in _LINES if len(x) == 1), start=2)}
"""Every abstract tag of the enum and its value."""
ALIASES = {line[0]: line[1] for line in _LINES if len(line) == 2}
"""Every domain alias of the enum and its abstract tag."""

DATA_TYPES = {"f16": 1, "bf16": 2, "f32": 3, "s32": 4, "s8": 5, "u8": 6, "f64": 7}
UNIMPLEMENTED = 3
_DIMS = c_int64 * 12


@cache
def library() -> ctypes.CDLL:
    """Load the library, or skip the test where there is none."""
    from fmtprop.dnnl.library import lib

    try:
        cdll = ctypes.CDLL(lib().path)
    except LoadError as error:
        pytest.skip(f"no oneDNN here: {error}")
    cdll.dnnl_memory_desc_get_size.restype = c_size_t
    return cdll


def _desc(function: str, *arguments: Any) -> Native | int:
    handle = c_void_p()
    status = getattr(library(), f"dnnl_memory_desc_{function}")(byref(handle), *arguments)
    return status if status else Native(handle)


def by_strides(dims: Sequence[int], dtype: str, strides: Sequence[int]) -> Native | int:
    return _desc("create_with_strides", len(dims), _DIMS(*dims), DATA_TYPES[dtype], _DIMS(*strides))


def by_enum(dims: Sequence[int], dtype: str, tag: str) -> Native | int:
    """Create from an abstract tag of the enum ``dnnl_format_tag_t``."""
    return _desc("create_with_tag", len(dims), _DIMS(*dims), DATA_TYPES[dtype], TAGS[tag])


def by_string(dims: Sequence[int], dtype: str, tag: str) -> Native | int:
    """Create from any abstract tag, named in the enum or not (exported for benchdnn)."""
    return _desc("create_with_string_tag", len(dims), _DIMS(*dims), DATA_TYPES[dtype], tag.encode())


class Native:
    """Owner of one ``dnnl_memory_desc_t``; each method returns a Native, or the status of a refusal."""

    def __init__(self, handle: c_void_p) -> None:
        self.handle = handle

    def __del__(self) -> None:
        library().dnnl_memory_desc_destroy(self.handle)

    def permute_axes(self, permutation: Sequence[int]) -> Native | int:
        return _desc("permute_axes", self.handle, (c_int * len(permutation))(*permutation))

    def reshape(self, dims: Sequence[int]) -> Native | int:
        return _desc("reshape", self.handle, len(dims), _DIMS(*dims))

    def submemory(self, dims: Sequence[int], offsets: Sequence[int]) -> Native | int:
        return _desc("create_submemory", self.handle, _DIMS(*dims), _DIMS(*offsets))

    def equals(self, other: Native) -> bool:
        return bool(library().dnnl_memory_desc_equal(self.handle, other.handle))

    def _array(self, what: int, length: int) -> tuple[int, ...]:
        pointer = c_void_p()
        assert library().dnnl_memory_desc_query(self.handle, what, byref(pointer)) == 0
        return tuple((c_int64 * length).from_address(pointer.value or 0)) if length else ()

    def _number(self, what: int, kind: Any = ctypes.c_int32) -> int:
        value = kind()
        assert library().dnnl_memory_desc_query(self.handle, what, byref(value)) == 0
        return int(value.value)

    def fields(self) -> dict[str, Any]:
        ndim, blocks = self._number(256), self._number(263)
        return {
            "dims": self._array(257, ndim),
            "strides": self._array(14, ndim),
            "inner_blocks": tuple(zip(self._array(265, blocks), self._array(264, blocks), strict=True)),
            "padded_dims": self._array(260, ndim),
            "padded_offsets": self._array(261, ndim),
            "offset0": self._number(259, c_int64),
            "nbytes": int(library().dnnl_memory_desc_get_size(self.handle)),
        }


def of(md: MemoryDesc) -> Native:
    """Create the native twin of a descriptor that a tag or plain strides express."""
    made = by_strides(md.dims, str(md.dtype), md.strides) if md.is_plain else by_string(md.dims, str(md.dtype), md.tag)
    assert isinstance(made, Native), f"oneDNN refuses {md}: status {made}"
    return made


class Reorder:
    """oneDNN's reorder on the CPU engine."""

    def __init__(self) -> None:
        self.engine, self.stream = c_void_p(), c_void_p()
        assert library().dnnl_engine_create(byref(self.engine), 1, c_size_t(0)) == 0
        assert library().dnnl_stream_create(byref(self.stream), self.engine, 1) == 0

    def close(self) -> None:
        library().dnnl_stream_destroy(self.stream)
        library().dnnl_engine_destroy(self.engine)

    def __call__(self, buffer: npt.NDArray[Any], src: MemoryDesc, dst: MemoryDesc) -> npt.NDArray[Any] | None:
        """Return the reordered buffer, or None where oneDNN has no such reorder."""
        natives, pd, primitive = (of(src), of(dst)), c_void_p(), c_void_p()
        status = library().dnnl_reorder_primitive_desc_create(
            byref(pd), natives[0].handle, self.engine, natives[1].handle, self.engine, None
        )
        if status == UNIMPLEMENTED:
            return None
        assert status == 0, f"reorder {src} -> {dst}: status {status}"
        assert library().dnnl_primitive_create(byref(primitive), pd) == 0
        out = np.zeros(dst.nbytes // dst.dtype.nbytes, dst.dtype.numpy_dtype)
        memories = [self._memory(native, array) for native, array in zip(natives, (buffer, out), strict=True)]
        arguments = (_Argument * 2)(_Argument(1, memories[0]), _Argument(17, memories[1]))
        assert library().dnnl_primitive_execute(primitive, self.stream, 2, arguments) == 0
        assert library().dnnl_stream_wait(self.stream) == 0
        for memory in memories:
            library().dnnl_memory_destroy(memory)
        library().dnnl_primitive_destroy(primitive)
        library().dnnl_primitive_desc_destroy(pd)
        return out

    def _memory(self, native: Native, array: npt.NDArray[Any]) -> c_void_p:
        memory = c_void_p()
        status = library().dnnl_memory_create(byref(memory), native.handle, self.engine, c_void_p(array.ctypes.data))
        assert status == 0
        return memory


class _Argument(ctypes.Structure):
    _fields_ = (("arg", c_int), ("memory", c_void_p))
