from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.errors import GraphError
from fmtprop.ir import Choice, Graph, Node, PostOp, TensorType, Value
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.structure import Slot, describe
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Eltwise, Permute, Reshape, Slice, emit
from tests.ir.graphs import TYPE, chain, relu, same


def test_the_plain_form_is_plain():
    nxg = chain().to_networkx()
    assert nxg.graph == {"name": "chain", "structure": ""}
    assert nxg.nodes["b"] == {
        "op": "eltwise",
        "attrs": {"alg": "tanh", "alpha": 0.0, "beta": 0.0},
        "results": [{"dims": [2, 8], "dtype": "f32"}],
        "post_ops": [],
        "descs": None,
        "choice": None,
        "origin": "layer.act",
        "order": 2,
    }
    assert next(iter(nxg.edges(keys=True, data=True))) == ("x", "a", "src", {"result": 0, "position": 0})
    assert nxg.nodes["w"]["data"].shape == (2, 8)


def test_the_plain_form_is_a_copy():
    graph = chain()
    nxg = graph.to_networkx()
    nxg.nodes["b"]["attrs"]["alg"] = "relu"
    nxg.nodes["b"]["results"][0]["dims"][0] = 7
    nxg.remove_node("z")
    same(graph, chain())


def test_a_pass_written_in_networkx_alone():
    nxg = chain().to_networkx()
    nxg.add_node("new", op="eltwise", attrs={"alg": "relu"}, results=[{"dims": [2, 8], "dtype": "f32"}])
    nxg.add_edge("a", "new", key="src")
    nxg.remove_edge("a", "b", key="src")
    nxg.add_edge("new", "b", key="src")
    graph = Graph.from_networkx(nxg)
    assert [n.name for n in graph.nodes()] == ["x", "a", "new", "b", "w", "y", "z"]
    assert graph.node("new").attrs == Eltwise("relu")
    assert graph.fresh_name("a") == "a_1"
    assert graph.constant("next", TYPE, torch.zeros(2, 8)) == Value("next")
    assert [n.name for n in graph.nodes()][-3:] == ["next", "y", "z"]


def test_without_any_order_the_order_of_adding_counts():
    nxg = nx.MultiDiGraph()
    result = [{"dims": [4], "dtype": "f32"}]
    nxg.add_node("out", op="output", results=[])
    for name in ("q", "p"):
        nxg.add_node(name, op="input", results=result)
    nxg.add_edge("p", "out", key="src")
    graph = Graph.from_networkx(nxg)
    assert graph.name == "graph"
    assert [n.name for n in graph.input_nodes] == ["q", "p"]
    assert [n.name for n in graph.nodes()] == ["q", "p", "out"]


def test_a_chain_of_new_nodes_stands_before_its_first_reader():
    nxg = chain().to_networkx()
    for name in ("n2", "n1"):
        nxg.add_node(name, op="eltwise", attrs={"alg": "relu"}, results=[{"dims": [2, 8], "dtype": "f32"}])
    nxg.add_edge("x", "n1", key="src")
    nxg.add_edge("n1", "n2", key="src")
    nxg.remove_edge("x", "a", key="src")
    nxg.add_edge("n2", "a", key="src")
    assert [n.name for n in Graph.from_networkx(nxg).nodes()] == ["x", "n1", "n2", "a", "b", "w", "y", "z"]


def test_formats_choices_and_post_ops_survive():
    graph = chain()
    desc = MemoryDesc((2, 8), "f32", tag="ba")
    choice = Choice("onednn", "jit:avx2", {"src": desc}, "because", 1e-6, handle=object())
    tail = (PostOp("eltwise", Eltwise("clip", 0.0, float("inf")), None, "layer.tail"),)
    graph.replace(graph.node("b").with_(descs=(desc,), choice=choice, post_ops=tail))
    again = Graph.from_networkx(graph.to_networkx())
    same(graph, again)
    assert again.node("b").choice.handle is choice.handle


# ---------------------------------------------------------------- property


@st.composite
def random_graphs(draw):
    graph = Graph(draw(st.text(max_size=5)))
    graph.structure = draw(st.just("") | st.text(max_size=5).map(lambda name: describe([(name, Slot(0))], [], [name])))
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(["f32", "bf16", "f16", "s8", "boolean", "s64"]))
    values = [graph.input("x", TensorType(dims, dtype))]
    for i in range(draw(st.integers(0, 12))):
        source = draw(st.sampled_from(values))
        type_ = graph.type_of(source)
        kind = draw(st.sampled_from(["eltwise", "reshape", "permute", "slice", "constant", "initialiser", "insert"]))
        if kind == "eltwise":
            alpha = draw(st.floats(allow_nan=False, width=32))
            values.append(emit(graph, "eltwise", {"src": source}, Eltwise("clip", alpha, 1.0), origin=f"layer.{i}"))
        elif kind == "reshape":
            values.append(emit(graph, "reshape", {"src": source}, Reshape((type_.size,))))
        elif kind == "permute":
            order = tuple(draw(st.permutations(range(type_.ndim))))
            values.append(emit(graph, "permute", {"src": source}, Permute(order)))
        elif kind == "slice":
            sizes = tuple(draw(st.integers(1, size)) for size in type_.dims)
            starts = tuple(draw(st.integers(0, a - b)) for a, b in zip(type_.dims, sizes, strict=True))
            values.append(emit(graph, "slice", {"src": source}, Slice(starts, sizes, (1,) * type_.ndim)))
        elif kind == "constant":
            data = torch.randn(draw(st.sampled_from([(3, 4), (11, 7), ()])))
            values.append(graph.constant(f"w_{i}", TensorType(tuple(data.shape)), data))
        elif kind == "initialiser":
            values.append(graph.constant(f"w_{i}", TensorType((128, 3)), Initialiser.normal(i, 0.0, 0.1)))
        elif source.node != "x":
            node = Node(f"late_{i}", "eltwise", Eltwise("tanh"), (graph.type_of(Value("x")),))
            values.extend(graph.insert(node, {"src": Value("x")}, before=source.node))
    for value in draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)):
        graph.output(value)
    return graph


