"""Attributes that a module's forward pass changes: a graph has no state.

Owns the restoring of attributes, and the difference between state, which changes at each call, and a cache, which the
first call makes. Must not know programs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set)

#: PyTorch's own attributes, which tracing replaces for a while
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights"})


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Undo assignments of attributes and changes of their lists, dicts and sets; give a function that names them."""
    before = _attributes(module)
    try:
        yield lambda: _changed(before, _attributes(module))
    finally:
        for child, attributes, contents in before.values():
            vars(child).clear()
            vars(child).update(attributes)
            for name, content in contents.items():
                container = attributes[name]
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def warn_of_state(module: nn.Module, call: Callable[[], object]) -> None:
    """Warn if a module changes attributes at every call: it is called twice, and its attributes are restored."""
    changed = set()
    # the user's code may raise anything; what it draws is undone
    with suppress(Exception), torch.random.fork_rng(devices=[]), attributes_kept(module):
        call()
        first = _attributes(module)
        call()
        changed = _changed(first, _attributes(module))
    if changed:
        warnings.warn(
            f"{type(module).__name__} changes its attributes {', '.join(sorted(changed))} at every call; a graph has "
            "no state, so each run has those of the first call. Pass the state as an input and return it",
            RuntimeWarning,
            stacklevel=2,
        )


_Attributes = dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def _attributes(module: nn.Module) -> _Attributes:
    """Return each module's attributes, and copies of those that are containers."""
    return {
        name: (
            child,
            {**vars(child)},
            {key: copy.copy(value) for key, value in vars(child).items() if isinstance(value, _CONTAINERS)},
        )
        for name, child in module.named_modules()
    }


def _changed(before: _Attributes, after: _Attributes) -> set[str]:
    found = set()
    for name, (_, attributes, contents) in after.items():
        _, old, old_contents = before.get(name, (None, {}, {}))
        for key in (attributes.keys() | old.keys()) - _OWN:
            if "_hooks" in key:
                continue
            one = old_contents.get(key, old.get(key))
            other = contents.get(key, attributes.get(key))
            if not _same(one, other):
                found.add(f"{name}.{key}" if name else key)
    return found


def _same(one: object, other: object) -> bool:
    """Return whether two values are alike; of objects whose meaning is not known, the type counts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return type(one) in (torch.Tensor, nn.Parameter) and torch.equal(one, other)  # others may have no data
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return one == other if isinstance(one, bool | int | float | str | set | None) else True
