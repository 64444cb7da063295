"""Numbers that a module reads from its own small buffers while it is exported.

``if self.fake_quant_enabled[0] == 1`` is a branch of each FakeQuantize module (PyTorch's quantization-aware training,
and what NNCF strips its layers to). torch.export has no numbers to decide it by.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fmtprop.ops.pytorch import tree_leaves, tree_map_only, without_modes

#: numbers of a buffer that a module may branch on: flags, counters, a few sizes
_MOST = 16


class KnownNumbers:
    """The numbers of small buffers, and of what is computed from these alone, until the forward pass changes one."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = {name: one.clone() for name, one in module.named_buffers() if one.numel() <= _MOST}
        self._known: Any = WeakIdKeyDictionary()

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Learn which tensors stand for the buffers; a hook before the forward pass."""
        for name, stand_in in module.named_buffers():
            if name in self._buffers:
                self._known[stand_in] = self._buffers[name]

    def are_read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the numbers of an argument are known."""
        if torch.compiler.is_dynamo_compiling() or not self._known:  # it traces branches of control flow, and this mode
            return False
        return any(one in self._known for one in self._tensors(args, kwargs))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a function that reads known numbers: a number where the exporter has none."""
        tensors = self._tensors(args, kwargs)
        known = [one for one in tensors if one in self._known]
        versions = [one._version for one in known]
        numbers = self._computed(func, args, kwargs) if len(known) == len(tensors) else None
        if isinstance(numbers, bool | int | float):
            return numbers
        result = func(*args, **kwargs)
        if versions != [one._version for one in known]:
            self._known.clear()  # a view of it may be among the others
        elif isinstance(result, torch.Tensor) and isinstance(numbers, torch.Tensor) and numbers.shape == result.shape:
            self._known[result] = numbers
        return result

    @staticmethod
    def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with without_modes(), torch.DisableTorchFunction(), suppress(Exception):
            real = tree_map_only(torch.Tensor, lambda one: self._known[one].clone(), (args, dict(kwargs)))
            return func(*real[0], **real[1])
        return None
