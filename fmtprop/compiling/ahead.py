"""The shapes that are planned before they are met: every size of the ranges that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fmtprop.errors import InputError

#: a range of sizes: the first one, the largest, the step
_RANGE = 3

#: an input's name, and its sizes: numbers, or names of sizes that change; None if the number of axes is unknown
Declared = tuple[str, Sequence[int | str | None] | None]


def cases(given: Any, inputs: Sequence[Declared], most: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the shapes of all inputs, one tuple for each plan.

    `given`: sizes by input: a number; the first size, the largest one and the step; or several numbers. Axes with one
    name in the model have one size.

    >>> cases({"x": (1, (32, 96, 32))}, [("x", [1, "width"])], 8)
    [((1, 32),), ((1, 64),), ((1, 96),)]
    """
    names = [name for name, _ in inputs]
    if not isinstance(given, Mapping) or given.keys() - set(names):
        raise InputError(f"shapes is {given!r}; it must map inputs to sizes: {', '.join(names)}")
    sizes: dict[Any, Sequence[int]] = {}
    places = [_places(name, shape, given.get(name, shape), sizes) for name, shape in inputs]
    count = 1
    for choices in sizes.values():
        count *= len(choices)
    if count > most:
        raise InputError(f"shapes has {count} combinations of sizes, but max_shapes is {most}: raise it, or the step")
    known = [dict(zip(sizes, numbers, strict=True)) for numbers in product(*sizes.values())]
    return [tuple(tuple(one[key] for key in keys) for keys in places) for one in known]


def _places(
    name: str, shape: Sequence[int | str | None] | None, dims: Any, sizes: dict[Any, Sequence[int]]
) -> list[Any]:
    """Return a key for each axis of an input, and note the sizes of each key."""
    if shape is None or not isinstance(dims, list | tuple) or len(dims) != len(shape):
        raise InputError(f"shapes[{name!r}] is {dims!r}; the input has the shape {shape}")
    keys = []
    for axis, (declared, wanted) in enumerate(zip(shape, dims, strict=True)):
        key = declared if isinstance(declared, str) else (name, axis)
        found = _sizes(wanted)
        where = f"shapes[{name!r}] axis {axis}"
        if not found:
            raise InputError(f"{where}: {wanted!r} is neither a size nor (first, largest, step) nor a list of sizes")
        if isinstance(declared, int) and list(found) != [declared]:
            raise InputError(f"{where}: {wanted!r} is not the model's own {declared}")
        if list(sizes.setdefault(key, found)) != list(found):
            raise InputError(f"{where}: the axis {key!r} has other sizes in another input")
        keys.append(key)
    return keys


def _sizes(wanted: Any) -> Sequence[int]:
    """Return the sizes of an axis; none where they are malformed."""
    numbers = [wanted] if isinstance(wanted, int) else wanted
    if not isinstance(numbers, list | tuple) or (isinstance(numbers, tuple) and len(numbers) != _RANGE):
        return ()
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in numbers):
        return ()
    return range(numbers[0], numbers[1] + 1, numbers[2]) if isinstance(numbers, tuple) else numbers
