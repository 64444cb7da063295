"""Rows of classes (one hot) of captured graphs as one call, which checks them: PyTorch would trace the check apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def whole_one_hot(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return PyTorch's function as one call, or as it is where classes are counted in the numbers."""

    def call(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if isinstance(num_classes, int) and num_classes > 0 and tensor.dtype is torch.int64:
            made: Tensor = _one_hot(tensor, num_classes)
            return made
        return function(tensor, num_classes)

    call.__name__ = call.__qualname__ = function.__name__
    return call


@torch.library.custom_op("fmtprop::one_hot", mutates_args=())
def _one_hot(classes: Tensor, count: int) -> Tensor:
    return torch.nn.functional.one_hot(classes, count)


@_one_hot.register_fake
def _(classes: Tensor, count: int) -> Tensor:
    return classes.new_empty((*classes.shape, count))
