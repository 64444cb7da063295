"""Attributes from plain, untrusted data: every value is checked against the annotation of its field.

Owns the check that :meth:`Attrs.from_json <fmtprop.ir.node.Attrs.from_json>` cannot make: a frozen dataclass accepts
any value in any field.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fmtprop.errors import FmtpropError, GraphError
from fmtprop.ir.node import Attrs, Node
from fmtprop.ir.op import opdef
from fmtprop.layout import DataType

R = TypeVar("R")

#: least magnitude that is rounded to infinity in f32
_OVERFLOW_F32 = (2 - 2**-24) * 2.0**127

_SPELLED = {int: "an integer of 64 bits", float: "a number within the range of f32"}


def attrs_class(op: str) -> type[Attrs]:
    """Return the class of an op's attributes; boundary ops (input, constant, output) have none.

    Raises GraphError if there is no such op.
    """
    return Attrs if op in Node.BOUNDARY else opdef(op).attrs


def attrs_from_plain(op: str, data: object) -> Attrs:
    """Build an op's attributes from a plain dictionary.

    >>> import fmtprop.ops
    >>> attrs_from_plain("eltwise", {"alg": "relu"})
    Eltwise(alg='relu', alpha=0.0, beta=0.0)
    """
    cls = attrs_class(op)
    if not isinstance(data, Mapping):
        raise GraphError(f"attrs must be a mapping from attribute names to values, got {data!r}")
    hints = _hints(cls)
    for name, value in data.items():
        if name in hints and not fits(value, hints[name]):
            raise GraphError(f"attribute {name} is {value!r}, must be {_spell(hints[name])}")
    try:
        return cls.from_json(data)
    except GraphError:
        raise
    except FmtpropError as error:  # rules of the attributes' class
        raise GraphError(str(error)) from error


def record_of(cls: type[R], data: object) -> R:
    """Build a frozen dataclass of plain fields from a plain dictionary, of which nothing is trusted.

    >>> from fmtprop.ir.types import TensorType
    >>> record_of(TensorType, {"dims": [1, 2], "dtype": "f32"})
    f32[1,2]
    """
    hints = _hints(cls)
    if not isinstance(data, Mapping):
        raise GraphError(f"{cls.__name__} must be a mapping, got {str(data)[:80]}")
    for name, value in data.items():
        if name not in hints or not fits(value, hints[name]):
            raise GraphError(f"{cls.__name__} has no field {name} that can be {str(value)[:80]}")
    try:
        return cls(**{name: frozen(value) for name, value in data.items()})
    except (TypeError, FmtpropError) as error:
        raise GraphError(f"{cls.__name__}: {error}") from error


#: class -> types of its fields: to find them takes 0.2 ms
_KNOWN_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _KNOWN_HINTS:
        _KNOWN_HINTS[cls] = get_type_hints(cls)
    return _KNOWN_HINTS[cls]


def frozen(value: Any) -> Any:
    """Return a plain value with tuples in place of lists."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value fits a field with this annotation; lists mean tuples.

    >>> fits([1, 2], tuple[int, ...]), fits(True, int), fits(1, float), fits("f32", DataType)
    (True, False, True, True)
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return _fits_tuple(value, arguments)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_f32(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if hint is DataType:
        return isinstance(value, str) and value in {member.value for member in DataType}
    return isinstance(value, hint) if isinstance(hint, type) else True


def _is_f32(value: float) -> bool:
    """Return whether a number is in the range of f32: oneDNN would turn a larger one into infinity."""
    return value != value or abs(value) == math.inf or abs(value) < _OVERFLOW_F32


def _fits_tuple(value: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple):
        return False
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return all(fits(item, arguments[0]) for item in value)
    return len(value) == len(arguments) and all(map(fits, value, arguments))


def _spell(hint: Any) -> str:
    if hint in _SPELLED:
        return _SPELLED[hint]
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
