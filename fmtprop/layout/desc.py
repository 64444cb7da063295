"""The memory descriptor: one type for how a logical tensor lies in memory.

Owns :class:`MemoryDesc`, the centre of the layout room; the arithmetic is in ``geometry``, ``transforms`` and
``address``. Must not know about numpy buffers, oneDNN handles or graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from math import prod
from typing import Any, NoReturn

import numpy.typing as npt

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import address, geometry, transforms
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.geometry import Geometry
from fmtprop.layout.tags import InnerBlock, parse_tag


class FormatKind(str, Enum):
    """What a descriptor says about the format."""

    ANY = "any"
    """Nothing yet: the primitive chooses (SPEC M7)."""
    BLOCKED = "blocked"
    """Strides and inner blocks; plain where there are none."""
    OPAQUE = "opaque"
    """Known to its creator alone."""

    def __str__(self) -> str:
        return self.value


class MemoryDesc:
    """Logical description of a tensor in memory: dims, data type and format (SPEC M1). Immutable.

    Descriptors are equal where oneDNN's ``dnnl_memory_desc_equal`` says so: the stride of a dimension of
    size 1 is ignored.

    Parameters
    ----------
    dims : iterable of int
        Logical sizes, at most 12; ``()`` is a scalar.
    dtype : DataType or anything that ``DataType.from_any`` takes
    tag : str, optional
        Format tag: ``"acdb"``, ``"aBcd16b"``, ``"nhwc"``; ``"any"`` for the kind any.
    strides : iterable of int, optional
        Elements between neighbours along each axis, between *outer* blocks for blocked axes. 0 repeats
        (broadcast). With neither tag nor strides, the descriptor is dense and row-major.
    inner_blocks : iterable of (axis, size), optional
        Inner blocks, outermost first; with `strides`, or with neither for dense outer dimensions.
    padded_dims, padded_offsets : iterable of int, optional
        Sizes including padding, and where the tensor begins in them. Default: dims rounded up to whole
        blocks, and zeros.
    offset0 : int
        Position of the first element; non-zero for a submemory.

    Raises
    ------
    ShapeError
        Sizes, strides, blocks or padding do not fit each other; strides overlap (the message says which two
        dimensions, and why); the storage exceeds 64-bit sizes.
    FormatError
        `tag` is not a tag.

    Examples
    --------
    >>> md = MemoryDesc((2, 17, 5, 7), "f32", tag="nChw16c")
    >>> md.padded_dims, md.strides, md.nbytes
    ((2, 32, 5, 7), (1120, 560, 112, 16), 8960)
    >>> md.offset((0, 16, 0, 1)), md.index_at(576), md.index_at(577)
    (576, (0, 16, 0, 1), None)
    >>> MemoryDesc((2, 3), strides=(2, 1))
    Traceback (most recent call last):
    ...
    fmtprop.errors.ShapeError: strides (2, 1) with dims (2, 3): axis 0 (a) and axis 1 (b) overlap: \
