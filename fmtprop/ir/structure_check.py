"""Check that a description of arguments and results is complete and fits its graph.

Owns the check of the text that :mod:`fmtprop.ir.structure` reads. It is made once if a graph comes from a file or from
networkx data; later readers trust the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fmtprop.errors import GraphError
from fmtprop.ir.structure import named_tuple, parsed

#: kind of a description -> its further keys
_KINDS: dict[str, frozenset[str]] = {
    "slot": frozenset(),
    "value": frozenset(),
    "opaque": frozenset(),
    "list": frozenset(),
    "tuple": frozenset(),
    "dict": frozenset(),
    "namedtuple": frozenset({"items"}),
    "object": frozenset({"items"}),
}
#: far more levels than any model has, far fewer than Python's stack allows
_MOST_LEVELS = 100


def check_structure(structure: str, inputs: int, outputs: int) -> None:
    """Check a description of arguments and results against a graph.

    `structure`: the description; ``""`` means flat tensors and needs no check.

    >>> from fmtprop.ir.structure import Slot, describe
    >>> text = describe([("x", Slot(0))], [], [Slot(0), Slot(1)])
    >>> check_structure(text, 1, 2)
    >>> check_structure(text, 2, 2)
    Traceback (most recent call last):
    ...
    fmtprop.errors.GraphError: graph structure: the arguments hold inputs 0, the graph has 2 inputs, each held once
    """
    if not structure:
        return
    data = parsed(structure)
    arguments = [*_pairs("positional", data["positional"], names=True)]
    arguments += _pairs("keyword", data["keyword"], names=True)
    _check_distinct("arguments", [name for name, _ in arguments])
    slots = [slot for name, spec in arguments for slot in _slots(f"argument {name!r}", spec, inputs, 0)]
    if sorted(slots) != list(range(inputs)):
        held = ", ".join(map(str, slots)) or "none"
        raise GraphError(
            f"graph structure: the arguments hold inputs {held}, the graph has {inputs} inputs, each held once"
        )
    for _ in _slots("results", data["results"], outputs, 0):
        pass


def _slots(where: str, spec: Any, count: int, depth: int) -> Iterator[int]:
    """Check one description and yield the indices of its tensors."""
    kind = _kind(where, spec)
    content = spec[kind]
    if depth > _MOST_LEVELS:
        raise GraphError(f"graph structure: {where[:60]}…: is nested deeper than {_MOST_LEVELS} levels")
    if kind == "slot":
        if not isinstance(content, int) or isinstance(content, bool) or not 0 <= content < count:
            raise GraphError(f"graph structure: {where}: there is no tensor {content!r}, the graph has {count} here")
        yield content
    elif kind == "value":
        if not isinstance(content, bool | int | float | str | None):
            raise GraphError(f"graph structure: {where}: a value must be a number, text or null, got {content!r}")
    elif kind == "opaque":
        if not isinstance(content, str):
            raise GraphError(f"graph structure: {where}: an opaque value must be text, got {content!r}")
    else:
        for key, child in _children(where, kind, content, spec):
            yield from _slots(f"{where}[{key!r}]", child, count, depth + 1)


def _kind(where: str, spec: Any) -> str:
    kinds = [kind for kind in _KINDS if isinstance(spec, dict) and kind in spec]
    if len(kinds) != 1 or set(spec) != {kinds[0], *_KINDS[kinds[0]]}:
        known = ", ".join(_KINDS)
        raise GraphError(f"graph structure: {where}: expected an object with one of the keys {known}, got {spec!r}")
    return kinds[0]


def _children(where: str, kind: str, content: Any, spec: dict[str, Any]) -> list[tuple[Any, Any]]:
    if kind in ("list", "tuple"):
        if not isinstance(content, list):
            raise GraphError(f"graph structure: {where}: the items of a {kind} must be a list, got {content!r}")
        return list(enumerate(content))
    if kind == "dict":
        items = _pairs(where, content, names=False)
    else:
        items = _pairs(where, spec["items"], names=True)
        if not isinstance(content, str):
            raise GraphError(f"graph structure: {where}: the name of a class must be text, got {content!r}")
    _check_distinct(where, [key for key, _ in items])
    if kind == "namedtuple":
        try:
            named_tuple(content, tuple(key for key, _ in items))  # checks the names
        except ValueError as error:
            raise GraphError(f"graph structure: {where}: not a named tuple: {error}") from error
    return items


def _pairs(where: str, content: Any, *, names: bool) -> list[tuple[Any, Any]]:
    if not isinstance(content, list):
        raise GraphError(f"graph structure: {where}: expected a list of pairs, got {content!r}")
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise GraphError(f"graph structure: {where}: expected a pair of key and description, got {pair!r}")
        if not isinstance(pair[0], str if names else bool | int | float | str | None):
            raise GraphError(f"graph structure: {where}: {pair[0]!r} cannot be a {'name' if names else 'key'}")
    return [(key, child) for key, child in content]


def _check_distinct(where: str, keys: list[Any]) -> None:
    if len(set(keys)) != len(keys):
        raise GraphError(f"graph structure: {where}: two of the keys {', '.join(map(repr, keys))} are the same")
