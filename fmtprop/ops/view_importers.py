"""Importers of PyTorch's many forms of a view, identities included.

They take dimensions from the exporter's result type if it determines the view, instead of computing them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fmtprop.ir import Call, Importer, Value
from fmtprop.layout.tags import MAX_NDIMS
from fmtprop.ops.arguments import transposed
from fmtprop.ops.building import normalised_axis
from fmtprop.ops.view_attrs import Slice, expanded, permuted, reshaped, windowed


def _identity(call: Call) -> Value:
    value: Value = call["self"]
    return value


def _dropout(call: Call) -> Value | None:
    if call["train"]:
        return None
    value: Value = call["input"]
    return value


def _native_dropout(call: Call) -> tuple[Value | None, ...] | None:
    # The mask of a dropout that is off has no reader.
    return (call["input"], None) if call["train"] is False else None


def _reshape(call: Call) -> Value:
    return reshaped(call, call["self"], call.results[0].dims)


def _expand(call: Call) -> Value:
    return expanded(call, call["self"], call.results[0].dims)


def _tile(argument: str) -> Importer:
    """Return the importer of a call that repeats each axis as a whole."""

    def importer(call: Call) -> Value | None:
        counts, dims = tuple(call[argument]), call.type(call["self"]).dims
        ndim = max(len(counts), len(dims))
        counts, dims = (1,) * (ndim - len(counts)) + counts, (1,) * (ndim - len(dims)) + dims
        return _repeated(call, [(count, 1) for count in counts], [(1, size) for size in dims])

    return importer


def _repeat_interleave(call: Call) -> Value | None:
    dims, dim = call.type(call["self"]).dims, call["dim"]
    if dim is None:
        dims, dim = (prod(dims),), 0
    sizes = [(size, 1) for size in dims]
    counts = [(1, 1)] * len(dims)
    counts[normalised_axis(dim, len(dims))] = (1, call["repeats"])
    return _repeated(call, counts, sizes)


def _repeated(call: Call, counts: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> Value | None:
    """Return the tensor with its axes split into sizes, and each part repeated as often as its count, as one value."""
    split: list[int] = []
    repeated: list[int] = []
    for some, parts in zip(counts, sizes, strict=True):
        if prod(some) == 1 or prod(parts) == 1:  # the axis need not be split
            some, parts = (prod(some),), (prod(parts),)
        split += parts
        repeated += [count * size for count, size in zip(some, parts, strict=True)]
    if 0 in repeated or len(split) > MAX_NDIMS:
        return None
    value = expanded(call, reshaped(call, call["self"], split), repeated)
    return reshaped(call, value, call.results[0].dims)


def _permute(call: Call) -> Value:
    ndim = call.type(call["self"]).ndim
    return permuted(call, call["self"], [normalised_axis(axis, ndim) for axis in call["dims"]])


def _reverse(call: Call) -> Value:
    return permuted(call, call["self"], range(call.type(call["self"]).ndim)[::-1])


def _swap(first: str, second: str) -> Importer:
    def importer(call: Call) -> Value:
        ndim = call.type(call["self"]).ndim
        order = list(range(ndim))
        if ndim:
            a, b = normalised_axis(call[first], ndim), normalised_axis(call[second], ndim)
            order[a], order[b] = b, a
        return permuted(call, call["self"], order)

    return importer


def _movedim(call: Call) -> Value:
    ndim = call.type(call["self"]).ndim
    pairs = [
        call[name] if isinstance(call[name], (list, tuple)) else [call[name]] for name in ("source", "destination")
    ]
    sources, places = ([normalised_axis(axis, ndim) for axis in axes] for axes in pairs)
    order = [axis for axis in range(ndim) if axis not in sources]
    for place, source in sorted(zip(places, sources, strict=True)):
        order.insert(place, source)
    return permuted(call, call["self"], order)


def _axis(call: Call) -> int:
    return normalised_axis(call["dim"], call.type(call["self"]).ndim)


def _bounded(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


def _slice(call: Call) -> Value:
    axis = _axis(call)
    start = _bounded(call["start"] or 0, call.type(call["self"]).dims[axis])
    return windowed(call, call["self"], axis, start, call.results[0].dims[axis], call["step"])


def _narrow(call: Call) -> Value | None:
    if isinstance(call["start"], Value):
        return None
    axis = _axis(call)
    start = _bounded(call["start"], call.type(call["self"]).dims[axis])
    return windowed(call, call["self"], axis, start, call["length"])


def _select(call: Call) -> Value:
    axis = _axis(call)
    start = _bounded(call["index"], call.type(call["self"]).dims[axis])
    return reshaped(call, windowed(call, call["self"], axis, start, 1), call.results[0].dims)


def _split(call: Call) -> tuple[Value, ...] | None:
    axis, parts, start = _axis(call), [], 0
    # The parts of tensor_split may overlap or leave elements out.
    if sum(result.dims[axis] for result in call.results) != call.type(call["self"]).dims[axis]:
        return None
    for result in call.results:
        parts.append(windowed(call, call["self"], axis, start, result.dims[axis]))
        start += result.dims[axis]
    return tuple(parts)


def _flip(call: Call) -> Value:
    dims = call.type(call["self"]).dims
    axes = {normalised_axis(axis, len(dims)) for axis in call["dims"]}
    if not axes or 0 in dims:
        return _identity(call)
    starts = tuple(size - 1 if axis in axes else 0 for axis, size in enumerate(dims))
    steps = tuple(-1 if axis in axes else 1 for axis in range(len(dims)))
    return call.emit("slice", {"src": call["self"]}, Slice(starts, dims, steps))


def _pixel_shuffle(call: Call) -> Value:
    """Import the exchange of channels for positions as views: PyTorch's operator is views and a row-major copy."""
    *batch, channels, height, width = call.type(call["self"]).dims
    factor, n = call["upscale_factor"], len(batch)
    split = reshaped(call, call["self"], (*batch, channels // factor**2, factor, factor, height, width))
    turned = permuted(call, split, (*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return reshaped(call, turned, call.results[0].dims)


def _pixel_unshuffle(call: Call) -> Value:
    *batch, channels, height, width = call.type(call["self"]).dims
    factor, n = call["downscale_factor"], len(batch)
    split = reshaped(call, call["self"], (*batch, channels, height // factor, factor, width // factor, factor))
    turned = permuted(call, split, (*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return reshaped(call, turned, call.results[0].dims)


def _unbind(call: Call) -> tuple[Value, ...]:
    axis = _axis(call)
    slices = (windowed(call, call["self"], axis, i, 1) for i in range(len(call.results)))
    return tuple(reshaped(call, part, result.dims) for part, result in zip(slices, call.results, strict=True))


def _spelled(importer: Importer, *names: str) -> dict[str, Importer]:
    """Return one importer under several overloads."""
    return {f"aten.{name}": importer for name in names}


RESHAPE_IMPORTERS: dict[str, Importer] = {
    **_spelled(_reshape, "view.default", "view_copy.default", "reshape.default", "_reshape_copy.default"),
    **_spelled(_reshape, "_unsafe_view.default", "view_as.default", "reshape_as.default", "_reshape_alias.default"),
    **_spelled(_reshape, "flatten.using_ints", "unflatten.int", "ravel.default"),
    **_spelled(_reshape, "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"),
    **_spelled(_reshape, "squeeze_copy.default", "squeeze_copy.dim", "squeeze_copy.dims", "unsqueeze_copy.default"),
    # Identities: the result is the argument itself, in its format.
    **_spelled(_identity, "contiguous.default", "clone.default", "alias.default", "detach.default"),
    **_spelled(_identity, "alias_copy.default", "detach_copy.default", "lift_fresh.default"),
    **_spelled(_identity, "lift_fresh_copy.default", "positive.default"),
    **_spelled(_dropout, "dropout.default", "feature_dropout.default", "alpha_dropout.default"),
    **_spelled(_dropout, "feature_alpha_dropout.default"),
    "aten.native_dropout.default": _native_dropout,
}


PERMUTE_IMPORTERS: dict[str, Importer] = {
    **_spelled(_permute, "permute.default", "permute_copy.default"),
    **_spelled(_swap("dim0", "dim1"), "transpose.int", "transpose_copy.int", "swapdims.default"),
    **_spelled(_swap("axis0", "axis1"), "swapaxes.default"),
    **_spelled(_reverse, "t.default", "t_copy.default", "numpy_T.default"),
    "aten.mT.default": lambda call: transposed(call, call["self"]),
    **_spelled(_pixel_shuffle, "pixel_shuffle.default"),
    **_spelled(_pixel_unshuffle, "pixel_unshuffle.default"),
    **_spelled(_movedim, "movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist"),
}


SLICE_IMPORTERS: dict[str, Importer] = {
    **_spelled(_slice, "slice.Tensor", "slice_copy.Tensor"),
    **_spelled(_narrow, "narrow.default", "narrow_copy.default"),
    **_spelled(_select, "select.int", "select_copy.int"),
    **_spelled(_split, "split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default"),
    **_spelled(_split, "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "unsafe_chunk.default"),
    **_spelled(_split, "split_copy.Tensor", "split_with_sizes_copy.default"),
    **_spelled(_split, "tensor_split.sections", "tensor_split.indices"),
    **_spelled(_unbind, "unbind.int", "unbind_copy.int"),
    **_spelled(_flip, "flip.default"),
}


EXPAND_IMPORTERS: dict[str, Importer] = {
    **_spelled(_expand, "expand.default", "expand_copy.default", "expand_as.default", "broadcast_to.default"),
    **_spelled(_tile("repeats"), "repeat.default"),
    **_spelled(_tile("dims"), "tile.default"),
    **_spelled(_repeat_interleave, "repeat_interleave.self_int"),
}
