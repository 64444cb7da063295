"""Native memory descriptors and their conversion from and to `fmtprop.layout.MemoryDesc`.

A native descriptor has more than its queryable fields: integer weights may carry a hidden compensation (``extra``). So
the native handle is kept and equality is oneDNN's. If the fields cannot rebuild a descriptor, it becomes an *opaque*
MemoryDesc with a token that leads back to the handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int
from functools import lru_cache
from itertools import count

from fmtprop.dnnl import _abi
from fmtprop.dnnl.build import create
from fmtprop.dnnl.enums import data_type_name
from fmtprop.dnnl.fields import ANY, BLOCKED, Fields, query_fields, query_ndims, query_strides
from fmtprop.dnnl.handle import Handle
from fmtprop.dnnl.library import lib, raise_status
from fmtprop.dnnl.sizes import int64_array
from fmtprop.errors import DnnlError, FormatError, ShapeError, UnsupportedOpError
from fmtprop.layout import DataType, FormatKind, InnerBlock, MemoryDesc
from fmtprop.layout.geometry import INT64_MAX

# Opaque MemoryDesc <-> native descriptor. Kept for the life of the process: a MemoryDesc is a plain value, so the last
# use of its token is unknown. There is one entry per distinct opaque layout, thus few.
_OPAQUE_NATIVE: dict[MemoryDesc, NativeDesc] = {}
_OPAQUE_DESC: dict[NativeDesc, MemoryDesc] = {}
_OPAQUE_NUMBERS = count()

# Size in bytes, strides -> descriptors that primitives returned: comparing is twenty times cheaper than describing.
_KNOWN: dict[tuple[int, tuple[int, ...]], list[NativeDesc]] = {}
_BUCKET_MOST_DESCS = 64


class NativeDesc(Handle[_abi.dnnl_memory_desc_t]):
    """Owner of a ``dnnl_memory_desc_t``.

    Immutable; make one with `from_desc`, or take it from a primitive descriptor's ``query_md``.

    ``==`` asks ``dnnl_memory_desc_equal``; the hash agrees with it. Strides of size-1 dimensions do not matter.

    >>> from fmtprop import dnnl
    >>> from fmtprop.layout import MemoryDesc
    >>> native = dnnl.NativeDesc.from_desc(MemoryDesc((2, 17, 5, 7), "f32", tag="aBcd16b"))
    >>> native.nbytes
    8960
    >>> native.desc.padded_dims
    (2, 32, 5, 7)
    """

    handle_kind = "memory_desc"
    __slots__ = ("_desc", "_fields", "_nbytes")

    def __init__(self, pointer: _abi.dnnl_memory_desc_t) -> None:
        super().__init__(pointer, lib().memory_desc_destroy)
        self._desc: MemoryDesc | None = None
        self._fields: Fields | None = None
        self._nbytes: int | None = None

    @classmethod
    def from_desc(cls, desc: MemoryDesc) -> NativeDesc:
        """Return the native descriptor of a MemoryDesc; equal descs share one descriptor.

        Raises ShapeError if a size does not fit in 64 bits; FormatError if oneDNN's API cannot create this layout, or
        an opaque desc comes from another process; UnsupportedOpError if the loaded oneDNN does not support the data
        type.
        """
        if desc.kind is FormatKind.OPAQUE:
            return _opaque_native(desc)
        strides = desc.strides if desc.kind is FormatKind.BLOCKED else ()
        native = _from_fields(desc, strides)
        if native.closed:
            _from_fields.cache_clear()
            native = _from_fields(desc, strides)
        return native

    @property
    def desc(self) -> MemoryDesc:
        """The MemoryDesc with these fields, or an opaque one if the fields are not the whole descriptor."""
        if self._desc is None:
            self._desc = _describe(self)
        return self._desc

    def as_workspace(self, writer: str) -> MemoryDesc:
        """Return the workspace with this descriptor, one byte of an opaque format that only its `writer` shares."""
        desc = MemoryDesc.opaque((1,), "u8", self.nbytes, f"workspace of {writer}: {self}")
        if desc not in _OPAQUE_NATIVE:
            _OPAQUE_NATIVE[desc] = self.clone()
        return desc

    @property
    def nbytes(self) -> int:
        """Bytes of storage from the buffer's start; for a submemory up to the end of the region.

        Raises UnsupportedOpError if the loaded oneDNN is too old for the data type.
        """
        if self._nbytes is None:
            # oneDNN answers 0 for a submemory.
            region = _from_blocked(self.fields) if self.fields.offset0 else None
            nbytes = region.nbytes if region is not None else lib().memory_desc_get_size(self.handle)
            # Old versions create descriptors of newer versions' data types, with elements of -1 bytes.
            if nbytes > INT64_MAX:
                raise UnsupportedOpError(_lacks(str(self), self.data_type))
            self._nbytes = nbytes
        return self._nbytes

    @property
    def fields(self) -> Fields:
        """The queryable fields."""
        if self._fields is None:
            self._fields = query_fields(self.handle)
        return self._fields

    @property
    def dims(self) -> tuple[int, ...]:
        """Logical dimensions."""
        return self.fields.dims

    @property
    def data_type(self) -> str:
        """Name of the data type, such as ``"f32"``."""
        return data_type_name(self.fields.data_type)

    @property
    def is_any(self) -> bool:
        """Whether a primitive is to choose the format."""
        return self.fields.format_kind == ANY

    def clone(self) -> NativeDesc:
        """Return another owner of an equal descriptor."""
        return _clone(self.handle)

    def permute_axes(self, permutation: Sequence[int]) -> NativeDesc:
        """Return the desc with axis ``i`` moved to position ``permutation[i]``; the data stays in place.

        Raises DnnlError if oneDNN refuses.
        """
        if sorted(permutation) != list(range(len(self.dims))):
            raise ShapeError(f"permute_axes of {self}: {list(permutation)} is not a permutation of its axes")
        out = _abi.dnnl_memory_desc_t()
        array = (c_int * len(permutation))(*permutation)
        status = lib().memory_desc_permute_axes(byref(out), self.handle, array)
        raise_status("dnnl_memory_desc_permute_axes", status, f"{self}, permutation {list(permutation)}")
        return NativeDesc(out)

    def reshape(self, dims: Sequence[int]) -> NativeDesc:
        """Return the desc of the same data with other dimensions.

        `dims`: same number of elements. Raises DnnlError if the layout does not permit the new dimensions without
        moving data.
        """
        out = _abi.dnnl_memory_desc_t()
        status = lib().memory_desc_reshape(byref(out), self.handle, len(dims), int64_array(dims, "dims"))
        raise_status("dnnl_memory_desc_reshape", status, f"{self} to dims {list(dims)}")
        return NativeDesc(out)

    def submemory(self, dims: Sequence[int], offsets: Sequence[int]) -> NativeDesc:
        """Return the desc of a region of this one.

        `dims`, `offsets`: extent and start of the region, per axis. Raises DnnlError if the region is out of bounds or
        cuts a block.
        """
        if not len(dims) == len(offsets) == len(self.dims):
            raise ShapeError(
                f"submemory of {self}: dims {list(dims)} and offsets {list(offsets)} need one entry per axis"
            )
        out = _abi.dnnl_memory_desc_t()
        arrays = int64_array(dims, "dims"), int64_array(offsets, "offsets")
        status = lib().memory_desc_create_submemory(byref(out), self.handle, *arrays)
        details = f"{self}, region dims {list(dims)} at {list(offsets)}; offsets must be multiples of the blocks"
        raise_status("dnnl_memory_desc_create_submemory", status, details)
        return NativeDesc(out)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NativeDesc):
            return NotImplemented
        return self is other or bool(lib().memory_desc_equal(self.handle, other.handle))

    def __hash__(self) -> int:
        fields = self.fields
        return hash((fields.dims, fields.data_type, fields.format_kind, fields.inner_blocks, fields.offset0))

    def __str__(self) -> str:
        dims = "x".join(map(str, self.dims))
        return f"{self.data_type} {dims} {layout_name(self)}"

    def __repr__(self) -> str:
        return "NativeDesc(closed)" if self.closed else f"NativeDesc({self})"


def layout_name(native: NativeDesc) -> str:
    """Return the format as benchdnn writes it: a tag, ``any``, strides such as ``8x1``, or ``opaque``."""
    fields = native.fields
    if fields.format_kind == ANY:
        return "any"
    if fields.format_kind != BLOCKED:
        return "opaque"
    blocked = _from_blocked(fields)
    # A tag does not express hidden compensation: append a mark.
    extra = "+extra" if native.desc.kind is FormatKind.OPAQUE else ""
    if blocked is not None and blocked.tag is not None:
        return blocked.tag + extra
    if not fields.inner_blocks:
        return "x".join(map(str, fields.strides)) + extra
    blocks = "".join(f"{size}{chr(ord('a') + axis)}" for axis, size in fields.inner_blocks)
    return f"strided[{'x'.join(map(str, fields.strides))}:{blocks}]{extra}"


def _clone(pointer: _abi.dnnl_memory_desc_t) -> NativeDesc:
    out = _abi.dnnl_memory_desc_t()
    raise_status("dnnl_memory_desc_clone", lib().memory_desc_clone(byref(out), pointer))
    return NativeDesc(out)


def adopt_const(pointer: _abi.dnnl_memory_desc_t | None) -> NativeDesc | None:
    """Return an owned copy of a descriptor that oneDNN owns; None for the zero descriptor.

    Planning meets the same few descriptors thousands of times, so equal ones share an owner, if the strides of their
    axes of size 1 are the same, too: kernels choose by them.

    `pointer`: borrowed pointer, as ``dnnl_primitive_desc_query_md`` returns it.
    """
    if not pointer:
        return None
    library = lib()
    bucket = _KNOWN.setdefault((library.memory_desc_get_size(pointer), query_strides(pointer)), [])
    for known in bucket:
        if not known.closed and library.memory_desc_equal(known.handle, pointer):
            return known
    if query_ndims(pointer) == 0:
        return None
    if len(bucket) >= _BUCKET_MOST_DESCS:
        bucket.clear()
    native = _clone(pointer)
    bucket.append(native)
    return native


@lru_cache(maxsize=8192)
def _from_fields(desc: MemoryDesc, _: tuple[int, ...]) -> NativeDesc:
    """Return the native descriptor of a format: equal ones with other strides of axes of size 1 have their own."""
    if desc.kind is FormatKind.BLOCKED and not desc.is_regular:
        raise FormatError(
            f"desc {desc}: oneDNN cannot create strides {desc.strides} with dims {desc.dims}: each must step over all "
            "elements of every faster dimension, the gaps between them included; reorder it to a dense format first"
        )
    try:
        return NativeDesc(create(desc))
    except DnnlError as error:
        if error.status != "invalid_arguments":
            raise
        if not _takes(desc.dtype):
            raise UnsupportedOpError(_lacks(f"desc {desc}", desc.dtype)) from error
        raise FormatError(f"desc {desc}: oneDNN's API cannot create this layout; reorder it first") from error


def _takes(dtype: DataType) -> bool:
    """Return whether oneDNN supports a data type: whether it creates a descriptor of format ``any``."""
    try:
        NativeDesc(create(MemoryDesc.any((1,), dtype))).close()
    except DnnlError:
        return False
    return True


def _lacks(what: str, dtype: object) -> str:
    library = lib()
    version = ".".join(map(str, library.version))
    return (
        f"{what}: oneDNN {version} ({library.path}) does not take data type {dtype} here; "
        "convert the tensor, or load a newer oneDNN (see `fmtprop doctor`)"
    )


def _opaque_native(desc: MemoryDesc) -> NativeDesc:
    native = _OPAQUE_NATIVE.get(desc)
    if native is None:
        raise FormatError(
            f"opaque desc {desc} does not come from this process's oneDNN: opaque formats cannot be carried over; "
            "ask a primitive for `any` again"
        )
    return native


def _describe(native: NativeDesc) -> MemoryDesc:
    fields = native.fields
    name = data_type_name(fields.data_type)
    if fields.format_kind == ANY:
        return MemoryDesc.any(fields.dims, name)
    if fields.format_kind == BLOCKED:
        desc = _from_blocked(fields)
        if desc is not None and _rebuilds(desc, native):
            return desc
    return _opaque_desc(native)


@lru_cache(maxsize=8192)
def _from_blocked(fields: Fields) -> MemoryDesc | None:
    """Return the desc with these fields; None if the layout algebra refuses them."""
    try:
        return MemoryDesc.view(
            fields.dims,
            data_type_name(fields.data_type),
            strides=fields.strides,
            inner_blocks=tuple(InnerBlock(axis, size) for axis, size in fields.inner_blocks),
            padded_dims=fields.padded_dims,
            padded_offsets=fields.padded_offsets,
            offset0=fields.offset0,
        )
    except (FormatError, ShapeError):
        return None


def _rebuilds(desc: MemoryDesc, native: NativeDesc) -> bool:
    """Return whether the fields are the whole descriptor: with hidden compensation, the rebuilt one differs."""
    try:
        return NativeDesc.from_desc(desc) == native
    except (FormatError, ShapeError, UnsupportedOpError, DnnlError):
        return False


def _opaque_desc(native: NativeDesc) -> MemoryDesc:
    # `setdefault` is atomic: two threads that meet a new layout at once agree on one token.
    kept = native.clone()
    fresh = MemoryDesc.opaque(native.dims, native.data_type, native.nbytes, f"dnnl:{next(_OPAQUE_NUMBERS)}")
    desc = _OPAQUE_DESC.setdefault(kept, fresh)
    if desc is fresh:
        _OPAQUE_NATIVE[fresh] = kept
    return desc
