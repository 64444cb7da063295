"""Calls that PyTorch runs as the caller wrote them: these need no capture, and no check of a capture's conditions.

Owns the situations in which PyTorch was chosen for a module. A plain call is right in any situation, so the conditions
in one only say when a plan may be the faster.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class PlainCalls:
    """The situations in which a module's calls need no plan.

    `known`: situations in which PyTorch was chosen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.known: set[Hashable] = set()
        self._now = _Now()

    def has(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether PyTorch was chosen in the situation of a call."""
        return self._situation(args, kwargs) in self.known

    def learn(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the situation of this thread's last call if PyTorch ran it as it was written."""
        if self._now.is_plain:
            self._now.is_plain = False
            if len(self.known) < _MOST_KNOWN:  # an argument may be another number in each call
                self.known.add(self._situation(args, kwargs))
                self.known.discard(None)

    def tell(self) -> None:
        """Say that PyTorch ran this thread's present call as it was written."""
        self._now.is_plain = True

    def _situation(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """Return all that plans of this module depend on; None if an argument is not a tensor, a number or a text."""
        given: list[Hashable] = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind is torch.Tensor:
                given.append((value.shape, value.stride(), value.dtype, value.requires_grad))
            elif kind in _NUMBERS:
                given.append((kind, value))
            else:
                return None
        _add_modes(self._module, given)
        return tuple(given)


class _Now(threading.local):
    """The present call of a thread."""

    is_plain = False


#: most situations that are kept
_MOST_KNOWN = 64

_NUMBERS = frozenset({type(None), bool, int, float, str})


def _add_modes(module: nn.Module, given: list[Hashable]) -> None:
    """Add the modes of all modules, and the parameters that are trained."""
    given.append(module.training)
    for parameter in module._parameters.values():
        given.append(parameter is not None and parameter.requires_grad)
    for part in module._modules.values():
        if part is not None:
            _add_modes(part, given)
