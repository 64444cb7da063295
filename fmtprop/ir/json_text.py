"""JSON from untrusted files: flaws that Python's reader accepts are refused here.

Python accepts ``NaN``, integers of any size, ``1e999`` as infinity, two equal keys (and takes the last), and nesting
until its stack overflows. In a graph file, each of these is a flaw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from fmtprop.errors import GraphError

#: far more levels than any model has, far fewer than Python's stack allows
_MOST_LEVELS = 100

#: limits of 64-bit integers, signed or unsigned: seeds are unsigned
_LEAST_INTEGER, _MOST_INTEGER = -(2**63), 2**64 - 1


def parse_json(text: str) -> Any:
    """Return the data of a JSON text.

    >>> parse_json('{"size": [1, 2.5]}')
    {'size': [1, 2.5]}
    """
    try:
        data = json.loads(
            text, parse_constant=_no_token, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique_keys
        )
    except json.JSONDecodeError as error:
        raise GraphError(f"line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from error
    except RecursionError:
        raise _too_deep() from None
    level = [data]
    for _ in range(_MOST_LEVELS):
        if not level:
            return data
        level = [part for item in level for part in _parts(item)]
    raise _too_deep()


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()


def _too_deep() -> GraphError:
    return GraphError(f"is nested too deeply to be a graph file: more than {_MOST_LEVELS} levels")


def _no_token(token: str) -> Any:
    raise GraphError(f'has the token {token}, which JSON lacks; write {{"float": "inf"}} for a float')


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise GraphError(f'has the number {token}, which no float holds; write {{"float": "inf"}} for infinity')
    return value


def _integer(token: str) -> int:
    # Python itself refuses to read thousands of digits
    value = int(token) if len(token) <= len(str(_LEAST_INTEGER)) else _MOST_INTEGER + 1
    if not _LEAST_INTEGER <= value <= _MOST_INTEGER:
        raise GraphError(f"has the integer {token[:40]}, which does not fit in 64 bits")
    return value


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise GraphError(f"has the key {key!r} twice in one object")
        found[key] = value
    return found
