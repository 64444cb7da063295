"""Equal ONNX nodes become the same nodes, and others do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.frontends.onnx import from_onnx, templates
from fmtprop.frontends.onnx.operators.values import data
from fmtprop.frontends.onnx.recording import Recording
from fmtprop.frontends.onnx.steps import Step


@pytest.fixture(autouse=True)
def table(monkeypatch):
    found = {}
    monkeypatch.setattr(templates, "_TEMPLATES", found)
    return found


def model(nodes: str, inputs: str = "float[2, 3] x", outputs: str = "float[a, b] y") -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {nodes} }}')


def check(made: onnx.ModelProto, **feeds: np.ndarray) -> None:
    feeds = feeds or {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    graph = from_onnx(made)
    result = fp.compile(graph, policy="plain", verify="off")(*map(torch.from_numpy, feeds.values()))
    (expected,) = ReferenceEvaluator(made).run(None, feeds)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def rows(graph: fp.Graph) -> list[object]:
    return [(node, graph.inputs(node.name)) for node in graph.nodes()]


LAYERS = """
    w = Constant<value = float[3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}>()
    low = Constant<value_float = 0.0>() high = Constant<value_float = 6.0>()
    a = MatMul(x, w) b = Clip(a, low, high) c = Add(b, x) d = MatMul(c, w) e = Clip(d, low, high) y = Add(e, c)
"""


def test_layers_are_learned_once_and_made_again(table, monkeypatch):
    first = from_onnx(model(LAYERS))
    assert len(table) == 3
    ran = []
    monkeypatch.setattr(templates.Recording, "add", lambda *_: ran.append(1))
    assert rows(from_onnx(model(LAYERS))) == rows(first) and not ran
    assert [node.origin for node in first.nodes() if node.op == "matmul"] == ["a", "d"]


def test_results_are_right_after_a_template():
    for _ in range(2):
        check(model(LAYERS))


RESHAPE = "s = Constant<value_ints = [%s]>() y = Reshape(x, s)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("y = Add(x, x)", "z = Neg(x) y = Sub(x, z)"),
        ("z = Neg(x) a = Add(z, z) y = Add(z, a)", "z = Neg(x) a = Add(z, x) y = Add(a, z)"),
        ("y = Transpose<perm = [0, 1]>(x)", "y = Transpose<perm = [1, 0]>(x)"),
        ("y = LeakyRelu<alpha = 0.1>(x)", "y = LeakyRelu<alpha = 0.2>(x)"),
        (RESHAPE % "3, 2", RESHAPE % "1, 6"),
        ("l = Constant<value_float = 0.0>() y = Clip(x, l)", "l = Constant<value_float = -0.5>() y = Clip(x, l)"),
        ("l = Constant<value_float = 0.0>() y = Clip(x, l)", "l = Constant<value_float = 0.0>() y = Clip(x, , l)"),
        ("y = Softmax<axis = 0>(x)", "y = Softmax<axis = 1>(x)"),
        ("y = ReduceSum<keepdims = 1>(x)", "y = ReduceMean<keepdims = 1>(x)"),
        ("z = Identity(x) y = Neg(z)", "y = Neg(x)"),
        ("z = Transpose(x) y = Flatten(z)", "z = Neg(x) y = Flatten(z)"),
    ],
)  # fmt: skip
def test_other_nodes_are_other_nodes(one, other):
    for nodes in (one, other, one):
        check(model(nodes))


@pytest.mark.parametrize(
    "read",
    [
        lambda factors: data(factors, "factors").sum(), lambda factors: factors.sum().item(),
        lambda factors: sum(factors.tolist()), lambda factors: data(factors.sum(), "their sum"),
    ],
    ids=["data", "item", "tolist", "result"],
)  # fmt: skip
@pytest.mark.parametrize("size", [8, 100])
def test_what_a_function_reads_is_compared_or_the_node_is_not_remembered(size, read, table):
    """A function may read the numbers of a constant; of a large one, the key has only the shape."""

    def scaled(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return x * float(read(factors))

    def last(number: float) -> float:
        recording = Recording()
        with torch.no_grad(), recording.on():
            x, factors = recording.input((2,), torch.float32), recording.traced(torch.full((size,), number))
            step = Step(onnx.NodeProto(), "Scaled", "", ["x", "f"], ["y"], 1, scaled, {}, "node y (Scaled)")
            templates.run_step(step, [x, factors], recording, lambda: scaled(x, factors))
        assert len(recording.learned) <= (size <= 64)
        for one in recording.learned:
            table[one.key] = None
        return recording.calls[-1].args[1]

    assert last(1.0) == size and last(2.0) == 2 * size
    assert all(size <= 64 for _ in table) and len(table) in (0, 2)


SPLIT = "s = Constant<value_ints = [1, 2]>() a, b = Split<axis = 1>(x, s)"


def test_several_results_are_learned_once_and_made_again(table, monkeypatch):
    layers = f"{SPLIT} c = Concat<axis = 1>(b, a) d, e = Split<axis = 1>(c, s) y = Concat<axis = 1>(e, d)"
    first = from_onnx(model(layers))
    assert [template.several for template in table.values()] == [True, False]
    ran = []
    monkeypatch.setattr(templates.Recording, "add", lambda *_: ran.append(1))
    assert rows(from_onnx(model(layers))) == rows(first) and not ran
    check(model(layers))


def test_a_node_is_another_one_if_other_results_are_read():
    """An importer may leave out results that nobody reads."""
    keys = set()
    for outputs, unread in ((["v", "i"], []), (["v", "i"], ["i"]), (["v", "i"], ["v"]), (["v"], [])):
        recording = Recording()
        with torch.no_grad(), recording.on():
            x = recording.input((2, 2), torch.float32)
            step = Step(onnx.NodeProto(), "Top", "", ["x"], outputs, 1, torch.topk, {}, "node v (Top)", unread)
            templates.run_step(step, [x], recording, lambda: tuple(torch.topk(x, 1)))  # noqa: B023 (it runs here)
        keys |= {one.key for one in recording.learned}
    assert len(keys) == 4


def test_branches_and_functions_in_a_loop_are_right():
    nodes = """
        n = Constant<value_int = 3>() t = Constant<value_int = 1>() c = Cast<to = 9>(t)
        y = Loop(n, c, x) <body = b (int64 i, bool k, float[2, 3] s) => (bool k2, float[2, 3] u) {
            k2 = Identity(k) f = Cast<to = 1>(i) m = Mul(s, f) u = Add(m, s)
        }>
    """
    for _ in range(2):
        check(model(nodes))
