"""Nesting of a model's arguments and results, stored with a graph as JSON.

A graph has flat lists of inputs and outputs. Its model may take ``forward(x, masks={"a": m}, scale=2.0)`` and return a
tuple, a dict or an object. This module owns the description of this nesting: :func:`describe` writes it,
:func:`restructure` nests results, :func:`flatten_arguments` flattens arguments. Must not know graphs or torch. Classes
are looked up by their registered names and never imported, since the text may come from an untrusted file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from fmtprop.errors import GraphError, ImportModelError, InputError

_SCALARS = (bool, int, float, str, type(None))

#: module and name of a class -> the class of named tuples that a model of this process takes or returns
_NAMED_TUPLES: WeakValueDictionary[str, Any] = WeakValueDictionary()


@dataclass(frozen=True)
class Slot:
    """The position of a tensor in a nested structure."""

    #: position in the flat list of graph inputs or outputs, from 0
    index: int


# ---------------------------------------------------------------- writing


def describe(positional: Sequence[tuple[str, Any]], keyword: Sequence[tuple[str, Any]], results: Any) -> str:
    """Describe the nesting of arguments and results.

    `positional`: name and structure of each positional argument, in order; a :class:`Slot` replaces every tensor.
    Raises ImportModelError if a dictionary has a key that JSON cannot express.

    >>> text = describe([("x", Slot(0)), ("scale", 2.0)], [], {"y": Slot(0), "rest": [Slot(1), None]})
    >>> restructure(text, ["a", "b"])
    {'y': 'a', 'rest': ['b', None]}
    >>> flatten_arguments(text, ("input",), {"scale": 2.0})
    ['input']
    """
    text = {
        "positional": [[name, _encode(tree)] for name, tree in positional],
        "keyword": [[name, _encode(tree)] for name, tree in keyword],
        "results": _encode(results),
    }
    return json.dumps(text, separators=(",", ":"))


def _encode(tree: Any) -> Any:
    if isinstance(tree, Slot):
        return {"slot": tree.index}
    if isinstance(tree, _SCALARS):
        return {"value": tree}
    if isinstance(tree, tuple) and (names := _field_names(tree)):
        items = [[name, _encode(item)] for name, item in zip(names, tree, strict=True)]
        _NAMED_TUPLES[_class_name(tree)] = type(tree)
        return {"namedtuple": _class_name(tree), "items": items}
    if isinstance(tree, tuple | list):
        return {"tuple" if isinstance(tree, tuple) else "list": [_encode(item) for item in tree]}
    is_plain = type(tree) is dict or (type(tree) is OrderedDict and not all(isinstance(key, str) for key in tree))
    if is_plain:
        return {"dict": _encode_items(tree)}
    if isinstance(tree, Mapping):
        return {"object": _class_name(tree), "items": _encode_items(tree)}
    if is_dataclass(tree):
        present = ((f.name, getattr(tree, f.name)) for f in fields(tree))
        return {"object": _class_name(tree), "items": [[name, _encode(item)] for name, item in present]}
    # torch.dtype, torch.device, an enum…: only compared, never rebuilt
    return {"opaque": repr(tree)}


def _encode_items(tree: Mapping[Any, Any]) -> list[Any]:
    for key in tree:
        if not isinstance(key, _SCALARS):
            raise ImportModelError(
                f"a {type(tree).__name__} among the arguments or results has the key {key!r} ({type(key).__name__}), "
                "which a graph cannot hold; use text or numbers as keys"
            )
    return [[key, _encode(item)] for key, item in tree.items()]


def is_container(kind: type) -> bool:
    """Return whether the tensors inside objects of a class can be described; other objects are compared as a whole.

    >>> is_container(dict), is_container(set)
    (True, False)
    """
    return issubclass(kind, tuple | list | Mapping) or is_dataclass(kind)


def _field_names(tree: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the field names of a named tuple, or of a C struct sequence such as ``torch.return_types.sort``."""
    names: tuple[str, ...] = getattr(tree, "_fields", ())
    if not names and hasattr(type(tree), "n_sequence_fields"):
        names = getattr(type(tree), "__match_args__", ())
    return names


def _class_name(tree: Any) -> str:
    return f"{type(tree).__module__}.{type(tree).__qualname__}"


# ---------------------------------------------------------------- results


