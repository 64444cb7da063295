"""What random models found: the smallest model of each failure, compiled under every policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fmtprop as fp
from tests.models.fuzz import differ

torch.manual_seed(0)


class Call(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "the check of a copy of a broadcast tensor": (
        lambda x: x.expand(2, 2, 12, 3, 8, 2),
        (torch.randn(2, 12, 1, 8, 2),),
    ),
}


@pytest.mark.parametrize("policy", ["propagate", "naive", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_pytorch(name, policy, tmp_path, monkeypatch):
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))
    function, inputs = CASES[name]
    net = fp.compile(Call(function), inputs, policy=policy)
    for _ in range(2):
        assert differ(net(*inputs), function(*inputs)) is None
