"""The base of a memory descriptor: its fields, identity and text.

Owns the fields of :class:`~fmtprop.layout.MemoryDesc`, the properties that follow from them, equality, hashing and
printing. The module ``positions`` adds positions of elements, ``desc`` the constructor and transforms. Must not know
about numpy buffers, oneDNN handles or graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from html import escape
from math import prod
from typing import Any, NoReturn, TypeVar

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import geometry
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.geometry import Geometry
from fmtprop.layout.tags import InnerBlock

D = TypeVar("D", bound="DescBase")


class FormatKind(str, Enum):
    """How much a descriptor says about the format."""

    ANY = "any"
    """The primitive chooses the format (SPEC M7)."""
    BLOCKED = "blocked"
    """Strides and inner blocks; plain where there are none."""
    OPAQUE = "opaque"
    """Only its creator knows the format."""

    def __str__(self) -> str:
        return self.value


class DescBase:
    """Fields, identity and text of a memory descriptor; see :class:`~fmtprop.layout.MemoryDesc`."""

    __slots__ = ("_geometry", "_hash", "_key", "_opaque", "_tag", "dims", "dtype", "kind", "nbytes")

    dims: tuple[int, ...]
    """Logical sizes."""
    dtype: DataType
    """Type of the elements."""
    kind: FormatKind
    """Whether the format is known, left to the primitive, or opaque."""
    nbytes: int
    """Bytes of storage, counted from the buffer's start: ``dnnl_memory_desc_get_size``. Where oneDNN's answer is too
    small (0 for a submemory, too little for a full broadcast), they end after the last position in use."""

    _geometry: Geometry | None
    _opaque: Hashable
    _tag: str | None
    _key: tuple[object, ...]
    _hash: int

    def _fill(
        self,
        dims: tuple[int, ...],
        dtype: object,
        kind: FormatKind,
        g: Geometry | None,
        nbytes: int = 0,
        opaque: Hashable = None,
        elements: int | None = None,
    ) -> None:
        put = object.__setattr__
        data_type = dtype if isinstance(dtype, DataType) else DataType.from_any(dtype)
        if g is not None:
            nbytes = geometry.storage_bytes(g, data_type.nbytes, elements)
        put(self, "dims", dims)
        put(self, "dtype", data_type)
        put(self, "kind", kind)
        put(self, "nbytes", nbytes)
        put(self, "_geometry", g)
        put(self, "_opaque", opaque)

    @classmethod
    def _of(cls: type[D], g: Geometry, dtype: DataType) -> D:
        """Wrap a geometry that is known to be sound."""
        md = cls.__new__(cls)
        md._fill(g.dims, dtype, FormatKind.BLOCKED, g)
        return md

    @classmethod
    def any(cls: type[D], dims: Iterable[int], dtype: object = DataType.F32) -> D:
        """Return a descriptor that leaves the choice of format to the primitive (SPEC M7).

        Parameters
        ----------
        dims : iterable of int
            Logical sizes.
        dtype : DataType or anything that ``DataType.from_any`` takes
            Type of the elements.
        """
        md = cls.__new__(cls)
        md._fill(geometry.check_dims(dims), dtype, FormatKind.ANY, None)
        return md

    @classmethod
    def opaque(cls: type[D], dims: Iterable[int], dtype: object, nbytes: int, token: Hashable) -> D:
        """Return a descriptor of a format that only its creator understands.

        Parameters
        ----------
        dims : iterable of int
            Logical sizes.
        dtype : DataType or anything that ``DataType.from_any`` takes
            Type of the elements.
        nbytes : int
            Bytes of storage.
        token : hashable
            The creator's identity of the format; opaque descriptors are equal if their tokens, dims, data types and
            sizes are equal.

        Raises
        ------
        ShapeError
            The size is negative.
        """
        if nbytes < 0:
            raise ShapeError(f"nbytes is {nbytes}; an opaque format cannot have a negative size")
        md = cls.__new__(cls)
        md._fill(geometry.check_dims(dims), dtype, FormatKind.OPAQUE, None, nbytes, token)
        return md

    @classmethod
    def view(
        cls: type[D],
        dims: Iterable[int],
        dtype: object = DataType.F32,
        *,
        strides: Iterable[int],
        inner_blocks: Iterable[tuple[int, int]] = (),
        padded_dims: Iterable[int] | None = None,
        padded_offsets: Iterable[int] | None = None,
        offset0: int = 0,
    ) -> D:
        """Return a descriptor as the constructor does, but accept every view of a regular layout.

        A slice with a step can break the rule of SPEC M3 although no elements overlap: every second of 3 elements
        gives size 2 and stride 2 in rows of 3 elements. oneDNN refuses such strides (see ``is_regular``).

        Parameters
        ----------
        dims : iterable of int
            Logical sizes.
        dtype : DataType or anything that ``DataType.from_any`` takes
            Type of the elements.
        strides, inner_blocks, padded_dims, padded_offsets, offset0
            As for the class.

        Raises
        ------
        ShapeError
            The arguments do not fit each other, or elements overlap.
        """
        g = geometry.make(geometry.check_dims(dims), strides, inner_blocks, padded_dims, padded_offsets, offset0)
        geometry.check(g, regular=False)
        return cls._of(g, DataType.from_any(dtype))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"MemoryDesc is immutable: {name} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"MemoryDesc is immutable: {name} cannot be deleted")

    # ---- fields

    @property
    def geometry(self) -> Geometry:
        """The numbers of a blocked or plain format; FormatError for the kinds any and opaque."""
        if self._geometry is None:
            remedy = (
                "ask a primitive descriptor for its choice" if self.kind is FormatKind.ANY else "reorder to blocked"
            )
            raise FormatError(f"{self}: format {self.kind} has no strides or blocks; {remedy} first")
        return self._geometry

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis; between neighbouring outer blocks if the axis is blocked."""
        return self.geometry.strides

    @property
    def inner_blocks(self) -> tuple[InnerBlock, ...]:
        """Inner blocks, outermost first."""
        return self.geometry.inner_blocks

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Sizes including padding (`dims` itself for the kinds any and opaque)."""
        return self.dims if self._geometry is None else self._geometry.padded_dims

    @property
    def padded_offsets(self) -> tuple[int, ...]:
        """Index in the padded tensor of logical index 0, per axis."""
        return (0,) * len(self.dims) if self._geometry is None else self._geometry.padded_offsets

    @property
    def offset0(self) -> int:
        """Position of the first element; non-zero only for a submemory (SPEC M4)."""
        return 0 if self._geometry is None else self._geometry.offset0

    @property
    def token(self) -> Hashable:
        """The creator's identity of an opaque format; None for the other kinds."""
        return self._opaque

    @property
    def tag(self) -> str | None:
        """The abstract tag of the format (``"any"`` for the kind any), or None where no tag expresses it.

        Dimensions of size 1 can stand anywhere; they are named in logical order.
        """
        try:
            return self._tag
        except AttributeError:
            pass
        if self._geometry is None:
            tag = "any" if self.kind is FormatKind.ANY else None
        else:
            tag = geometry.find_tag(self._geometry)
        object.__setattr__(self, "_tag", tag)
        return tag

    # ---- properties of the format

    @property
    def nelems(self) -> int:
        """Number of logical elements."""
        return prod(self.dims)

    @property
    def is_plain(self) -> bool:
        """True for strides without inner blocks."""
        return self._geometry is not None and not self._geometry.inner_blocks

    @property
    def is_regular(self) -> bool:
        """True where the strides satisfy SPEC M3, so that oneDNN can create the descriptor."""
        return self._geometry is not None and geometry.is_regular(self._geometry)

    @property
    def is_workspace(self) -> bool:
        """True for the workspace of a primitive: bytes that only its gradient can read."""
        return self.kind is FormatKind.OPAQUE and self.dtype is DataType.U8

    @property
    def takes_any_bytes(self) -> bool:
        """False for opaque data, such as weights packed for a recurrent layer: their bytes have sizes and positions."""
        return self.kind is not FormatKind.OPAQUE or self.is_workspace

    @property
    def has_broadcast(self) -> bool:
        """True where an element is repeated (stride 0 along a dimension larger than 1)."""
        g = self._geometry
        return g is not None and any(s == 0 and n > 1 for s, n in zip(g.strides, g.outer_counts(), strict=True))

    @property
    def is_dense(self) -> bool:
        """True where the padded elements fill the storage: no gaps and no repetition (padding allowed)."""
        g = self._geometry
        if g is None or g.offset0 or self.has_broadcast:
            return False
        return prod(g.padded_dims) * self.dtype.nbytes == self.nbytes

    @property
    def is_packed(self) -> bool:
        """True where the logical elements fill the storage, each with a place of its own (SPEC D3)."""
        return self.is_dense and self.padded_dims == self.dims

    @property
    def padding_bytes(self) -> int:
        """Bytes of storage that hold no logical element: padding and gaps."""
        g = self.geometry
        stored = prod(d for d, s, n in zip(g.dims, g.strides, g.outer_counts(), strict=True) if s or n == 1)
        return self.nbytes - stored * self.dtype.nbytes if self.nbytes else 0

    @property
    def padding_percent(self) -> float:
        """Share of the storage that holds no logical element, in percent."""
        return 100.0 * self.padding_bytes / self.nbytes if self.nbytes else 0.0

    # ---- identity

    def _identity(self) -> tuple[object, ...]:
        try:
            return self._key
        except AttributeError:
            pass
        g = self._geometry
        if g is None:
            key: tuple[object, ...] = (self.dims, self.dtype, self.kind, self.nbytes, self._opaque)
        else:
            strides = tuple(0 if d == 1 == p else s for d, p, s in zip(g.dims, g.padded_dims, g.strides, strict=True))
            key = (self.dtype, g._replace(strides=strides))
        object.__setattr__(self, "_key", key)
        return key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DescBase):
            return NotImplemented
        try:
            if self._hash != other._hash:
                return False
        except AttributeError:  # not asked for yet
            pass
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            pass
        value = hash(self._identity())
        object.__setattr__(self, "_hash", value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.dims, self.dtype, self.kind, self._geometry, self.nbytes, self._opaque)

    def __str__(self) -> str:
        """Return the short form ``f32[2,17,5,7]:aBcd16b``."""
        dims = ",".join(map(str, self.dims))
        return f"{self.dtype}[{dims}]:{self._layout_text()}"

    def _repr_html_(self) -> str:
        """Return a table for a notebook; :func:`fmtprop.pictures.draw_svg` draws a small one."""
        facts = {"tensor": str(self), "bytes": f"{self.nbytes:,}"}
        if (g := self._geometry) is not None:
            facts["strides"] = " x ".join(map(str, g.strides))
            facts["blocks"] = " ".join(f"{block.size} of axis {block.axis}" for block in g.inner_blocks) or "none"
            facts["padded to"] = " x ".join(map(str, g.padded_dims))
        rows = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in facts.items())
        return f"<table>{''.join(rows)}</table>"

    def _layout_text(self) -> str:
        if self._geometry is None:
            return str(self.kind)
        if self.tag is not None:
            return self.tag
        g = self._geometry
        text = "x".join(map(str, g.strides)) + "".join(f":{size}@{axis}" for axis, size in g.inner_blocks)
        if g.padded_dims != g.dims and not g.inner_blocks:
            text += "pad" + "x".join(map(str, g.padded_dims))
        return text + (f"+{g.offset0}" if g.offset0 else "")

    def __repr__(self) -> str:
        head = f"({self.dims!r}, '{self.dtype}'"
        g = self._geometry
        if self.kind is FormatKind.OPAQUE:
            return f"MemoryDesc.opaque{head}, {self.nbytes}, {self._opaque!r})"
        if g is None:
            return f"MemoryDesc.any{head})"
        if self.tag is not None:
            return f"MemoryDesc{head}, tag={self.tag!r})"
        extra = f", strides={g.strides}"
        if g.inner_blocks:
            extra += f", inner_blocks={tuple(map(tuple, g.inner_blocks))}"
        if g.padded_dims != g.dims or g.inner_blocks:
            extra += f", padded_dims={g.padded_dims}"
        if any(g.padded_offsets):
            extra += f", padded_offsets={g.padded_offsets}"
        if g.offset0:
            extra += f", offset0={g.offset0}"
        return f"MemoryDesc{'' if geometry.is_regular(g) else '.view'}{head}{extra})"


def _restore(
    cls: type[D],
    dims: tuple[int, ...],
    dtype: DataType,
    kind: FormatKind,
    g: Geometry | None,
    nbytes: int,
    opaque: Hashable,
) -> D:
    md = cls.__new__(cls)
    md._fill(dims, dtype, kind, g, nbytes, opaque)
    return md
