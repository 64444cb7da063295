"""Attributes of the views, and helpers of all importers that add views.

Owns the attributes; :mod:`fmtprop.ops.views` owns their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Value

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Reshape(Attrs):
    """The same elements in row-major logical order under other dimensions."""

    #: dimensions of the result; no -1
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_sizes("reshape", "shape", self.shape)


@dataclass(frozen=True)
class Permute(Attrs):
    """The axes in another order."""

    #: result axis ``i`` is source axis ``order[i]``: torch's convention, the inverse of oneDNN's ``permute_axes``
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ShapeError(f"permute: order {self.order} must hold each of 0 to {len(self.order) - 1} exactly once")


@dataclass(frozen=True)
class Slice(Attrs):
    """A window, every ``steps``-th element of it: ``dst[x] = src[starts + steps * x]`` (SPEC S1)."""

    #: `starts`, `sizes`, `steps`: first index, number of elements taken and distance between them, one per axis. A
    #: negative step goes backwards; no step is 0.
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("starts", "sizes"):
            _check_sizes("slice", name, getattr(self, name))
        if not len(self.starts) == len(self.sizes) == len(self.steps):
            raise ShapeError(
                f"slice: starts {self.starts}, sizes {self.sizes} and steps {self.steps} must have one entry per axis"
            )
        for axis, step in enumerate(self.steps):
            if not isinstance(step, int) or step == 0:
                raise ShapeError(f"slice: steps[{axis}] is {step!r}; a step must be an int other than 0")

    @classmethod
    def along(cls, dims: Sequence[int], axis: int, start: int, size: int, step: int = 1) -> Slice:
        """Return a window along one axis of a tensor of these dims.

        >>> Slice.along((2, 8, 5), 1, start=4, size=2)
        Slice(starts=(0, 4, 0), sizes=(2, 2, 5), steps=(1, 1, 1))
        """
        starts, sizes, steps = [0] * len(dims), list(dims), [1] * len(dims)
        starts[axis], sizes[axis], steps[axis] = start, size, step
        return cls(tuple(starts), tuple(sizes), tuple(steps))


@dataclass(frozen=True)
class Expand(Attrs):
    """Dimensions of size 1 repeated, new ones in front (SPEC D4)."""

    #: dimensions of the result; no -1
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_sizes("expand", "shape", self.shape)


def _check_sizes(op: str, name: str, sizes: Iterable[int]) -> None:
    for axis, size in enumerate(sizes):
        if not isinstance(size, int) or size < 0:
            raise ShapeError(f"{op}: {name}[{axis}] is {size!r}; it must be a non-negative int")


# ---------------------------------------------------------------- building blocks for importers


def reshaped(call: Call, value: Value, shape: Sequence[int]) -> Value:
    """Return the value with other dimensions; the value itself if it has them already."""
    if call.type(value).dims == tuple(shape):
        return value
    return call.emit("reshape", {"src": value}, Reshape(tuple(shape)))


def permuted(call: Call, value: Value, order: Sequence[int]) -> Value:
    """Return the value with its axes in another order (torch's convention); the value itself if nothing changes."""
    if list(order) == list(range(len(order))):
        return value
    return call.emit("permute", {"src": value}, Permute(tuple(order)))


def windowed(call: Call, value: Value, axis: int, start: int, size: int, step: int = 1) -> Value:
    """Return a window along one axis; the value itself if the window is the whole axis."""
    dims = call.type(value).dims
    if start == 0 and size == dims[axis]:
        return value
    attrs = Slice.along(dims, axis, start, size, step if size > 1 else 1)
    return call.emit("slice", {"src": value}, attrs)


def expanded(call: Call, value: Value, shape: Sequence[int]) -> Value:
    """Return the value repeated to these dimensions; the value itself if it has them already."""
    if call.type(value).dims == tuple(shape):
        return value
    return call.emit("expand", {"src": value}, Expand(tuple(shape)))
