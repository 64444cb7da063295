"""A method of a module as a module: ``model.decode`` instead of ``model.forward``."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn


class Method(nn.Module):
    """A module whose forward pass is a method of another module, which it shares."""

    def __init__(self, method: MethodType) -> None:
        super().__init__()
        self.model = method.__self__
        vars(self)["forward"] = method  # with the method's own signature


def as_module(model: Any) -> Any:
    """Return a method of a module as a module, named like it; anything else as it is.

    >>> as_module(nn.Linear(2, 2).forward).__class__.__name__
    'Linear.forward'
    """
    if not isinstance(model, MethodType) or not isinstance(model.__self__, nn.Module):
        return model
    named = type(f"{type(model.__self__).__name__}.{model.__name__}", (Method,), {})
    return named(model)
