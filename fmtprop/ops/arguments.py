"""Reading the arguments of an ATen call: int lists, data types, batch axes.

Helpers of all importers. Must not know any op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmtprop.ir.node import Value
from fmtprop.ops.building import is_native, normalised_axis
from fmtprop.ops.view_attrs import permuted, reshaped

if TYPE_CHECKING:
    from fmtprop.ir.importing import Call, Importer


def computable(call: Call, *values: Value | None) -> bool:
    """Return whether oneDNN computes on tensors of these types; importers decline other types."""
    return is_native(*(call.type(value) for value in values if value is not None))


def ints(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return an ATen int list of the schema kind ``int[2]``, in which one number means all axes.

    >>> ints(3, 2), ints([1], 2), ints([1, 2], 2)
    ((3, 3), (1, 1), (1, 2))
    """
    items = (value,) if isinstance(value, int) else tuple(value)
    return items * count if len(items) == 1 else items


def axes_of(value: Any, ndim: int) -> tuple[int, ...]:
    """Return axes as sorted non-negative numbers; None and an empty list mean all axes.

    >>> axes_of([-1, -2], 4), axes_of(None, 2)
    ((2, 3), (0, 1))
    """
    if value is None or value == []:
        return tuple(range(ndim))
    return tuple(sorted(normalised_axis(axis, ndim) for axis in ints(value, 1)))


def transposed(call: Call, value: Value) -> Value:
    """Return the value with its last two axes swapped."""
    ndim = call.type(value).ndim
    return permuted(call, value, (*range(ndim - 2), ndim - 1, ndim - 2))


def batched(call: Call, value: Value, ndim: int) -> Value:
    """Return the value with a leading batch axis, which is added if the call has none."""
    dims = call.type(value).dims
    return reshaped(call, value, (1, *dims)) if len(dims) == ndim - 1 else value


def unbatched(call: Call, value: Value, like: Value) -> Value:
    """Undo :func:`batched`: remove the batch axis if `like` has none."""
    dims = call.type(value).dims
    return value if call.type(like).ndim == len(dims) else reshaped(call, value, dims[1:])


def first_of(importer: Importer) -> Importer:
    """Return the importer for a call that also returns indices, which oneDNN does not compute."""

    def both(call: Call) -> tuple[Value | None, ...] | None:
        value = importer(call)
        return (value, None) if isinstance(value, Value) else None

    return both
