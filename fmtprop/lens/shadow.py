"""Prediction of the gain of channels_last: each operator runs in both memory formats, one after the other.

Each tensor has a shadow: the same numbers in the memory format that they have in a channels-last run. An operator runs
on tensors and on shadows, and both are timed. The next operator takes the shadow's result, so PyTorch's own rules
propagate the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fmtprop.lens.gain import LEAST_TURNS, LONGEST_SECONDS, Gain, gain_of

#: runs that fill caches
_WARMUP_RUNS = 2


def channels_last_saving(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Gain:
    """Return the seconds of a run that channels_last should save.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode; it is not changed.
    inputs : sequence of torch.Tensor
        Its arguments.
    """
    shadows = WeakTensorKeyDictionary()
    for tensor in (*module.parameters(), *module.buffers(), *inputs):
        if tensor.dim() == 4:
            shadows[tensor] = tensor.detach().to(memory_format=torch.channels_last, copy=True)
    # the second of two runs finds more in caches, so each format comes second equally often
    for _ in range(_WARMUP_RUNS):
        _both(module, inputs, shadows, shadow_first=False)
    turns: list[list[float]] = []
    end = monotonic() + LONGEST_SECONDS
    while True:
        first, second = (_both(module, inputs, shadows, shadow_first=order) for order in (False, True))
        turns.append([seconds / 2 for both in (first, second) for seconds in both.saved])
        if len(turns) % LEAST_TURNS == 0:
            gain = gain_of(turns)
            if gain.is_narrow(first.seconds) or monotonic() > end:
                return gain


def _both(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], shadows: WeakTensorKeyDictionary, *, shadow_first: bool
) -> _Both:
    both = _Both(shadows, shadow_first)
    with both:
        module(*inputs)
    return both


class _Both(TorchDispatchMode):
    """Runs each operator on tensors and on their shadows."""

    def __init__(self, shadows: WeakTensorKeyDictionary, shadow_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows, self._shadow_first = shadows, shadow_first
        #: seconds that each operator saves on shadows, and seconds of all of them without shadows
        self.saved: list[float] = []
        self.seconds = 0.0

    def _shadow_of(self, tensor: torch.Tensor) -> torch.Tensor:
        shadow: torch.Tensor = self._shadows.get(tensor, tensor)  # type: ignore[no-untyped-call]
        return shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = tree_map_only(torch.Tensor, self._shadow_of, (args, kwargs))
        given, shadowed = tree_leaves((args, kwargs)), tree_leaves(changed)
        if all(one is other for one, other in zip(given, shadowed, strict=True)):
            return func(*args, **kwargs)
        if self._shadow_first:
            other, later = _timed(func, *changed)
            result, now = _timed(func, args, kwargs)
        else:
            result, now = _timed(func, args, kwargs)
            other, later = _timed(func, *changed)
        self.saved.append(now - later)
        self.seconds += now
        for one, shadow in zip(tree_leaves(result), tree_leaves(other), strict=True):
            if isinstance(one, torch.Tensor) and one.stride() != shadow.stride():
                self._shadows[one] = shadow
        return result


def _timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    start = perf_counter()
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # the format cannot express this view: copy like reshape
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.contiguous(), (args, kwargs))
        result = func(*args, **kwargs)
    return result, perf_counter() - start