axis 1 (b) has 3 elements 1 apart, so axis 0 (a) must step over at least 3 elements, not 2 (use stride 0 to broadcast)

    References
    ----------
    SPEC M1-M8; oneDNN developer guide, "Understanding Memory Formats".
    """

    __slots__ = ("_geometry", "_hash", "_key", "_opaque", "_tag", "dims", "dtype", "kind", "nbytes")

    dims: tuple[int, ...]
    """Logical sizes."""
    dtype: DataType
    """Type of the elements."""
    kind: FormatKind
    """What is known of the format."""
    nbytes: int
    """Bytes of storage, counted from the buffer's start: ``dnnl_memory_desc_get_size``. Where oneDNN gives no
    usable answer (0 for a submemory, too little for a full broadcast), up to the last position in use."""

    _geometry: Geometry | None
    _opaque: Hashable
    _tag: str | None
    _key: tuple[object, ...]
    _hash: int

    def __init__(
        self,
        dims: Iterable[int],
        dtype: object = DataType.F32,
        *,
        tag: str | None = None,
        strides: Iterable[int] | None = None,
        inner_blocks: Iterable[tuple[int, int]] = (),
        padded_dims: Iterable[int] | None = None,
        padded_offsets: Iterable[int] | None = None,
        offset0: int = 0,
    ) -> None:
        dims = geometry.check_dims(dims)
        if tag is not None:
            if strides is not None or inner_blocks or padded_dims is not None or padded_offsets is not None:
                raise ShapeError(f"give either tag={tag!r} or strides, inner_blocks and padding, not both")
            if tag == "any":
                if offset0:
                    raise ShapeError(f"format any has no offset0, but {offset0} was given")
                self._fill(dims, dtype, FormatKind.ANY, None)
                return
            g = geometry.from_tag(dims, parse_tag(tag), _offset0(offset0) if offset0 else 0)
            self._fill(dims, dtype, FormatKind.BLOCKED, g, elements=g.offset0 + prod(g.padded_dims))
            return
        g = _geometry_of(dims, strides, inner_blocks, padded_dims, padded_offsets, offset0)
        geometry.check(g, regular=True)
        self._fill(dims, dtype, FormatKind.BLOCKED, g)

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
    def _of(cls, g: Geometry, dtype: DataType) -> MemoryDesc:
        """Wrap a geometry that is known to be sound."""
        md = cls.__new__(cls)
        md._fill(g.dims, dtype, FormatKind.BLOCKED, g)
        return md

    @classmethod
    def any(cls, dims: Iterable[int], dtype: object = DataType.F32) -> MemoryDesc:
        """Return a descriptor whose format the primitive is to choose (SPEC M7)."""
        return cls(dims, dtype, tag="any")

    @classmethod
    def opaque(cls, dims: Iterable[int], dtype: object, nbytes: int, token: Hashable) -> MemoryDesc:
        """Return a descriptor of a format that only its creator understands.

        Parameters
        ----------
        dims, dtype
            As for the class.
        nbytes : int
            Bytes of storage.
        token : hashable
            The creator's identity of the format; opaque descriptors are equal where their tokens, dims, data
            types and sizes are.
        """
        if nbytes < 0:
            raise ShapeError(f"nbytes is {nbytes}; an opaque format cannot have a negative size")
        md = cls.__new__(cls)
        md._fill(geometry.check_dims(dims), dtype, FormatKind.OPAQUE, None, nbytes, token)
        return md

    @classmethod
    def view(
        cls,
        dims: Iterable[int],
        dtype: object = DataType.F32,
        *,
        strides: Iterable[int],
        inner_blocks: Iterable[tuple[int, int]] = (),
        padded_dims: Iterable[int] | None = None,
        padded_offsets: Iterable[int] | None = None,
        offset0: int = 0,
    ) -> MemoryDesc:
        """Return a descriptor like the class does, but accept every view of a regular layout.

        A slice with a step breaks the rule of SPEC M3 without overlapping: every second of 3 elements is 2
        elements 2 apart in a row of 3. oneDNN refuses such strides (see :attr:`is_regular`).
        """
        g = _geometry_of(geometry.check_dims(dims), strides, inner_blocks, padded_dims, padded_offsets, offset0)
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
            raise FormatError(
                f"{self}: format {self.kind} has no strides or blocks; "
                + (
                    "ask a primitive descriptor for its choice first"
                    if self.kind is FormatKind.ANY
                    else "reorder first"
                )
            )
        return self._geometry

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis; between outer blocks where the axis is blocked."""
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

    # ---- addresses

    def offset(self, index: Sequence[int]) -> int:
        """Return the position of a logical index, in elements from the buffer's start (SPEC M4).

        Raises
        ------
        ShapeError
            The index has another rank or is out of range.
        FormatError
            The kind is any or opaque.
        """
        return address.offset(self.geometry, tuple(index))

    def offsets(self, indices: npt.ArrayLike) -> address.IntArray:
        """Return the positions, shape (...), of many logical indices, shape (..., ndim)."""
        return address.offsets(self.geometry, indices)

    def index_at(self, position: int) -> tuple[int, ...] | None:
        """Return the logical index at `position`, or None where it is padding, a gap or outside.

        A repeated (broadcast) element answers with its first index.
        """
        return address.index_at(self.geometry, position)

    def indices_at(self, positions: npt.ArrayLike) -> address.IntArray:
        """Return the logical indices, shape (..., ndim), at many positions, shape (...); -1 for padding."""
        return address.indices_at(self.geometry, positions)

    def walk(self) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """Yield ``(position, logical index or None)`` in memory order, from `offset0` to the end of the storage."""
        for position in range(self.offset0, self.nbytes // self.dtype.nbytes):
            yield position, address.index_at(self.geometry, position)

    # ---- transforms

    def with_dtype(self, dtype: object) -> MemoryDesc:
        """Return the same layout for another data type."""
        data_type = DataType.from_any(dtype)
        if self.kind is FormatKind.ANY:
            return MemoryDesc.any(self.dims, data_type)
        return MemoryDesc._of(self.geometry, data_type)

    def permute_axes(self, permutation: Sequence[int]) -> MemoryDesc:
        """Return the descriptor of the tensor with its axes renumbered; no data moves.

        Parameters
        ----------
        permutation : sequence of int
            oneDNN's convention: ``permutation[i]`` is the *new* place of axis ``i``. (numpy's ``transpose`` takes
            the inverse; see :meth:`transpose`.)

        Raises
        ------
        ShapeError
            Not a permutation.
        FormatError
            The format is opaque.

        Examples
        --------
        >>> MemoryDesc((2, 3), tag="ab").permute_axes((1, 0))
        MemoryDesc((3, 2), 'f32', tag='ba')

        References
        ----------
        ``dnnl_memory_desc_permute_axes``; SPEC M8.
        """
        order = tuple(permutation)
        if self.kind is FormatKind.ANY:
            source = transforms.inverse_permutation(order, self.ndim)
            return MemoryDesc.any((self.dims[a] for a in source), self.dtype)
        return MemoryDesc._of(transforms.permute_axes(self.geometry, order), self.dtype)

    def transpose(self, axes: Sequence[int]) -> MemoryDesc:
        """Return the descriptor whose axis ``i`` is the present axis ``axes[i]`` (numpy's and torch's convention)."""
        return self.permute_axes(transforms.inverse_permutation(tuple(axes), self.ndim))

    def reshape(self, dims: Iterable[int]) -> MemoryDesc:
        """Return the descriptor of the same elements, in row-major logical order, under other dims.

        Raises
        ------
        ShapeError
            The numbers of elements differ.
        FormatError
            The format cannot express it: the joined or split axes are blocked, padded or not adjacent in memory.

        Examples
        --------
        >>> MemoryDesc((2, 32, 4, 4), tag="aBcd16b").reshape((2, 32, 16))
        MemoryDesc((2, 32, 16), 'f32', tag='aBc16b')

        References
        ----------
        ``dnnl_memory_desc_reshape``; SPEC M8.
        """
        new = geometry.check_dims(dims)
        if self.kind is FormatKind.ANY:
            if prod(new) != self.nelems:
                raise ShapeError(f"cannot reshape dims {self.dims} ({self.nelems} elements) to {new}")
            return MemoryDesc.any(new, self.dtype)
        return MemoryDesc._of(transforms.reshape(self.geometry, new), self.dtype)

    def submemory(self, dims: Iterable[int], offsets: Iterable[int]) -> MemoryDesc:
        """Return the descriptor of a window of the tensor; it keeps the strides and gets an offset (SPEC M4).

        Parameters
        ----------
        dims : iterable of int
            Sizes of the window.
        offsets : iterable of int
            Logical index where it begins.

        Raises
        ------
        ShapeError
            The window does not lie inside the tensor.
        FormatError
            A blocked axis is not cut at whole blocks; the kind is any or opaque.

        References
        ----------
        ``dnnl_memory_desc_create_submemory``.
        """
        window = tuple(dims), tuple(offsets)
        return MemoryDesc._of(transforms.submemory(self.geometry, *window), self.dtype)

    def slice(self, start: Sequence[int], size: Sequence[int], step: Sequence[int] | None = None) -> MemoryDesc:
        """Return the view of `size` elements per axis from `start`, every `step`-th one; no data moves.

        Parameters
        ----------
        start, size : sequence of int
            First index and number of elements taken, per axis.
        step : sequence of int, optional
            Positive distance between the elements taken, per axis; default ones.

        Raises
        ------
        ShapeError
            The elements do not lie inside the tensor.
        FormatError
            The format cannot express it: a step along a blocked or padded axis, a cut inside a block, a negative
            step.
        """
        starts, sizes = tuple(start), tuple(size)
        steps = (1,) * self.ndim if step is None else tuple(step)
        for name, values in (("start", starts), ("size", sizes), ("step", steps)):
            if len(values) != self.ndim:
                raise ShapeError(f"slice: {name} {values} must have one entry per dimension of {self.dims}")
        return MemoryDesc._of(transforms.take(self.geometry, starts, sizes, steps), self.dtype)

    def broadcast_to(self, dims: Iterable[int]) -> MemoryDesc:
        """Return the view that repeats dimensions of size 1 up to `dims`, as ``numpy.broadcast_to`` does (SPEC D4).

        Raises
        ------
        ShapeError
            `dims` is not a broadcast of this tensor's dims.
        FormatError
            A repeated dimension is padded; the kind is any or opaque.
        """
        return MemoryDesc._of(transforms.broadcast_to(self.geometry, geometry.check_dims(dims)), self.dtype)

    def expand(self, dims: Iterable[int]) -> MemoryDesc:
        """Return :meth:`broadcast_to`, where -1 keeps a dimension's size (torch's ``expand``)."""
        wanted = tuple(dims)
        extra = len(wanted) - self.ndim
        if extra < 0 or -1 in wanted[:extra]:
            raise ShapeError(f"cannot expand dims {self.dims} to {wanted}: -1 keeps an existing dimension only")
        return self.broadcast_to(self.dims[a - extra] if d == -1 else d for a, d in enumerate(wanted))

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
        if not isinstance(other, MemoryDesc):
            return NotImplemented
        return hash(self) == hash(other) and self._identity() == other._identity()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            pass
        value = hash(self._identity())
        object.__setattr__(self, "_hash", value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.dims, self.dtype, self.kind, self._geometry, self.nbytes, self._opaque)

    def __str__(self) -> str:
        """Return the short form ``f32[2,17,5,7]:aBcd16b``."""
        dims = ",".join(map(str, self.dims))
        return f"{self.dtype}[{dims}]:{self._layout_text()}"

    def _layout_text(self) -> str:
        if self._geometry is None:
            return str(self.kind)
        if self.tag is not None:
            return self.tag
        g = self._geometry
        text = "x".join(map(str, g.strides)) + "".join(f":{size}@{axis}" for axis, size in g.inner_blocks)
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
        return f"MemoryDesc{'' if self.is_regular else '.view'}{head}{extra})"


def _offset0(value: int) -> int:
    return geometry.check_dims((value,), "offset0")[0]


def _restore(
    dims: tuple[int, ...], dtype: DataType, kind: FormatKind, g: Geometry | None, nbytes: int, opaque: Hashable
) -> MemoryDesc:
    md = MemoryDesc.__new__(MemoryDesc)
    md._fill(dims, dtype, kind, g, nbytes, opaque)
    return md


def _geometry_of(
    dims: tuple[int, ...],
    strides: Iterable[int] | None,
    inner_blocks: Iterable[tuple[int, int]],
    padded_dims: Iterable[int] | None,
    padded_offsets: Iterable[int] | None,
    offset0: int,
) -> Geometry:
    """Fill in what was not given: whole blocks, no offsets, dense row-major outer dimensions."""
    blocks = tuple(InnerBlock(*geometry.check_dims(block, "inner block")) for block in inner_blocks)
    block_of = [1] * len(dims)
    for axis, size in blocks:
        if axis < len(dims):
            block_of[axis] *= max(size, 1)
    if padded_dims is None:
        padded = tuple(-(-d // b) * b for d, b in zip(dims, block_of, strict=True))
    else:
        padded = geometry.check_dims(padded_dims, "padded_dims")
    starts = (0,) * len(dims) if padded_offsets is None else geometry.check_dims(padded_offsets, "padded_offsets")
    if strides is None:
        counts = [-(-p // b) for p, b in zip(padded, block_of, strict=True)] if len(padded) == len(dims) else dims
        steps = geometry.dense_strides(counts, range(len(dims)), prod(size for _, size in blocks))
    else:
        steps = geometry.check_dims(strides, "strides")
    return Geometry(dims, steps, blocks, padded, starts, _offset0(offset0))
