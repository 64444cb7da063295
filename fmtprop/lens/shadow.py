"""Prediction of the gain of channels_last: each operator runs in both memory formats, one after the other.

Each tensor has a shadow: the same numbers in the memory format that they have in a channels-last run. An operator runs
on tensors and on shadows, and both are timed. The next operator takes the shadow's result, so PyTorch's own rules
propagate the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["channels_last_saving"]

#: runs that fill caches, and runs in each order over which medians are taken
_WARMUP_RUNS, _RUNS = 2, 5


def channels_last_saving(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> float:
    """Return the seconds of a run that channels_last should save, negative for a loss.

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
        _saved(module, inputs, shadows, shadow_first=False)
    orders: tuple[list[list[float]], ...] = ([], [])
    for _ in range(_RUNS):
        for order, runs in enumerate(orders):
            runs.append(_saved(module, inputs, shadows, shadow_first=bool(order)))
    return sum(_sum_of_medians(runs) for runs in orders) / len(orders)


def _saved(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], shadows: WeakTensorKeyDictionary, *, shadow_first: bool
) -> list[float]:
    """Return the seconds that each operator of a run saves on shadows."""
    with _Both(shadows, shadow_first) as both:
        module(*inputs)
    saved: list[float] = both.saved
    return saved


def _sum_of_medians(runs: Sequence[Sequence[float]]) -> float:
    # an operator that another run did not call has no pair
    return sum((median(seconds) for seconds in zip(*runs, strict=False)), 0.0)


class _Both(TorchDispatchMode):
    """Runs each operator on tensors and on their shadows."""

    def __init__(self, shadows: WeakTensorKeyDictionary, shadow_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows, self._shadow_first = shadows, shadow_first
        #: seconds that each operator saves on shadows
        self.saved: list[float] = []

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
