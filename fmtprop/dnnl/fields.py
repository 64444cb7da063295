"""The queryable fields of a native memory descriptor."""

from __future__ import annotations

from ctypes import POINTER, byref, c_int, c_int64
from dataclasses import dataclass

from fmtprop.dnnl import _abi
from fmtprop.dnnl.enums import FORMAT_KIND, QUERY
from fmtprop.dnnl.library import lib, raise_status

BLOCKED = FORMAT_KIND["blocked"]
ANY = FORMAT_KIND["format_kind_any"]


@dataclass(frozen=True)
class Fields:
    """The queryable fields of a native descriptor, as oneDNN stores them."""

    #: `dims`, `padded_dims`, `padded_offsets`, `strides`: the last three are empty unless the format kind is blocked.
    #: Strides are in elements, between blocks.
    dims: tuple[int, ...]
    data_type: int
    format_kind: int
    padded_dims: tuple[int, ...] = ()
    padded_offsets: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    #: (axis, size), outermost first
    inner_blocks: tuple[tuple[int, int], ...] = ()
    #: elements before the first one
    offset0: int = 0


def query_fields(pointer: _abi.dnnl_memory_desc_t) -> Fields:
    """Return the fields of a native descriptor."""
    ndims = _query_int(pointer, "query_ndims_s32")
    dims = _query_array(pointer, "query_dims", ndims)
    data_type = _query_int(pointer, "query_data_type")
    format_kind = _query_int(pointer, "query_format_kind")
    if format_kind != BLOCKED:
        return Fields(dims, data_type, format_kind)
    nblks = _query_int(pointer, "query_inner_nblks_s32")
    sizes = _query_array(pointer, "query_inner_blks", nblks)
    axes = _query_array(pointer, "query_inner_idxs", nblks)
    offset0 = c_int64()
    _query(pointer, "query_submemory_offset_s64", offset0)
    return Fields(
        dims,
        data_type,
        format_kind,
        _query_array(pointer, "query_padded_dims", ndims),
        _query_array(pointer, "query_padded_offsets", ndims),
        _query_array(pointer, "query_strides", ndims),
        tuple(zip(axes, sizes, strict=True)),
        offset0.value,
    )


def query_ndims(pointer: _abi.dnnl_memory_desc_t) -> int:
    """Return the number of dimensions; 0 for the zero descriptor."""
    return _query_int(pointer, "query_ndims_s32")


def query_strides(pointer: _abi.dnnl_memory_desc_t) -> tuple[int, ...]:
    """Return the strides of a native descriptor; empty unless its format kind is blocked."""
    result = POINTER(c_int64)()
    if lib().memory_desc_query(pointer, QUERY["query_strides"], byref(result)):  # it has none
        return ()
    return tuple(result[: query_ndims(pointer)])


def _query(pointer: _abi.dnnl_memory_desc_t, what: str, result: object) -> None:
    raise_status("dnnl_memory_desc_query", lib().memory_desc_query(pointer, QUERY[what], byref(result)), what)  # type: ignore[arg-type]


def _query_int(pointer: _abi.dnnl_memory_desc_t, what: str) -> int:
    result = c_int()
    _query(pointer, what, result)
    return result.value


def _query_array(pointer: _abi.dnnl_memory_desc_t, what: str, count: int) -> tuple[int, ...]:
    # The result points into the descriptor: copied at once.
    if count == 0:
        return ()
    result = POINTER(c_int64)()
    _query(pointer, what, result)
    return tuple(result[:count])
