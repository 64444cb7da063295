"""Declared inputs and outputs of an ONNX model, and the arrays that a caller gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from fmtprop.errors import InputError


@dataclass(frozen=True)
class NodeArg:
    """An input or an output of a model.

    Parameters
    ----------
    name : str
        Name in the model.
    type : str
        In ONNX Runtime's words: ``"tensor(float)"``, ``"seq(tensor(int64))"``.
    shape : list of (int, str or None)
        Sizes, or the names of dynamic axes.
    """

    name: str
    type: str
    shape: list[int | str | None]


def value_of(given: Any, arg: NodeArg | None) -> Any:
    """Return a given array as a value; refuse another type or shape than the declared one."""
    from fmtprop.onnx.model.elements import from_array

    is_tensor = arg is not None and arg.type.startswith("tensor")
    if given is None and is_tensor:
        raise InputError(f"input {arg.name} is None; it must be an array")  # type: ignore[union-attr]
    if given is None or (isinstance(given, list) and not is_tensor):
        return None if given is None else [value_of(item, None) for item in given]
    try:
        array = np.asarray(given, dtype=_numpy_type(arg) if arg is not None and isinstance(given, _UNTYPED) else None)
        value = from_array(array.astype(object) if array.dtype.kind == "U" else array)
        have = _type_of(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"input {'' if arg is None else arg.name} is no array of a type that ONNX has: {error}"
        ) from error
    if arg is None or not arg.type.startswith("tensor"):
        return value
    if have != arg.type:
        raise InputError(f"input {arg.name} is {arg.type}, the array is {have}: convert it")
    shape = tuple(value.shape)
    if arg.shape is not None and not _fits(shape, arg.shape):
        raise InputError(f"input {arg.name} has shape {arg.shape}, the array has {list(shape)}")
    return value


def reader_of(arg: NodeArg) -> Callable[[Any], Any]:
    """Return :func:`value_of` for an input, which knows at once an array that is as declared, as nearly all are."""
    from fmtprop.onnx.model.elements import is_shared

    dtype = _numpy_type(arg) if arg.type.startswith("tensor(") else None
    if dtype is None or not is_shared(dtype) or arg.shape is None:
        return partial(value_of, arg=arg)
    dims, last = tuple(arg.shape), None

    def read(given: Any) -> Any:
        nonlocal last
        if type(given) is np.ndarray and given.dtype == dtype:
            shape = given.shape
            if shape == last or _fits(shape, dims):
                last, flags = shape, given.flags
                if flags.c_contiguous and flags.writeable:
                    return torch.from_numpy(given)
        return value_of(given, arg)

    return read


#: values of Python, which take the declared type
_UNTYPED: Final = (list, tuple, int, float)


def _numpy_type(arg: NodeArg) -> np.dtype[Any] | None:
    from fmtprop.onnx.model.elements import numpy_type, type_number

    number = type_number(arg.type.removeprefix("tensor(").removesuffix(")").upper())
    return numpy_type(number) if number else None


def _fits(shape: tuple[int, ...], declared: Sequence[int | str | None]) -> bool:
    if not declared:  # a scalar, or an input without a shape
        return True
    return len(shape) == len(declared) and all(
        not isinstance(want, int) or want == have for want, have in zip(declared, shape, strict=True)
    )


def _type_of(value: Any) -> str:
    from fmtprop.onnx.model.elements import element_type

    return f"tensor({_word(element_type(value))})"


def _word(number: int) -> str:
    from fmtprop.onnx.model.elements import type_name

    return type_name(number).lower()


def node_arg(info: Any) -> NodeArg:
    """Return the declaration of an input or output."""
    return NodeArg(info.name, _type_words(info.type), _shape_of(info.type))


def _shape_of(type_: Any) -> list[int | str | None]:
    dims = type_.tensor_type.shape.dim if type_.WhichOneof("value") == "tensor_type" else []
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _type_words(type_: Any) -> str:
    kind = type_.WhichOneof("value")
    if kind == "tensor_type":
        return f"tensor({_word(type_.tensor_type.elem_type)})"
    if kind == "sequence_type":
        return f"seq({_type_words(type_.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({_type_words(type_.optional_type.elem_type)})"
    if kind == "map_type":
        return f"map({_word(type_.map_type.key_type)},{_type_words(type_.map_type.value_type)})"
    return str(kind or "unknown").removesuffix("_type")


def written(result: Any, bound: np.ndarray[Any, Any] | None, arg: NodeArg) -> Any:
    """Return a result, written to the array that is bound for it."""
    if bound is None:
        return result
    target = torch.from_numpy(bound)
    if not isinstance(result, torch.Tensor) or target.shape != result.shape or target.dtype != result.dtype:
        raise InputError(f"output {arg.name} is {_type_of(result)} {list(result.shape)}, the bound array is not")
    return target.copy_(result)
