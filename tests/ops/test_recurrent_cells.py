"""Recurrent cells become products and element-wise functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp

CELLS = {
    "gru": nn.GRUCell(5, 7), "lstm": nn.LSTMCell(5, 7), "tanh": nn.RNNCell(5, 7),
    "relu": nn.RNNCell(5, 7, nonlinearity="relu"), "no_bias": nn.GRUCell(5, 7, bias=False),
}  # fmt: skip


class Loop(nn.Module):
    """A sequence, cell by cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, xs, state):
        for x in xs:
            state = self.cell(x, state)
        return state


@pytest.mark.parametrize("rows", [(), (3,)], ids=["no_batch", "three"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_loop_of_cells_needs_no_step_of_pytorch(kind: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    states = [torch.randn(*rows, 7) for _ in range(2)]
    module, given = Loop(CELLS[kind]), (torch.randn(2, *rows, 5), tuple(states) if kind == "lstm" else states[0])
    net = fp.compile(module, given, tune="model", confirm=False)
    assert not [step.node for step in net.plan.steps if step.node.op == "aten"]
    with torch.no_grad():
        torch.testing.assert_close(net(*given), module(*given))
