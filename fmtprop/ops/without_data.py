"""Tensors without data, which are on PyTorch's device ``meta``: they have a shape, a type and strides.

They serve the inference of types. During an import of an ONNX model, tensors that depend on the model's inputs are such
tensors. PyTorch's fake tensors have the same use, but their calls take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from fmtprop.ir.tensors import map_tensors
from fmtprop.ops.pytorch import prelu_overload
from fmtprop.ops.shape_rules import RULES, SEVERAL, TYPES, together

_META = torch.device("meta")

#: types of arguments without tensors
_LEAVES = frozenset({int, float, bool, str, type(None)})


def has_unknown(value: Any) -> bool:
    """Return whether a tensor in a value, which may be a container, has no data."""
    if type(value) in _LEAVES:
        return False
    if isinstance(value, torch.Tensor):
        return bool(value.is_meta)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(has_unknown, items))


def without_data(value: Any) -> Any:
    """Return a value with its tensors replaced by tensors without data; PyTorch refuses calls on both kinds.

    >>> without_data([torch.ones(2), 3])
    [tensor(..., device='meta', size=(2,)), 3]
    """
    return map_tensors(value, _without_data)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    return _alike(tensor)


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor without data, of the same shape, strides and type."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def row_major(func: Any, value: Any) -> Any:
    """Return the arguments of a call whose shape has a rule with their tensors without data in row-major order.

    Rules know these. Where there is none, PyTorch may import its compiler, which takes up to 3 s.

    >>> row_major(torch.ops.aten.reshape.default, torch.empty(2, 3, device="meta").t()).stride()
    (2, 1)
    """
    return map_tensors(value, _in_order) if func in RULES or func in SEVERAL else value


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_meta or tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * tensor.ndim, dtype=tensor.dtype)


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by: Any = None) -> Any:
    """Return the result of a call, on tensors without data if one of its tensors has none, also if it names the CPU.

    The result of an element-wise operator has the shape of its operands together, and the type of the result for one
    element of each. Common operators have a rule. PyTorch computes the results of many others in Python; layers
    repeat, so results are kept, one for each default type: a quotient of integers has it.

    `by`: what is called in place of the function, such as ``torch.relu`` for ``aten.relu.default``. A rule for a shape
    calls neither.
    """
    by = by or func
    if not has_unknown((args, kwargs)):
        return by(*args, **kwargs)
    args, kwargs = tuple(map(_on_meta, args)), {name: _on_meta(value) for name, value in kwargs.items()}
    if func._schema.is_mutable:  # its result is an operand
        return func(*without_data(args), **without_data(kwargs))
    ruled = by_rule(func, args, kwargs, by)
    if ruled is not None:
        return ruled
    several = _shape(SEVERAL, func, args, kwargs)
    if several is not None:
        dtypes = [args[0].dtype] * (len(several) - 1) + [TYPES.get(func, args[0].dtype)]
        return tuple(torch.empty(at, dtype=dtype, device="meta") for at, dtype in zip(several, dtypes, strict=True))
    key = (_key((by, args, tuple(kwargs.items()))), torch.get_default_dtype())
    found = _RESULTS.get(key)
    if found is None:
        found = by(*without_data(args), **without_data(kwargs))
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        _RESULTS[key] = found
    return map_tensors(found, _alike)  # each result of a call is one of its own


def _on_meta(value: Any) -> Any:
    """Return the device of tensors without data in place of the CPU, so that ``x.to(device="cpu")`` needs no data."""
    return _META if isinstance(value, torch.device) and value.type == "cpu" else value


def by_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any], by: Any) -> torch.Tensor | None:
    """Return the row-major result, without data, of an element-wise call or one whose shape has a rule.

    It is PyTorch's, strides included, if the operands are row-major.
    """
    if _is_pointwise(func):
        shapes: list[torch.Size] = []
        key: Any = (by, _kind((args, kwargs), shapes), torch.get_default_dtype())
        if key not in _DTYPES:
            single = by(*map_tensors(args, _one_element), **map_tensors(kwargs, _one_element))
            _DTYPES[key] = single.dtype if isinstance(single, torch.Tensor) else None
        dtype = _DTYPES[key]
        return None if dtype is None else torch.empty(together(shapes), dtype=dtype, device="meta")
    dims = _shape(RULES, func, args, kwargs)
    if dims is None:
        return None
    first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    return torch.empty(dims, dtype=TYPES.get(func, first.dtype), device="meta")


def _shape(rules: Mapping[Any, Callable[..., Any]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a rule says, which has PyTorch's arguments in their order; None where there is no rule."""
    rule = rules.get(func)
    if rule is None:
        return None
    if not kwargs:
        return rule(*args)
    given, named = list(args), dict(kwargs)
    for argument in func._schema.arguments[len(given) :]:
        if argument.kwarg_only or not named:
            break
        given.append(named.pop(argument.name, argument.default_value))
    return rule(*given, **named)


#: calls whose result has the shape of the operands together, too, and the type that single elements have
_ALIKE = frozenset(
    {
        prelu_overload,
        torch.ops.aten.where.Scalar,
        torch.ops.aten.where.ScalarOther,
        torch.ops.aten.where.ScalarSelf,
        torch.ops.aten.cumsum.default,
        torch.ops.aten.floor_divide.default,
        torch.ops.aten.hardswish.default,
        torch.ops.aten.rsub.Tensor,
    }
)


@cache
def _is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func in _ALIKE


#: type of the results of element-wise calls by operator and kinds of operands; None if it is not one tensor
_DTYPES: dict[Any, torch.dtype | None] = {}


def _kind(value: Any, shapes: list[torch.Size]) -> Any:
    """Return the properties of an argument that decide on the type of the result, and add the shapes to a list."""
    if isinstance(value, torch.Tensor):
        shapes.append(value.shape)
        return value.dtype, value.ndim
    if isinstance(value, dict):
        return tuple((key, _kind(item, shapes)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_kind(item, shapes) for item in value)
    return value if isinstance(value, torch.dtype | str) else type(value)


#: results of calls by operator and operands
_RESULTS: dict[Any, Any] = {}
_MOST_RESULTS = 4096


def _key(value: Any) -> Any:
    """Return a key of a call's result: numbers with their types (1 equals True), and types, shapes and strides."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value
