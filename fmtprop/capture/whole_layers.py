"""Recurrent layers as one call each while a module is exported.

PyTorch's exporter keeps the call, but goes through all steps of it to learn the sizes of its results: 0.2 seconds a
step where sizes are symbols, and no step count may be one. Here, sizes follow from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from fmtprop.capture.pytorch import FakeTensor, with_rule

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def whole_layers() -> Iterator[None]:
    """Let calls of recurrent layers tell the sizes of their results, where no gradient goes through them."""
    with ExitStack() as restored:
        for name in _LAYERS:
            overload = getattr(torch.ops.aten, name).input
            restored.callback(with_rule(overload, partial(partial, _results)))
        yield


def _results(in_parts: Callable[..., Any], src: Any, states: Any, weights: Any, *how: Any) -> Any:
    """Return results without numbers; `how`: has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    given = [states] if isinstance(states, torch.Tensor) else list(states)
    tensors = (src, *given, *weights)
    has_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if has_gradient or not all(isinstance(one, FakeTensor) for one in tensors):
        return in_parts(src, states, weights, *how)
    *_, bidirectional, batch_first = how
    first, second = (src.shape[1], src.shape[0]) if batch_first else src.shape[:2]
    dst = src.new_empty(first, second, (1 + bidirectional) * given[0].shape[-1])
    return (dst.transpose(0, 1) if batch_first else dst, *[torch.empty_like(one) for one in given])
