"""The calls of a module whose forward pass computes derivatives, which torch.export does not trace.

Owns the tracing of one run with ``torch.func`` and ``torch.autograd.grad``. Must not know programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fmtprop.capture.state import attributes_kept


def with_derivatives(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function with the calls of a module's forward pass, those of derivatives included.

    It reads the module's parameters and buffers at each call. Its calls are for the sizes of the example arguments.
    PyTorch and the module may raise anything.
    """

    def run(state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(module, state, args, kwargs)

    with attributes_kept(module), torch.enable_grad():
        given = (_state(module), tuple(args), dict(kwargs))
        try:
            calls = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
            is_mixed = any(str(node.kwargs.get("device")) == "meta" for node in calls.graph.nodes)
        except RuntimeError as error:
            is_mixed = "devices" in str(error)
            if not is_mixed:
                raise
        if is_mixed:  # in some forward derivatives, PyTorch mixes tensors without data up with those of device "meta"
            calls = make_fx(run)(*pytree.tree_map_only(torch.Tensor, torch.clone, given))
    for name, made in list(calls.named_buffers()):
        setattr(calls, name, made.detach())  # numbers that PyTorch made meanwhile: they are constants of the graph
    return lambda *args, **kwargs: calls(_state(module), args, kwargs)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])
