"""Recurrent layers are one call each: any number of steps, and no walk through them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._decomp import decompositions
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import fmtprop as fp
from fmtprop.capture.whole_layers import whole_layers

OPTIONS = {"tune": "model", "confirm": False}


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **how: object) -> None:
        super().__init__()
        self.layers = kind(12, 8, **how)
        self.head = nn.Linear(8 * (1 + self.layers.bidirectional), 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, states = self.layers(x)
        return self.head(y).flatten(1).amax(1), states[0] if isinstance(states, tuple) else states


@pytest.mark.parametrize("how", [{}, {"batch_first": True, "bidirectional": True}, {"num_layers": 2}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_steps_and_sequences_are_dynamic(kind, how):
    torch.manual_seed(0)
    module = Tagger(kind, **how).eval()
    net = fp.compile(module, (torch.randn(2, 9, 12),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},), **OPTIONS)
    for dims in ((2, 9), (4, 5), (3, 20)):
        x = torch.randn(*dims, 12)
        with torch.no_grad():
            torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-5)


def test_a_projected_state_has_its_own_size():
    module = Tagger(nn.LSTM, proj_size=3, bidirectional=True).eval()
    module.head = nn.Linear(6, 5)
    x = torch.randn(4, 2, 12)
    with torch.no_grad():
        torch.testing.assert_close(fp.compile(module, (x,), **OPTIONS)(x), module(x), rtol=1e-4, atol=1e-5)


def test_no_step_is_gone_through_and_the_rules_of_pytorch_are_back(monkeypatch):
    rules = dict(torch.ops.aten.gru.input.py_kernels)

    def refuse(*_: object) -> None:
        raise AssertionError("a step")

    monkeypatch.setattr(decompositions, "gru_cell", refuse)
    fp.compile(Tagger(nn.GRU).eval(), (torch.randn(9, 2, 12),), **OPTIONS)
    assert torch.ops.aten.gru.input.py_kernels == rules


def test_a_gradient_goes_through_all_steps():
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = Tagger(nn.GRU)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.tagger(x)[0].sum(), x)[0]

    module, x = Force().eval(), torch.randn(4, 2, 12)
    net = fp.compile(module, (x,), **OPTIONS)
    torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-5)
    assert net(x).abs().max() > 0


def test_another_thread_still_traces_all_steps():
    """PyTorch's rules are the process's: sizes alone would be no results there."""
    layer, x = nn.GRU(6, 4), torch.randn(3, 2, 6)
    weights = [one.detach() for one in layer.parameters()]

    def run(x: torch.Tensor, state: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.gru(x, state, weights, True, 1, 0.0, False, False, False)[0]

    given = x, torch.zeros(1, 2, 4), weights
    with ThreadPoolExecutor() as others, whole_layers():
        calls = others.submit(make_fx(run, tracing_mode="symbolic"), *given).result()
    torch.testing.assert_close(calls(*given), run(*given))
