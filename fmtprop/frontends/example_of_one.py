"""Examples of one image, row or token for axes that may change: an export of them would be of size 1 alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim


def of_two(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with two of what an example has one of, along axes that a :class:`torch.export.Dim` marks.

    PyTorch takes a size of 1 as a number in many of its rules (a reshape, a broadcast), any other as one of many.
    """
    values = [*args, *kwargs.values()]
    if isinstance(dynamic_shapes, Mapping):
        names = [*list(inspect.signature(module.forward).parameters)[: len(args)], *kwargs]
        marks = [dynamic_shapes.get(name) for name in names]
    else:
        marks = list(dynamic_shapes) if isinstance(dynamic_shapes, tuple | list) else []
    if len(marks) != len(values):
        return args, kwargs
    twice = [_of_two(value, marked) for value, marked in zip(values, marks, strict=True)]
    return tuple(twice[: len(args)]), dict(zip(kwargs, twice[len(args) :], strict=True))


def _of_two(value: Any, marked: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    axes = dict(enumerate(marked)) if isinstance(marked, tuple | list) else marked
    for axis, size in axes.items() if isinstance(axes, Mapping) else ():
        if type(size) is Dim and size.max >= 2 and -value.ndim <= axis < value.ndim and value.shape[axis] == 1:
            value = value.repeat_interleave(2, axis)
    return value