def restructure(structure: str, outputs: Sequence[Any]) -> Any:
    """Return flat outputs in the nesting of the model's results.

    `structure`: text from :func:`describe`; ``""`` means a single output or a flat tuple. Result: tuples, lists and
    dicts as the model returned them. A named tuple has the model's class if this process imported the model, else one
    with the same name and fields. An object (such as a ``transformers`` ``ModelOutput``) is rebuilt if its class is
    registered with torch's pytree; otherwise it becomes a dict.

    >>> restructure("", ["only"]), restructure("", ["a", "b"])
    ('only', ('a', 'b'))
    """
    if not structure:
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    try:
        return _decode(parsed(structure)["results"], outputs)
    except (KeyError, TypeError, ValueError) as error:  # the text may come from a file: any part may have any type
        if isinstance(error, GraphError):
            raise
        raise GraphError(f"graph structure: the description of the results is malformed: {error}") from error


def _decode(spec: Any, outputs: Sequence[Any]) -> Any:
    kind, content = _head(spec)
    if kind == "slot":
        if not isinstance(content, int) or not 0 <= content < len(outputs):
            raise GraphError(f"graph structure: output {content!r} does not exist, the graph has {len(outputs)}")
        return outputs[content]
    if kind in ("value", "opaque"):
        return content
    if kind == "list":
        return [_decode(item, outputs) for item in content]
    if kind == "tuple":
        return tuple(_decode(item, outputs) for item in content)
    if kind == "dict":
        return {key: _decode(item, outputs) for key, item in content}
    items = {key: _decode(item, outputs) for key, item in spec["items"]}
    if kind == "namedtuple":
        made = named_tuple(content, tuple(items))
        return made._make(items.values()) if hasattr(made, "_make") else made(items.values())
    if content == _class_name(OrderedDict()):
        return OrderedDict(items)
    registered = _registered_class(content)
    return items if registered is None else registered(**items)


def named_tuple(name: str, members: tuple[str, ...]) -> Any:
    """Return the class of named tuples that a model of this process has, else one with the same name and fields.

    PyTorch's own, such as ``torch.return_types.topk``, are in each process.
    """
    module, _, last = name.rpartition(".")
    own = _NAMED_TUPLES.get(name)
    if own is None and module == "torch.return_types":
        own = getattr(sys.modules.get(module), last, None)
    known = getattr(own, "_fields", None) or getattr(own, "__match_args__", None)
    return own if known == members else _made(last, members)


@lru_cache(maxsize=256)  # to make a class takes longer than a run of a small model
def _made(name: str, members: tuple[str, ...]) -> Any:
    return namedtuple(name, members)


def _registered_class(name: str) -> type | None:
    """Return the class that is registered with torch's pytree under this module and name, if any."""
    pytree = sys.modules.get("torch.utils._pytree")
    if pytree is None:
        return None
    for found in list(pytree.SUPPORTED_NODES):
        # containers with fields that are keyword arguments; the registry also holds deques and the like
        if f"{found.__module__}.{found.__qualname__}" == name and (issubclass(found, Mapping) or is_dataclass(found)):
            return found if isinstance(found, type) else None
    return None


def nested_alike(structure: str, flat: str) -> str:
    """Return the description of a model's call for other sizes: results that are sizes take their places.

    `flat`: the description for others, with results in a flat tuple.

    >>> one = describe([("x", Slot(0))], [], {"y": [Slot(0)], "rows": 2})
    >>> restructure(nested_alike(one, describe([("arg", Slot(0))], [], (Slot(0), 3))), ["a"])
    {'y': ['a'], 'rows': 3}
    """
    data = parsed(structure)
    leaves = iter(parsed(flat)["results"]["tuple"])
    try:
        results = _with_leaves(data["results"], leaves)
    except (StopIteration, KeyError, TypeError) as error:
        raise GraphError("graph structure: the description of the results has other leaves than the program") from error
    if next(leaves, None) is not None:
        raise GraphError("graph structure: the description of the results has fewer leaves than the program")
    return json.dumps({**data, "results": results}, separators=(",", ":"))


def _with_leaves(spec: Any, leaves: Iterator[Any]) -> Any:
    kind, content = _head(spec)
    if kind in ("slot", "value", "opaque"):
        leaf = next(leaves)
        return leaf if kind == "value" else spec
    if kind in ("list", "tuple"):
        return {kind: [_with_leaves(item, leaves) for item in content]}
    if kind == "dict":
        return {kind: [[key, _with_leaves(item, leaves)] for key, item in content]}
    return {**spec, "items": [[key, _with_leaves(item, leaves)] for key, item in spec["items"]]}


# ---------------------------------------------------------------- arguments


