"""The shapes that a session plans ahead: every size of the ranges that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fmtprop.errors import InputError
from fmtprop.onnx.arrays import NodeArg

#: a range of sizes: the first one, the largest, the step
_RANGE = 3


def cases(given: Any, inputs: Sequence[NodeArg], most: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the shapes of all inputs, one tuple for each plan.

    Parameters
    ----------
    given : mapping of str to sequence of (int or (int, int, int))
        Sizes by input: a number, or the first size, the largest one and the step. Axes with one name in the model
        have one size.
    most : int
        Plans that the session keeps.

    Raises
    ------
    InputError
        An input is unknown, or its sizes are missing or wrong, or there are more shapes than plans are kept.

    Examples
    --------
    >>> cases({"x": (1, (32, 96, 32))}, [NodeArg("x", "tensor(float)", [1, "width"])], 8)
    [((1, 32),), ((1, 64),), ((1, 96),)]
    """
    if not isinstance(given, Mapping) or given.keys() - {arg.name for arg in inputs}:
        raise InputError(f"shapes is {given!r}; it must map inputs to sizes: {', '.join(arg.name for arg in inputs)}")
    sizes: dict[Any, range] = {}
    places = [_places(arg, given.get(arg.name, arg.shape), sizes) for arg in inputs]
    count = 1
    for choices in sizes.values():
        count *= len(choices)
    if count > most:
        raise InputError(f"shapes has {count} combinations of sizes, but max_shapes is {most}: raise it, or the step")
    known = [dict(zip(sizes, numbers, strict=True)) for numbers in product(*sizes.values())]
    return [tuple(tuple(one[key] for key in keys) for keys in places) for one in known]


def _places(arg: NodeArg, dims: Any, sizes: dict[Any, range]) -> list[Any]:
    """Return a key for each axis of an input, and note the sizes of each key."""
    if arg.shape is None or not isinstance(dims, list | tuple) or len(dims) != len(arg.shape):
        raise InputError(f"shapes[{arg.name!r}] is {dims!r}; the input has the shape {arg.shape}")
    keys = []
    for axis, (declared, wanted) in enumerate(zip(arg.shape, dims, strict=True)):
        key = declared if isinstance(declared, str) else (arg.name, axis)
        found = _sizes(wanted)
        where = f"shapes[{arg.name!r}] axis {axis}"
        if not found:
            raise InputError(f"{where}: {wanted!r} is neither a size nor (first, largest, step)")
        if isinstance(declared, int) and found != range(declared, declared + 1):
            raise InputError(f"{where}: {wanted!r} is not the model's own {declared}")
        if sizes.setdefault(key, found) != found:
            raise InputError(f"{where}: the axis {key!r} has other sizes in another input")
        keys.append(key)
    return keys


def _sizes(wanted: Any) -> range:
    """Return the sizes of an axis; none where they are malformed."""
    numbers = (wanted, wanted, 1) if isinstance(wanted, int) else wanted
    is_range = isinstance(numbers, tuple) and len(numbers) == _RANGE
    if not is_range or any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in numbers):
        return range(0)
    return range(numbers[0], numbers[1] + 1, numbers[2])
