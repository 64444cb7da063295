"""Functions are about as exact as PyTorch's: a kernel with a larger error is known to be bad."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

import fmtprop as fp
from tests.modules import Function

#: how many times PyTorch's error a function may have
MOST = 4.0

#: without those that lose digits next to their zeros, such as elu (docs/numerics.md)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "pow": lambda x: x.abs() ** 1.5,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softmax": lambda x: F.softmax(x, -1),
    "softplus": F.softplus,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "tanh": torch.tanh,
}


def test_functions_are_as_exact_as_pytorchs():
    def every(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x) for function in FUNCTIONS.values())

    x = 3 * torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))
    net = fp.compile(Function(every), x, policy="propagate", tune="model")
    for name, got, theirs, right in zip(FUNCTIONS, net(x), every(x), every(x.double()), strict=True):
        assert spread(got, right) <= max(MOST * spread(theirs, right), 2e-7), name


def spread(got: torch.Tensor, right: torch.Tensor) -> float:
    """Return the root of the mean square of the differences, relative to that of the right numbers."""
    return float((got.double() - right).norm() / right.norm())


def test_softplus_is_never_negative():
    x = torch.linspace(-60, 20, 4096).view(64, 64)
    for policy in ("propagate", "optimal"):
        net = fp.compile(Function(lambda x: F.softplus(x).sqrt()), (x,), policy=policy)
        torch.testing.assert_close(net(x), F.softplus(x).sqrt(), rtol=1e-5, atol=1e-6)
