"""Recurrent layers by a kernel: offered for few sequences in f32, right in plans, formats of its own for weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.recurrent import KINDS, Recurrent
from fmtprop.targets.recurrent import recurrent_layers
from tests.targets.nodes import node_of, request
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def ways(kind: str, dtype: DataType = DataType.F32) -> list:
    types = {name: TensorType(type_.dims, dtype) for name, type_ in KINDS[kind].problem_types(4, 1, 8, 12, 2).items()}
    node = node_of(kind, Recurrent(bidirectional=True), types)
    given = {name: MemoryDesc.any(type_.dims, dtype) for name, type_ in types.items()}
    return list(recurrent_layers(node, node.attrs, request(node, given)))


@pytest.mark.parametrize("kind", ["lstm", "lbr_gru"])
def test_weights_have_blocks_of_states(kind):
    ((kernel, operands, _),) = ways(kind)
    assert kernel.is_offered and kernel.directions == 2
    assert operands["weights_iter"].padded_dims[-1] == 16 and operands["weights_iter"].inner_blocks


def test_other_types_and_layers_are_left_to_onednn():
    assert not ways("lstm", DataType.BF16) and not ways("lbr_gru", DataType.BF16)
    assert not ways("vanilla_rnn")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_plans_take_it_for_one_sequence(kind, batch_first):
    torch.manual_seed(0)
    module = getattr(nn, kind)(24, 40, num_layers=2, bidirectional=True, batch_first=batch_first).eval()
    x = torch.randn(1, 9, 24) if batch_first else torch.randn(9, 1, 24)
    with torch_threads(1):  # more threads than directions would have nothing to do
        net = fmtprop.compile(module, (x,), deterministic=True)
        assert {node.choice.target for node in net.graph.nodes() if node.op in KINDS} == {"jit"}
        with torch.no_grad():
            torch.testing.assert_close(net(x)[0], module(x)[0], rtol=1e-5, atol=1e-6)
