"""Examples with sizes of 0 and 1: PyTorch exports for larger ones, or for these alone.

It takes a size of 1 as a number in many of its rules (a reshape, a broadcast), any other as one of many.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from fmtprop.capture.specialise import Sizes
from fmtprop.errors import ImportModelError
from fmtprop.ops.pytorch import tree_flatten, tree_leaves, tree_unflatten

#: the type of ``Dim.DYNAMIC`` and ``Dim.AUTO``, which may have bounds
_HINT: type = type(Dim.AUTO)


def of_two(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with two of what an example has one of, along axes that are marked; None if there are none."""
    twice = {id(tensor): _twice(tensor, axes) for tensor, axes in _marks(module, args, kwargs, dynamic_shapes)}
    leaves, form = tree_flatten((args, kwargs))
    found = [twice.get(id(leaf), leaf) for leaf in leaves]
    if all(one is other for one, other in zip(leaves, found, strict=True)):
        return None
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(found, form)
    return made


def with_small(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    small: Collection[tuple[int, int, int]],
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return arguments that have some sizes of 0 or 1, and marks of the other axes alone.

    `small`: number of the tensor among all, axis, and size.
    """
    leaves, form = tree_flatten((args, kwargs))
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]  # each an object of its own
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    args, kwargs = form.unflatten(leaves)
    axes = {id(tensor): marked for tensor, marked in _marks(module, args, kwargs, dynamic_shapes)}
    left: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    resized: dict[int, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        shape = {axis: size for number, axis, size in small if number == index}
        made = tensor.new_zeros([shape.get(axis, size) for axis, size in enumerate(tensor.shape)]) if shape else tensor
        resized[id(tensor)] = made
        marked = {axis % tensor.ndim: mark for axis, mark in axes.get(id(tensor), {}).items()}
        if free := {axis: mark for axis, mark in marked.items() if axis not in shape}:
            left[made] = free
    args, kwargs = form.unflatten([resized.get(id(leaf), leaf) for leaf in leaves])
    return args, kwargs, left.dynamic_shapes(module, args, kwargs) if len(left) else None


def allow_one(program: ExportedProgram, examples: Any) -> None:
    """Let axes of which the examples have one have one again: of axes without a range, PyTorch begins it at 2."""
    tensors = [leaf for leaf in tree_leaves(examples) if isinstance(leaf, torch.Tensor)]
    for (_, recorded), tensor in zip(Sizes(program).inputs, tensors, strict=True):
        for size, number in zip(recorded.shape, tensor.shape, strict=True):
            symbol = getattr(size, "node", None)  # typed as a number, but it may be symbolic
            if number == 1 and symbol is not None and symbol.expr in program.range_constraints:
                known = program.range_constraints[symbol.expr]
                program.range_constraints[symbol.expr] = type(known)(min(1, known.lower), known.upper)


def _marks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[tuple[torch.Tensor, Mapping[int, Any]]]:
    """Yield the tensors of a call, each with the marks of its axes."""
    try:
        given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError:  # the export says what does not fit
        return
    named = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else dict(zip(given, dynamic_shapes, strict=False))
    yield from _marked(given, named)


def _marked(value: Any, marks: Any) -> Iterator[tuple[torch.Tensor, Mapping[int, Any]]]:
    """Yield the tensors in nested arguments, each with the marks of its axes."""
    if isinstance(value, torch.Tensor):
        axes = dict(enumerate(marks)) if isinstance(marks, tuple | list) else marks
        axes = axes if isinstance(axes, Mapping) else {}
        beyond = [axis for axis in axes if isinstance(axis, int) and not -value.ndim <= axis < value.ndim]
        if beyond:  # torch.export leaves it out, or ends in an IndexError
            raise ImportModelError(
                f"dynamic_shapes marks axis {beyond[0]} of a tensor of shape {tuple(value.shape)}: its axes are 0 to "
                f"{value.ndim - 1}"
            )
        yield value, axes
    elif isinstance(value, Mapping) and isinstance(marks, Mapping):
        for key in value.keys() & marks.keys():
            yield from _marked(value[key], marks[key])
    elif isinstance(value, tuple | list) and isinstance(marks, tuple | list):
        for one, mark in zip(value, marks, strict=False):
            yield from _marked(one, mark)


def _is_free(size: Any) -> bool:
    """Return whether a mark allows a size of 2."""
    return bool(size.max >= 2) if type(size) is Dim else type(size) is _HINT and size != Dim.STATIC


def _twice(tensor: torch.Tensor, axes: Mapping[int, Any]) -> torch.Tensor:
    for axis, size in axes.items():
        if _is_free(size) and -tensor.ndim <= axis < tensor.ndim and tensor.shape[axis] == 1:
            tensor = tensor.repeat_interleave(2, axis)
    return tensor
