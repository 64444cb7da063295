"""Local response normalization of captured graphs as one call: PyTorch would trace the steps of which it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmtprop.ops.lrn import Lrn
from fmtprop.ops.lrn_training import is_compiled, reference, reference_backward


def whole_lrn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return PyTorch's function as one call, or as it is where oneDNN has no kernels of both passes."""

    def call(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
        numbers = int(size), float(alpha), float(beta), float(k)
        narrow = input.dtype is not torch.float32 or torch.is_autocast_enabled("cpu")
        changes = any(isinstance(one, torch.SymInt) for one in input.shape)
        if narrow or changes or size % 2 == 0 or not is_compiled(_attributes(*numbers), tuple(input.shape)):
            return function(input, size, alpha, beta, k)
        dst: Tensor = _lrn(input, *numbers)[0]
        return dst

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _attributes(size: int, alpha: float, beta: float, k: float) -> Lrn:
    return Lrn(size=size, alpha=alpha, beta=beta, k=k)


@torch.library.custom_op("fmtprop::lrn", mutates_args=())
def _lrn(src: Tensor, size: int, alpha: float, beta: float, k: float) -> tuple[Tensor, Tensor]:
    dst, workspace = reference(_attributes(size, alpha, beta, k), {"src": src})
    return dst, workspace


@_lrn.register_fake
def _(src: Tensor, size: int, alpha: float, beta: float, k: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(src), src.new_empty((1,), dtype=torch.uint8)


@torch.library.custom_op("fmtprop::lrn_backward", mutates_args=())
def _lrn_backward(
    src: Tensor, workspace: Tensor, diff_dst: Tensor, size: int, alpha: float, beta: float, k: float
) -> Tensor:
    return reference_backward(_attributes(size, alpha, beta, k), {"src": src, "diff_dst": diff_dst})[0]


@_lrn_backward.register_fake
def _(src: Tensor, workspace: Tensor, diff_dst: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    return torch.empty_like(src)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.numbers = inputs[1:]
    ctx.save_for_backward(inputs[0], output[1])


def _differentiate(ctx: Any, diff_dst: Tensor, _: Any) -> Any:
    return _lrn_backward(*ctx.saved_tensors, diff_dst, *ctx.numbers), None, None, None, None


_lrn.register_autograd(_differentiate, setup_context=_save)
