"""The memory descriptor: the layout of a logical tensor in memory.

Owns :class:`MemoryDesc`, the centre of the layout room: constructor and transforms of a format. Its fields are in
``base``, positions of elements in ``positions``, the arithmetic in ``geometry``, ``transforms`` and ``address``. Must
not know about numpy buffers, oneDNN handles or graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fmtprop.errors import FormatError, ShapeError
from fmtprop.layout import geometry, transforms
from fmtprop.layout.base import FormatKind
from fmtprop.layout.dtypes import DataType
from fmtprop.layout.positions import WithPositions
from fmtprop.layout.tags import parse_tag

__all__ = ["FormatKind", "MemoryDesc"]


class MemoryDesc(WithPositions):
    """Logical description of a tensor in memory: dims, data type and format (SPEC M1). Immutable.

    Descriptors are equal if oneDNN's ``dnnl_memory_desc_equal`` says so: the stride of a dimension of size 1 is
    ignored.

    Parameters
    ----------
    dims : iterable of int
        Logical sizes, at most 12; ``()`` is a scalar.
    dtype : DataType or anything that ``DataType.from_any`` takes
    tag : str, optional
        Format tag: ``"acdb"``, ``"aBcd16b"``, ``"nhwc"``; ``"any"`` for the kind any.
    strides : iterable of int, optional
        Elements between neighbours along each axis, or between *outer* blocks of a blocked axis. 0 repeats
        (broadcast). Without tag and strides, the descriptor is dense and row-major.
    inner_blocks : iterable of (axis, size), optional
        Inner blocks, outermost first; not with `tag`. Without `strides` the outer dimensions are dense.
    padded_dims, padded_offsets : iterable of int, optional
        Sizes including padding, and the index in them at which the tensor begins. Default: dims rounded up to whole
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

    __slots__ = ()

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
            if not isinstance(tag, str):
                raise FormatError(f"tag must be a str such as 'nChw16c', got {tag!r}")
            if strides is not None or inner_blocks or padded_dims is not None or padded_offsets is not None:
                raise ShapeError(f"give either tag={tag!r} or strides, inner_blocks and padding, not both")
            if tag == "any":
                if offset0:
                    raise ShapeError(f"format any has no offset0, but {offset0} was given")
                self._fill(dims, dtype, FormatKind.ANY, None)
                return
            start = geometry.check_dims((offset0,), "offset0")[0] if offset0 else 0
            g = geometry.from_tag(dims, parse_tag(tag), start)
            self._fill(dims, dtype, FormatKind.BLOCKED, g, elements=g.offset0 + prod(g.padded_dims))
            return
        g = geometry.make(dims, strides, inner_blocks, padded_dims, padded_offsets, offset0)
        geometry.check(g, regular=True)
        self._fill(dims, dtype, FormatKind.BLOCKED, g)

    # ---- transforms

    def at_start(self) -> MemoryDesc:
        """Return the same layout with ``offset0`` 0.

        Returns
        -------
        MemoryDesc
            The descriptor itself if nothing changes, or for the kinds any and opaque.

        Examples
        --------
        >>> MemoryDesc((4, 8)).submemory((2, 8), (1, 0)).at_start()
        MemoryDesc((2, 8), 'f32', tag='ab')
        """
        return self if self.kind is not FormatKind.BLOCKED else self.moved(-self.offset0)

    def moved(self, elements: int) -> MemoryDesc:
        """Return the same layout, moved by a number of elements in its buffer.

        Parameters
        ----------
        elements : int
            Added to ``offset0``; may be negative.

        Returns
        -------
        MemoryDesc
            The descriptor itself if `elements` is 0.

        Raises
        ------
        FormatError
            The kind is any or opaque.
        ShapeError
            The layout would begin before the buffer.
        """
        if not elements:
            return self
        offset0 = geometry.check_dims((self.geometry.offset0 + elements,), "offset0")[0]
        return MemoryDesc._of(self.geometry._replace(offset0=offset0), self.dtype)

    def with_dtype(self, dtype: object) -> MemoryDesc:
        """Return the same layout for another data type.

        Parameters
        ----------
        dtype : DataType or anything that ``DataType.from_any`` takes
            The new type.

        Raises
        ------
        FormatError
            The format is opaque.
        """
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
        order = geometry.integers(permutation, "permutation")
        if self.kind is FormatKind.ANY:
            source = transforms.inverse_permutation(order, self.ndim)
            return MemoryDesc.any((self.dims[a] for a in source), self.dtype)
        return MemoryDesc._of(transforms.permute_axes(self.geometry, order), self.dtype)

    def transpose(self, axes: Sequence[int]) -> MemoryDesc:
        """Return the descriptor of the transposed tensor, by numpy's and torch's convention.

        Parameters
        ----------
        axes : sequence of int
            New axis ``i`` is the present axis ``axes[i]``: the inverse of :meth:`permute_axes`.

        Raises
        ------
        ShapeError
            Not a permutation.
        FormatError
            The format is opaque.
        """
        return self.permute_axes(transforms.inverse_permutation(geometry.integers(axes, "axes"), self.ndim))

    def reshape(self, dims: Iterable[int]) -> MemoryDesc:
        """Return the descriptor of the same elements, in row-major logical order, under other dims.

        Parameters
        ----------
        dims : iterable of int
            New sizes, with as many elements.

        Raises
        ------
        ShapeError
            The numbers of elements differ.
        FormatError
            The format cannot express the new dims: the joined or split axes are blocked, padded or not adjacent in
            memory.

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
        window = geometry.integers(dims, "submemory dims"), geometry.integers(offsets, "submemory offsets")
        return MemoryDesc._of(transforms.submemory(self.geometry, *window), self.dtype)

    def slice(self, start: Sequence[int], size: Sequence[int], step: Sequence[int] | None = None) -> MemoryDesc:
        """Return the view of every `step`-th element from `start`, `size` elements per axis; no data moves.

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
            The format cannot express the view: a step along a blocked or padded axis, a cut inside a block, a negative
            step.
        """
        starts, sizes = geometry.integers(start, "slice start"), geometry.integers(size, "slice size")
        steps = (1,) * self.ndim if step is None else geometry.integers(step, "slice step")
        for name, values in (("start", starts), ("size", sizes), ("step", steps)):
            if len(values) != self.ndim:
                raise ShapeError(f"slice: {name} {values} must have one entry per dimension of {self.dims}")
        return MemoryDesc._of(transforms.take(self.geometry, starts, sizes, steps), self.dtype)

    def broadcast_to(self, dims: Iterable[int]) -> MemoryDesc:
        """Return the view that repeats dimensions of size 1 up to `dims`, as ``numpy.broadcast_to`` does (SPEC D4).

        Parameters
        ----------
        dims : iterable of int
            New sizes; new dimensions stand in front.

        Raises
        ------
        ShapeError
            `dims` is not a broadcast of this tensor's dims.
        FormatError
            A repeated dimension is padded; the kind is any or opaque.
        """
        return MemoryDesc._of(transforms.broadcast_to(self.geometry, geometry.check_dims(dims)), self.dtype)

    def expand(self, dims: Iterable[int]) -> MemoryDesc:
        """Return the broadcast view as torch's ``expand`` does: :meth:`broadcast_to`, but -1 keeps a size.

        Parameters
        ----------
        dims : iterable of int
            New sizes or -1.

        Raises
        ------
        ShapeError, FormatError
            As for :meth:`broadcast_to`.
        """
        wanted = geometry.integers(dims, "dims")
        extra = len(wanted) - self.ndim
        if extra < 0 or -1 in wanted[:extra]:
            raise ShapeError(f"cannot expand dims {self.dims} to {wanted}: -1 keeps an existing dimension only")
        return self.broadcast_to(self.dims[a - extra] if d == -1 else d for a, d in enumerate(wanted))