@settings(max_examples=60)
@given(random_graphs())
def test_networkx_form_is_lossless(graph):
    same(graph, Graph.from_networkx(graph.to_networkx()))


# ---------------------------------------------------------------- errors


def edited(edit) -> nx.MultiDiGraph:
    nxg = chain().to_networkx()
    edit(nxg)
    return nxg


def put(node, **changes):
    return lambda g: g.nodes[node].update(changes)


def drop(node, key):
    return lambda g: g.nodes[node].pop(key)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("a", op="relu"), "node a (relu): unknown op 'relu'"),
        (put("a", op=3), "node a: op must be text, got 3"),
        (drop("a", "op"), "node a: attribute 'op' is missing"),
        (drop("a", "results"), "node a: attribute 'results' is missing"),
        (put("a", post_op=[]), "node a: unknown attribute 'post_op'; did you mean 'post_ops'?"),
        (
            put("a", attrs={}),
            "attribute 'alg' is missing; Eltwise has ['alg', 'alpha', 'beta']",
        ),
        (put("a", attrs={"algorithm": "relu"}), "node a (eltwise): Eltwise has no attribute 'algorithm'"),
        (
            put("a", attrs={"alg": "relu", "alpha": "x"}),
            "node a (eltwise): attribute alpha is 'x', must be a number within the range of f32",
        ),
        (put("a", attrs={"alg": "rely"}), "node a (eltwise): eltwise has no algorithm 'rely'"),
        (put("a", attrs=[1]), "node a (eltwise): attrs must be a mapping"),
        (put("a", results={"dims": [1]}), "node a (eltwise): results must be a list"),
        (put("a", results=[[2, 8]]), 'node a (eltwise): results[0] must look like {"dims": [1, 8], "dtype": "f32"}'),
        (put("a", results=[{"dims": [2, -8], "dtype": "f32"}]), "results[0]: dimension 1 must be a non-negative int"),
        (put("a", results=[{"dims": [2, 8], "dtype": "f33"}]), "results[0]: unknown data type 'f33'"),
        (put("a", results=[{"dims": [2**62, 4], "dtype": "f32"}]), "more than 64-bit offsets reach"),
        (put("a", results=[]), "node b (eltwise): operand src reads result 0 of node a (eltwise), which has 0"),
        (put("a", descs=["abcd"]), "node a (eltwise): descs[0] must be a MemoryDesc, got str"),
        (put("a", choice="fast"), "node a (eltwise): choice must be a Choice or None, got str"),
        (put("a", origin=None), "node a (eltwise): origin must be text, got None"),
        (put("a", order="first"), "node a (eltwise): order must be a finite number, got 'first'"),
        (put("a", data=1), "node a (eltwise): only constants have data"),
        (put("a", post_ops=[{"attrs": {}}]), "node a (eltwise): post_ops[0]: attribute 'op' is missing"),
        (put("a", post_ops=["relu"]), "node a (eltwise): post_ops[0] must be a mapping"),
        (put("a", post_ops=[{"op": "eltwise", "operand": 3}]), "post_ops[0]: op, operand and origin must be text"),
        (
            put("a", post_ops=[{"op": "eltwise", "attrs": {"alg": "relu"}, "operand": "post_op_0"}]),
            "operand 'post_op_0' of its eltwise post-op is not connected",
        ),
        (lambda g: g.add_edge("x", "a"), "edge x -> a: the edge's key must be the name of the operand, got 1"),
        (lambda g: g.add_edge("w", "a", key="src"), "node a (eltwise): operand src is connected twice"),
        (lambda g: g.add_edge("w", "a", key="weights"), "op eltwise has no operand 'weights'; it has ['src']"),
        (lambda g: g.remove_edge("x", "a", key="src"), "op eltwise needs operand 'src'"),
        (
            lambda g: g.edges["x", "a", "src"].update(result=1),
            "src reads result 1 of node x (input), which has 1",
        ),
        (lambda g: g.edges["x", "a", "src"].update(result="0"), "edge x -> a (src): result must be an index, got '0'"),
        (lambda g: g.edges["x", "a", "src"].update(reslt=0), "unknown attribute 'reslt'; did you mean 'result'?"),
        (lambda g: g.add_node(7, op="input", results=[]), "node 7: a node's name must be non-empty text"),
        (lambda g: g.remove_nodes_from(["y", "z"]), "graph chain has no output"),
        (lambda g: g.graph.update(name=3), "graph attributes name and structure must be text, got 3"),
        (
            lambda g: (g.remove_edge("x", "a", key="src"), g.add_edge("b", "a", key="src")),
            "graph chain has a cycle: ",
        ),
    ],
)
def test_a_flaw_is_named(edit, message):
    with pytest.raises(GraphError) as caught:
        Graph.from_networkx(edited(edit))
    assert message in str(caught.value)


def test_only_a_multidigraph_will_do():
    with pytest.raises(GraphError, match=r"a graph is built from a networkx\.MultiDiGraph, got DiGraph"):
        Graph.from_networkx(nx.DiGraph())


def test_operands_without_a_position_stand_as_declared():
    graph = chain()
    nxg = graph.to_networkx()
    for _, _, data in nxg.edges(data=True):
        del data["position"]
    same(graph, Graph.from_networkx(nxg))
    assert relu(graph, Value("a")).node == "relu_1"