def argument_names(structure: str) -> list[str]:
    """Return the names of the model's arguments in order; empty if inputs have only positions.

    >>> argument_names(describe([("x", Slot(0))], [("mode", "fast")], Slot(0))), argument_names("")
    (['x', 'mode'], [])
    """
    if not structure:
        return []
    data = parsed(structure)
    return [name for name, _ in [*data["positional"], *data["keyword"]]]


def flatten_arguments(structure: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Flatten a call's arguments into the inputs of the graph.

    `structure`: text from :func:`describe`; ``""`` means positional inputs.
    """
    if not structure:
        if kwargs:
            raise InputError(f"this graph takes its inputs by position; got keyword {next(iter(kwargs))!r}")
        return list(args)
    data = parsed(structure)
    positional = [name for name, _ in data["positional"]]
    declared: dict[str, Any] = dict([*data["positional"], *data["keyword"]])
    given = _bind(positional, list(declared), args, kwargs)
    found: dict[int, Any] = {}
    for name, spec in declared.items():
        if name in given:
            _take(name, spec, given[name], found)
        elif _has_slot(spec):
            raise InputError(f"argument {name!r} is missing; the model was imported with {', '.join(declared)}")
    return [found[index] for index in sorted(found)]


def _bind(positional: list[str], names: list[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    listed = ", ".join(names) or "none"
    if len(args) > len(positional):
        raise InputError(
            f"got {len(args)} positional arguments; the model was imported with {len(positional)}: "
            f"{', '.join(positional) or 'none'}"
        )
    given = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise InputError(
                f"unknown argument {name!r}; the model was imported with {listed}. Import it again with it"
            )
        if name in given:
            raise InputError(f"argument {name!r} is given twice, by position and by name")
        given[name] = value
    return given


def _take(path: str, spec: Any, value: Any, found: dict[int, Any]) -> None:
    kind, content = _head(spec)
    if kind == "slot":
        found[content] = value
    elif kind == "value":
        if not _is_same(value, content):
            raise _changed(path, value, repr(content))
    elif kind == "opaque":
        if repr(value) != content:
            raise _changed(path, value, content)
    elif kind in ("list", "tuple"):
        if not isinstance(value, list | tuple) or len(value) != len(content):
            raise InputError(f"argument {path}: expected {len(content)} items in a {kind}, got {_shown(value)}")
        for i, (item, child) in enumerate(zip(value, content, strict=True)):
            _take(f"{path}[{i}]", child, item, found)
    else:
        _take_named(path, content if kind == "dict" else spec["items"], value, found)


def _is_same(value: Any, content: Any) -> bool:
    """Whether a number or text equals the value at import; NaN equals NaN."""
    if isinstance(value, bool) != isinstance(content, bool) or not isinstance(value, _SCALARS):
        return False
    return bool(value == content or (value != value and content != content))


def _take_named(path: str, items: Iterable[Any], value: Any, found: dict[int, Any]) -> None:
    expected = {key: child for key, child in items}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, Mapping):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if not isinstance(value, Mapping) or set(value) != set(expected):
        raise InputError(f"argument {path}: expected the keys {', '.join(map(repr, expected))}, got {_shown(value)}")
    for key, child in expected.items():
        _take(f"{path}[{key!r}]", child, value[key], found)


def _changed(path: str, value: Any, was: str) -> InputError:
    return InputError(
        f"argument {path}: got {_shown(value)}, but the model was imported with {was}, which is fixed in the graph; "
        "import it again with the new value"
    )


def _shown(value: Any) -> str:
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(repr, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _has_slot(spec: Any) -> bool:
    return re.search(r'"slot":', json.dumps(spec)) is not None


# ---------------------------------------------------------------- reading the text


@lru_cache(maxsize=256)  # called in every run of a model; callers must not change the result
def parsed(structure: str) -> Any:
    """Return a description as plain data: an object with three parts; their content is not checked."""
    try:
        data = json.loads(structure)
    except ValueError as error:
        raise GraphError(f"graph structure: not JSON: {error}") from error
    except RecursionError as error:
        raise GraphError("graph structure: nested too deeply") from error
    if not isinstance(data, dict) or set(data) != {"positional", "keyword", "results"}:
        raise GraphError("graph structure: expected an object with the keys positional, keyword, results")
    return data


def _head(spec: Any) -> tuple[str, Any]:
    kinds = ("slot", "value", "opaque", "list", "tuple", "dict", "namedtuple", "object")
    if isinstance(spec, dict):
        for kind in kinds:
            if kind in spec:
                return kind, spec[kind]
    raise GraphError(f"graph structure: expected an object with one of the keys {', '.join(kinds)}, got {spec!r}")
