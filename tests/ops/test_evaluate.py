from __future__ import annotations

import pytest
import torch
from torch import nn

from fmtprop.capture import from_torch
from fmtprop.errors import GraphError, InputError
from fmtprop.ir import Graph, Node, PostOp, TensorType
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ops import Binary, Eltwise, Prelu, Sum, emit
from fmtprop.ops.evaluate import evaluate, evaluate_node
from fmtprop.ops.matmul import MatMul

TYPE = TensorType((2, 3))


def test_a_graph_with_constants_and_several_outputs():
    graph = Graph()
    x, y = graph.input("x", TYPE), graph.input("y", TYPE)
    half = graph.constant("half", TYPE, Initialiser.constant(0.5))
    product = emit(graph, "binary", {"src_0": x, "src_1": half}, Binary("mul"))
    for value in (emit(graph, "binary", {"src_0": product, "src_1": y}, Binary("sub")), half, x):
        graph.output(value)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    found = evaluate(graph, {"y": b, "x": a})
    assert [torch.equal(*pair) for pair in zip(found, (a * 0.5 - b, torch.full((2, 3), 0.5), a), strict=True)] == [
        True, True, True,
    ]  # fmt: skip


def test_post_ops_apply_in_order():
    tails = (
        PostOp("sum", Sum((2.0,)), "post_op_0"),
        PostOp("eltwise", Eltwise("relu")),
        PostOp("binary", Binary("sub"), "post_op_2"),
        PostOp("prelu", Prelu(), "post_op_3"),
    )
    node = Node("n", "eltwise", Eltwise("linear", 3.0, 0.0), (TYPE,), tails)
    x, s, b, w = (torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(4))
    (got,) = evaluate_node(node, {"src": x, "post_op_0": s, "post_op_2": b, "post_op_3": w})
    before = torch.relu(3 * x + 2 * s) - b
    torch.testing.assert_close(got, torch.where(before > 0, before, before * w))


def test_a_fused_tail_is_rounded_once():
    type_ = TensorType((1,), "bf16")
    node = Node("n", "eltwise", Eltwise("linear", 1.0, 0.0), (type_,), (
        PostOp("binary", Binary("add"), "post_op_0"), PostOp("binary", Binary("sub"), "post_op_1"),
    ))  # fmt: skip
    one, tiny = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-10, dtype=torch.bfloat16)
    (got,) = evaluate_node(node, {"src": one, "post_op_0": tiny, "post_op_1": one})
    assert got.dtype == torch.bfloat16 and got.item() == 2.0**-10


def test_a_product_is_not_rounded_before_its_tail():
    """Exp makes 6 % of a rounding of 16 to bf16: right kernels of a bf16 network were called wrong."""
    a, b = torch.full((1, 3), 2.34375, dtype=torch.bfloat16), torch.full((3, 1), 2.34375, dtype=torch.bfloat16)
    node = Node("n", "matmul", MatMul(), (TensorType((1, 1), "bf16"),), (PostOp("eltwise", Eltwise("exp")),))
    (got,) = evaluate_node(node, {"src": a, "weights": b})
    torch.testing.assert_close(got, torch.exp(a.float() @ b.float()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"graph graph has the inputs \['x'\], got \[\]"),
        ({"x": torch.zeros(2, 3), "z": torch.zeros(1)}, r"graph graph has the inputs \['x'\], got \['x', 'z'\]"),
        ({"x": torch.zeros(3, 2)}, r"input x is f32\[3,2\], must be f32\[2,3\]"),
        ({"x": torch.zeros(2, 3, dtype=torch.float16)}, r"input x is f16\[2,3\], must be f32\[2,3\]"),
    ],
)
def test_inputs_must_fit(inputs, message):
    graph = Graph()
    graph.output(graph.input("x", TYPE))
    with pytest.raises(InputError, match=message):
        evaluate(graph, inputs)


def test_released_constants_are_an_error():
    graph = Graph()
    graph.output(graph.constant("w", TYPE, torch.zeros(2, 3)))
    del graph.constants["w"]
    with pytest.raises(GraphError, match=r"node w \(constant\) has no data any more"):
        evaluate(graph, {})


def test_numbers_that_an_op_does_not_take_are_an_error_of_the_input():
    graph = from_torch(nn.Embedding(5, 2).eval(), (torch.zeros(3, dtype=torch.int64),))
    with pytest.raises(InputError, match=r"node aten_1 \(aten\): PyTorch declines these numbers: index out of range"):
        evaluate(graph, {graph.input_nodes[0].name: torch.tensor([1, 7, 2])})
