"""Views: ops that only change the description of their source's data (reshape, permute, slice, expand).

Owns the meaning of the four views. A view's rule turns its source's descriptor into its result's. If the format cannot
express the view (SPEC M8), the layout algebra raises FormatError, and the format assignment inserts a reorder first.
Must not know oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod

import torch

from fmtprop.errors import FormatError, ShapeError
from fmtprop.ir import Attrs, Category, Onnx, OpDef, Operand, Sample, TensorType, Writing
from fmtprop.ir.facets import ByPyTorch, View
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import Copying, Ready, Tensors
from fmtprop.ops.view_attrs import Expand, Permute, Reshape, Slice
from fmtprop.ops.view_importers import EXPAND_IMPORTERS, PERMUTE_IMPORTERS, RESHAPE_IMPORTERS, SLICE_IMPORTERS

__all__ = ["EXPAND", "PERMUTE", "RESHAPE", "SLICE", "Expand", "Permute", "Reshape", "Slice"]

# ---------------------------------------------------------------- meaning


def infer_reshape(attrs: Reshape, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type with the new dimensions, which must have the same number of elements."""
    src = types["src"]
    if src.size != prod(attrs.shape):
        raise ShapeError(
            f"src {src.dims} has {src.size} elements but shape {attrs.shape} holds {prod(attrs.shape)}; "
            "a reshape keeps their number"
        )
    return (src.with_dims(attrs.shape),)


