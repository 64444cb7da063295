"""Recurrent layers as one call each while a module is exported.

PyTorch's exporter keeps the call, but goes through all its steps to learn the sizes of its results: a GRU of 144 steps
and any number of sequences takes 26 seconds, and the number of steps cannot be a symbol. Here, sizes follow from those
of the arguments. (Calls with a gradient are another matter: :mod:`fmtprop.training.recurrent`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from fmtprop.capture.pytorch import FakeTensor, with_rule

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def whole_layers() -> Iterator[None]:
    """Let calls of recurrent layers tell the sizes of their results, where no gradient goes through them.

    PyTorch's rules are the process's: another thread that traces a model meanwhile still gets all steps.
    """
    with ExitStack() as restored:
        for name in _LAYERS:
            overload = getattr(torch.ops.aten, name).input
            restored.callback(with_rule(overload, partial(partial, _results, get_ident())))
        yield


def _results(thread: int, in_parts: Callable[..., Any], src: Any, states: Any, weights: Any, *how: Any) -> Any:
    """Return results without numbers; `how`: has_biases, num_layers, dropout, train, bidirectional, batch_first."""
    given = [states] if isinstance(states, torch.Tensor) else list(states)
    tensors = (src, *given, *weights)
    has_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    are_exported = thread == get_ident() and all(isinstance(one, FakeTensor) for one in tensors)
    if has_gradient or not are_exported:
        return in_parts(src, states, weights, *how)
    *_, bidirectional, batch_first = how
    first, second = (src.shape[1], src.shape[0]) if batch_first else src.shape[:2]
    dst = src.new_empty(first, second, (1 + bidirectional) * given[0].shape[-1])
    return (dst.transpose(0, 1) if batch_first else dst, *[torch.empty_like(one) for one in given])
