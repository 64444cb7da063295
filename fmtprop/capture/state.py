"""Attributes that a module's forward pass changes: a graph has no state, and the user's objects stay as they are.

Owns the undoing of changes, and the difference between state, which changes at each call, and a cache, which the first
call makes. Must not know programs.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

#: Python's containers, the most derived first: a container of another class is read and written as one of these, past
#: its own methods, which may refuse or do more
_CONTAINERS = (OrderedDict, dict, list, set, deque)

#: PyTorch's own attributes, which tracing replaces for a while
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights"})

#: objects of these packages are not looked into: their state is no model's
_NOT_A_MODELS = sys.stdlib_module_names | {"torch", "numpy"}

#: the nearest objects of a module: beyond lie data sets and tokenizers, not what a forward pass changes
_MOST_OBJECTS = 100_000


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Undo changes of attributes and of Python's containers in them; give a function that names changed attributes.

    Nothing is written but what the block changed, and that alone.
    """
    before = _holders(module)
    try:
        yield lambda: _changed(before, _holders(module))
    finally:
        _undo(before)


def warn_of_state(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Warn if a module changes attributes at every call: it is called twice, and its attributes are restored."""
    changed = set()
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    # the user's code may raise anything; what it draws is undone
    with suppress(Exception), torch.random.fork_rng(devices=[]), attributes_kept(module):
        functional_call(module, buffers, args, dict(kwargs))
        first = _holders(module)
        functional_call(module, buffers, args, dict(kwargs))
        changed = _changed(first, _holders(module))
    if changed:
        warnings.warn(
            f"{type(module).__name__} changes its attributes {', '.join(sorted(changed))} at every call; a graph has "
            "no state, so each run has those of the first call. Pass the state as an input and return it",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Holder:
    """An object that refers to others, and to which."""

    owner: Any
    name: str
    #: Python's container that the owner is one of; None for attributes
    kind: type | None
    #: keys and values; of attributes, the key of one in a slot is the slot's descriptor
    content: tuple[tuple[Any, Any], ...]

    def now(self) -> tuple[tuple[Any, Any], ...]:
        """Return the present content."""
        return _attributes(self.owner) if self.kind is None else _items(self.owner, self.kind)


_Holders = dict[tuple[int, bool], _Holder]


def _holders(module: nn.Module) -> _Holders:
    """Return all that a module reaches, the nearest first, by identity."""
    found: _Holders = {}
    waiting: deque[tuple[Any, str]] = deque([(module, "")])
    seen = {id(module)}
    while waiting and len(found) < _MOST_OBJECTS:
        owner, name = waiting.popleft()
        for holder in _held(owner, name):
            found[id(owner), holder.kind is None] = holder
            for key, value in holder.content:
                if id(value) not in seen and _refers(value):
                    seen.add(id(value))
                    waiting.append((value, _path(name, key)))
    return found


def _held(owner: Any, name: str) -> Iterator[_Holder]:
    kind = next((kind for kind in _CONTAINERS if isinstance(owner, kind)), None)
    if kind is not None:
        yield _Holder(owner, name, kind, _items(owner, kind))
    if type(owner) is not kind:
        yield _Holder(owner, name, None, _attributes(owner))


def _refers(value: object) -> bool:
    """Return whether a value is a container or a user's object."""
    if isinstance(value, (*_CONTAINERS, nn.Module)):
        return True
    if isinstance(value, type | types.ModuleType | torch.Tensor):
        return False
    return type(value).__module__.partition(".")[0] not in _NOT_A_MODELS


def _items(owner: Any, kind: type) -> tuple[tuple[Any, Any], ...]:
    """Return a container's keys and values by Python's own functions."""
    if issubclass(kind, dict):
        return tuple(kind.items(owner))
    values = kind.__iter__(owner)  # type: ignore[attr-defined]
    return tuple((None, value) for value in values) if kind is set else tuple(enumerate(values))


def _attributes(owner: Any) -> tuple[tuple[Any, Any], ...]:
    """Return an object's attributes, in its dict and in slots; no property is asked."""
    found: list[tuple[Any, Any]] = list(_dict(owner).items())
    for each in type(owner).__mro__:
        for slot in vars(each).values() if "__slots__" in vars(each) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):  # a slot without a value
                    found.append((slot, slot.__get__(owner)))
    return tuple(found)