def infer_permute(attrs: Permute, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type with its dimensions reordered."""
    src = types["src"]
    _same_rank("order", attrs.order, src)
    return (src.with_dims([src.dims[axis] for axis in attrs.order]),)


def infer_slice(attrs: Slice, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type with the window's dimensions."""
    src = types["src"]
    _same_rank("starts", attrs.starts, src)
    for axis, (start, size, step) in enumerate(zip(attrs.starts, attrs.sizes, attrs.steps, strict=True)):
        ends = (start, start + (size - 1) * step) if size else (start - 1,)
        for index in ends:
            if index >= src.dims[axis] or (size and index < 0):
                raise ShapeError(
                    f"src axis {axis} has size {src.dims[axis]} but the slice reads index {index} "
                    f"(start {start}, size {size}, step {step})"
                )
    return (src.with_dims(attrs.sizes),)


def infer_expand(attrs: Expand, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return src's type with dimensions of size 1 repeated."""
    src, extra = types["src"], len(attrs.shape) - types["src"].ndim
    if extra < 0:
        raise ShapeError(f"src has {src.ndim} dimensions but expand's shape {attrs.shape} only {len(attrs.shape)}")
    for axis, (have, want) in enumerate(zip(src.dims, attrs.shape[extra:], strict=True)):
        if have not in (1, want):
            raise ShapeError(f"src axis {axis} has size {have} and cannot be expanded to {want}; only size 1 can")
    return (src.with_dims(attrs.shape),)


def _same_rank(name: str, values: Sequence[int], src: TensorType) -> None:
    if len(values) != src.ndim:
        raise ShapeError(f"{name} {tuple(values)} must have one entry per axis of src, which has {src.ndim}")


def reference_reshape(attrs: Reshape, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (tensors["src"].reshape(attrs.shape),)


def reference_permute(attrs: Permute, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (tensors["src"].permute(attrs.order),)


def reference_slice(attrs: Slice, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (_taken(tensors["src"], *_window(attrs)),)


def operator_slice(attrs: Slice, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return a call of PyTorch's operators, and a copy of its result."""
    (window, backwards), src, dst = _window(attrs), tensors["src"], results[0]
    if src.shape == dst.shape:
        signed = src.dtype not in _SIGNED
        return Copying(partial(torch.flip if signed else _flipped, src, backwards), results)
    return Copying(partial(_taken, src, window, backwards), results, may_share=True)


def _window(attrs: Slice) -> tuple[tuple[slice, ...], list[int]]:
    """Return the window with forward steps, and the axes to flip: PyTorch has no negative steps."""
    window = list(zip(attrs.starts, attrs.sizes, attrs.steps, strict=True))
    # A stop beyond the end is clipped, so the last step may go beyond it.
    forward = [(a if s > 0 else a + (n - 1) * s, n, abs(s)) for a, n, s in window]
    backwards = [axis for axis, (_, n, s) in enumerate(window) if s < 0 and n > 1]
    return tuple(slice(a, a + n * s, s) for a, n, s in forward), backwards


def _taken(src: torch.Tensor, window: tuple[slice, ...], backwards: list[int]) -> torch.Tensor:
    taken = src[window]
    return _flipped(taken, backwards) if backwards else taken


#: PyTorch cannot flip wide unsigned types, but it can flip signed types of equal width
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _flipped(tensor: torch.Tensor, axes: list[int]) -> torch.Tensor:
    signed = _SIGNED.get(tensor.dtype)
    return tensor.flip(axes) if signed is None else tensor.view(signed).flip(axes).view(tensor.dtype)


def reference_expand(attrs: Expand, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    return (tensors["src"].expand(attrs.shape),)


def _view(rule: Callable[..., MemoryDesc]) -> Callable[..., MemoryDesc]:
    """Return the rule with the plain format for empty results, which have no elements to place."""

    @lru_cache(maxsize=4096)  # passes, the verifier and networks ask for the same views again and again
    def view(attrs: Attrs, desc: MemoryDesc, result: TensorType) -> MemoryDesc:
        return rule(attrs, desc) if result.size else MemoryDesc(result.dims, result.dtype)

    return view


view_reshape = _view(lambda attrs, desc: desc.reshape(attrs.shape))
view_permute = _view(lambda attrs, desc: desc.transpose(attrs.order))
# The step of one element does not matter.
view_slice = _view(
    lambda attrs, desc: desc.slice(
        attrs.starts, attrs.sizes, [1 if n == 1 else s for n, s in zip(attrs.sizes, attrs.steps, strict=True)]
    )
)


def _expanded(attrs: Expand, desc: MemoryDesc) -> MemoryDesc:
    # The layout algebra can express it, but oneDNN cannot convert a blocked format with broadcast axes.
    if not desc.is_plain:
        raise FormatError(f"expand: src is {desc}; nothing reads a blocked format that repeats: convert to plain first")
    return desc.expand(attrs.shape)


view_expand = _view(_expanded)


def _slice_of_batch(attrs: Slice, batch: int, images: int) -> Slice | None:
    if (attrs.starts[:1], attrs.sizes[:1], attrs.steps[:1]) != ((0,), (batch,), (1,)):
        return None
    return Slice(attrs.starts, (images, *attrs.sizes[1:]), attrs.steps)


# ---------------------------------------------------------------- ONNX


def _write_reshape(attrs: Reshape, w: Writing, operands: Mapping[str, str]) -> str:
    return w.reshaped(operands["src"], attrs.shape)


def _write_permute(attrs: Permute, w: Writing, operands: Mapping[str, str]) -> str:
    return w.transposed(operands["src"], attrs.order)


def _write_slice(attrs: Slice, w: Writing, operands: Mapping[str, str]) -> str:
    src = operands["src"]
    whole = [(0, size, 1) for size in w.type(src).dims]
    window = zip(attrs.starts, attrs.sizes, attrs.steps, strict=True)
    cut = [(axis, *part) for axis, part in enumerate(window) if part != whole[axis]]
    if not cut:
        return w("Identity", src)
    axes, starts, sizes, steps = zip(*cut, strict=True)
    ends = [start + size * step for start, size, step in zip(starts, sizes, steps, strict=True)]
    # ONNX counts negative ends from the last element, so an end before the first one is a large negative number
    ends = [end if end >= 0 else -(2**31) for end in ends]
    return w("Slice", src, *(w.constant(list(numbers), "s64") for numbers in (starts, ends, axes, steps)))


def _write_expand(attrs: Expand, w: Writing, operands: Mapping[str, str]) -> str:
    return w("Expand", operands["src"], w.constant(list(attrs.shape), "s64"))


# ---------------------------------------------------------------- samples


def _src(*dims: int) -> dict[str, TensorType]:
    return {"src": TensorType(dims)}


def samples_reshape() -> Iterable[Sample]:
    """Yield reshapes that keep, join, split and drop axes."""
    yield Sample("flatten", Reshape((2, 17 * 35)), _src(2, 17, 5, 7))
    yield Sample("join_spatial", Reshape((2, 32, 35)), _src(2, 32, 5, 7))
    yield Sample("split_channels", Reshape((2, 4, 8, 5, 7)), _src(2, 32, 5, 7))
    yield Sample("drop_ones", Reshape((3, 40)), _src(3, 40, 1, 1))
    yield Sample("add_ones", Reshape((1, 17, 1, 1)), _src(17))


def samples_permute() -> Iterable[Sample]:
    """Yield a transpose, channels last and a rotation."""
    yield Sample("transpose", Permute((1, 0)), _src(3, 17))
    yield Sample("channels_last", Permute((0, 2, 3, 1)), _src(2, 17, 5, 7))
    yield Sample("rotate", Permute((2, 0, 1)), _src(2, 3, 4))


def samples_slice() -> Iterable[Sample]:
    """Yield windows of channels, of space with a step, and of the batch."""
    yield Sample("channels", Slice((0, 16, 0, 0), (2, 16, 5, 7), (1, 1, 1, 1)), _src(2, 32, 5, 7))
    yield Sample("odd_channels", Slice((0, 3, 0, 0), (2, 9, 5, 7), (1, 1, 1, 1)), _src(2, 17, 5, 7))
    yield Sample("step", Slice((0, 0, 1, 0), (2, 17, 2, 4), (1, 1, 2, 2)), _src(2, 17, 5, 7))
    yield Sample("batch", Slice((1, 0), (2, 40), (1, 1)), _src(4, 40))
    yield Sample("backwards", Slice((0, 16, 4, 0), (2, 9, 5, 4), (1, -2, -1, 1)), _src(2, 17, 5, 7))


def samples_expand() -> Iterable[Sample]:
    """Yield a repeated channel vector and a new axis in front."""
    yield Sample("channels", Expand((2, 17, 5, 7)), _src(1, 17, 1, 1))
    yield Sample("new_axis", Expand((4, 3, 7)), _src(3, 7))


# ---------------------------------------------------------------- declarations


RESHAPE = OpDef(
    name="reshape",
    attrs=Reshape,
    operands=(Operand("src", "SRC"),),
    category=Category.VIEW,
    infer=infer_reshape,
    reference=reference_reshape,
    view=View(view_reshape, src=lambda attrs, desc, src: desc.reshape(src.dims)),
    sliced=lambda attrs, batch, images: Reshape((images, *attrs.shape[1:])) if attrs.shape[:1] == (batch,) else None,
    samples=samples_reshape,
    torch=RESHAPE_IMPORTERS,
    onnx=Onnx(_write_reshape, moves=True),
)

PERMUTE = OpDef(
    name="permute",
    attrs=Permute,
    operands=(Operand("src", "SRC"),),
    category=Category.VIEW,
    infer=infer_permute,
    reference=reference_permute,
    view=View(
        dst=view_permute,
        src=lambda attrs, desc, src: desc.transpose(tuple(map(attrs.order.index, range(len(attrs.order))))),
    ),
    sliced=lambda attrs, batch, images: attrs if attrs.order[:1] == (0,) else None,
    samples=samples_permute,
    torch=PERMUTE_IMPORTERS,
    onnx=Onnx(_write_permute, moves=True),
)

SLICE = OpDef(
    name="slice",
    attrs=Slice,
    operands=(Operand("src", "SRC"),),
    category=Category.VIEW,
    infer=infer_slice,
    reference=reference_slice,
    pytorch=ByPyTorch(operator_slice),
    view=View(view_slice),
    sliced=_slice_of_batch,
    samples=samples_slice,
    torch=SLICE_IMPORTERS,
    onnx=Onnx(_write_slice, moves=True),
)

EXPAND = OpDef(
    name="expand",
    attrs=Expand,
    operands=(Operand("src", "SRC"),),
    category=Category.VIEW,
    infer=infer_expand,
    reference=reference_expand,
    view=View(view_expand),
    samples=samples_expand,
    torch=EXPAND_IMPORTERS,
    onnx=Onnx(_write_expand, moves=True),
)
