"""Small graphs and ops for the tests of the IR, independent of the real op set where that keeps a test exact."""

from __future__ import annotations

import torch

from fmtprop.ir import Graph, TensorType
from fmtprop.ops import Eltwise, emit

TYPE = TensorType((2, 8), "f32")


def relu(graph: Graph, value, name=None):
    return emit(graph, "eltwise", {"src": value}, Eltwise("relu"), name=name)


def chain() -> Graph:
    """x -> relu -> tanh -> output, and a constant that is an output too."""
    graph = Graph("chain")
    x = graph.input("x", TYPE)
    a = relu(graph, x, "a")
    b = emit(graph, "eltwise", {"src": a}, Eltwise("tanh"), name="b", origin="layer.act")
    w = graph.constant("w", TYPE, torch.arange(16.0).reshape(2, 8))
    graph.output(b, "y")
    graph.output(w, "z")
    return graph


def same(left: Graph, right: Graph) -> None:
    """Compare everything observable about two graphs."""
    assert left.name == right.name and left.structure == right.structure
    assert [n.name for n in left.nodes()] == [n.name for n in right.nodes()]
    assert left.nodes() == right.nodes()
    assert left.input_nodes == right.input_nodes and left.output_nodes == right.output_nodes
    for node in left.nodes():
        assert list(left.inputs(node.name).items()) == list(right.inputs(node.name).items())
    assert left.constants.keys() == right.constants.keys()
    for name, data in left.constants.items():
        other = right.constants[name]
        if isinstance(data, torch.Tensor):
            assert data.dtype == other.dtype and data.shape == other.shape
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (data, other)]
            assert torch.equal(*bits)
        else:
            assert data == other