def _dict(owner: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _path(name: str, key: Any) -> str:
    text = str(key) if isinstance(key, str | int) else getattr(key, "__name__", "")
    return ".".join(part for part in (name, text) if part and part != "_modules")


def _undo(before: _Holders) -> None:
    try:
        for holder in before.values():
            _put_back(holder)
    except KeyboardInterrupt:  # half undone would be worse than late
        _undo(before)
        raise


def _put_back(holder: _Holder) -> None:
    now, owner, kind = holder.now(), holder.owner, holder.kind
    if _identical(now, holder.content):
        return
    if kind is None:
        _put_attributes(owner, dict(now), dict(holder.content))
    elif issubclass(kind, dict):
        _put_entries(owner, kind, now, holder.content)
    elif kind is list:
        list.__setitem__(owner, slice(None), [value for _, value in holder.content])
    elif kind in (set, deque):
        kind.clear(owner)
        (set.update if kind is set else deque.extend)(owner, [value for _, value in holder.content])


def _put_attributes(owner: Any, now: dict[Any, Any], old: dict[Any, Any]) -> None:
    attributes = _dict(owner)
    for key in now.keys() - old.keys():
        key.__delete__(owner) if isinstance(key, types.MemberDescriptorType) else attributes.pop(key)
    for key, value in old.items():
        if key in now and now[key] is value:
            continue
        key.__set__(owner, value) if isinstance(key, types.MemberDescriptorType) else attributes.update({key: value})


def _put_entries(owner: Any, kind: Any, now: tuple[tuple[Any, Any], ...], old: tuple[tuple[Any, Any], ...]) -> None:
    if [id(key) for key, _ in now] != [id(key) for key, _ in old]:  # their order is a part of the content
        for key, _ in now:
            kind.__delitem__(owner, key)
    for key, value in old:
        kind.__setitem__(owner, key, value)


def _identical(one: tuple[tuple[Any, Any], ...], other: tuple[tuple[Any, Any], ...]) -> bool:
    return len(one) == len(other) and all(
        (key is own or key == own) and value is held for (key, value), (own, held) in zip(one, other, strict=True)
    )


def _changed(before: _Holders, after: _Holders) -> set[str]:
    """Return the names of attributes and containers with other contents, of objects that are in both."""
    found = set()
    for key in before.keys() & after.keys():
        one, other = before[key], after[key]
        if _is_pytorchs(one.name) or _identical(one.content, other.content):
            continue
        if one.kind is not None:
            found |= set() if _same([*one.content], [*other.content]) else {one.name}
            continue
        old, new = dict(one.content), dict(other.content)
        differing = (name for name in old.keys() | new.keys() if not _same(old.get(name), new.get(name)))
        found |= {name for name in (_path(one.name, name) for name in differing) if not _is_pytorchs(name)}
    return found


def _is_pytorchs(name: str) -> bool:
    return any(part in _OWN or "_hooks" in part for part in name.split("."))


def _same(one: object, other: object) -> bool:
    """Return whether two values are alike; of objects whose meaning is not known, the type counts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return type(one) in (torch.Tensor, nn.Parameter) and torch.equal(one, other)  # others may have no data
    kind = next((kind for kind in (*_CONTAINERS, tuple) if type(one) is kind), None)
    if kind is set or kind is None:
        return one == other if isinstance(one, bool | int | float | str | set | None) else True
    if kind is tuple:
        kind = list
        one, other = list(one), list(other)  # type: ignore[call-overload]
    return _alike(_items(one, kind), _items(other, kind))


def _alike(one: tuple[tuple[Any, Any], ...], other: tuple[tuple[Any, Any], ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(key == own and _same(value, held) for (key, value), (own, held) in pairs)
