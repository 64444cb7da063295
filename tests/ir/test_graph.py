from __future__ import annotations

import random

import pytest

from fmtprop.errors import GraphError
from fmtprop.ir import Attrs, Graph, Node, TensorType, Value
from fmtprop.ops import Binary, Eltwise, emit
from tests.ir.graphs import TYPE, chain, relu


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes()]


def node(name: str) -> Node:
    return Node(name, "eltwise", Eltwise("relu"), (TYPE,))


def test_ready_nodes_keep_the_order_of_adding():
    graph = Graph()
    x = graph.input("x", TYPE)
    for name in ("c", "a", "b"):
        graph.output(relu(graph, x, name), f"out_{name}")
    assert names(graph) == ["x", "c", "a", "b", "out_c", "out_a", "out_b"]


def test_outputs_come_last_in_the_order_of_results():
    graph = Graph()
    x, c = graph.input("x", TYPE), graph.constant("c", TYPE, None)
    graph.output(relu(graph, x, "late"), "first")
    graph.output(c, "second")
    graph.add(node("later"), {"src": Value("late")})
    graph.set_input("first", "src", Value("later"))
    assert names(graph)[-2:] == ["first", "second"]


def test_an_inserted_node_takes_the_place_of_its_reader():
    graph = chain()
    graph.insert(node("early"), {"src": Value("x")}, before="a")
    assert names(graph) == ["x", "early", "a", "b", "w", "y", "z"]


def test_two_nodes_inserted_before_the_same_node_keep_their_order():
    graph = chain()
    graph.insert(node("one"), {"src": Value("x")}, before="b")
    graph.insert(node("another"), {"src": Value("x")}, before="b")
    assert names(graph) == ["x", "a", "one", "another", "b", "w", "y", "z"]


def test_replace_uses_moves_every_reader_and_nothing_else():
    graph = Graph()
    x = graph.input("x", TYPE)
    a, b = relu(graph, x, "a"), relu(graph, x, "b")
    c, d = relu(graph, a, "c"), relu(graph, a, "d")
    for value in (b, c, d):
        graph.output(value)
    graph.replace_uses(a, b)
    assert graph.readers(a) == []
    assert graph.readers(b) == [("c", "src"), ("d", "src"), ("output_1", "src")]


def test_some_nodes_come_in_the_order_of_all():
    graph = chain()
    names = [node.name for node in graph.nodes()]
    assert [node.name for node in graph.nodes({names[2], names[0]})] == [names[0], names[2]]
    assert graph.nodes(()) == []


def test_dependents_are_those_of_inputs_or_of_any_nodes():
    graph = Graph()
    x, c = graph.input("x", TYPE), graph.constant("c", TYPE, None)
    made, used = relu(graph, c, "made"), relu(graph, x, "used")
    both = graph.add(Node("both", "any", Attrs(), (TYPE,)), {"src_0": used, "src_1": made})[0]
    graph.output(both, "y")
    graph.output(made, "z")
    assert graph.dependents() == {"x", "used", "both", "y"}
    assert graph.dependents(["c"]) == {"c", "made", "both", "y", "z"}
    assert graph.dependents([]) == set()


def test_an_edit_is_seen_by_all_that_was_asked_before():
    graph = chain()
    copy = graph.copy()
    before = {name: graph.inputs(name) for name in names(graph)}
    assert graph.inputs("b") == {"src": Value("a")}
    graph.inputs("b")["src"] = Value("x")  # the caller's own
    assert graph.inputs("b") == {"src": Value("a")}
    graph.set_input("b", "src", Value("x"))
    assert graph.inputs("b") == {"src": Value("x")}
    assert graph.readers(Value("x")) == [("a", "src"), ("b", "src")]
    assert {name: copy.inputs(name) for name in names(copy)} == before
    assert copy.readers(Value("x")) == [("a", "src")]
    graph.insert(node("c"), {"src": Value("x")}, before="b")
    graph.set_input("b", "src", Value("c"))
    assert names(graph).index("c") < names(graph).index("b")


def test_set_input_keeps_the_order_of_operands():
    graph = Graph()
    x, y = graph.input("x", TYPE), graph.input("y", TYPE)
    graph.add(Node("n", "any", Attrs(), (TYPE,)), {"src_0": x, "src_1": y, "src_2": x})
    graph.set_input("n", "src_1", x)
    assert graph.inputs("n") == {"src_0": x, "src_1": x, "src_2": x}
    assert list(graph.inputs("n")) == ["src_0", "src_1", "src_2"]


def test_remove_dead_keeps_inputs_and_what_outputs_need():
    graph = chain()
    value = relu(graph, Value("a"), "dead_1")
    relu(graph, value, "dead_2")
    graph.constant("dead_3", TYPE, None)
    graph.input("unused", TYPE)
    assert graph.remove_dead() == 3
    assert names(graph) == ["x", "a", "b", "w", "unused", "y", "z"]
    assert set(graph.constants) == {"w"}


def test_a_copy_is_independent():
    graph = chain()
    other = graph.copy()
    other.replace(other.node("a").with_(origin="changed"))
    other.set_input("b", "src", Value("x"))
    other.constants["w"] = None
    assert graph.node("a").origin == ""
    assert graph.inputs("b") == {"src": Value("a")}
    assert graph.constants["w"] is not None
    assert names(graph) == names(chain())


def test_ancestors_are_all_that_a_node_depends_on():
    assert chain().ancestors("y") == {"x", "a", "b"}


def test_missing_before_are_the_nodes_that_need_not_come_first():
    graph = chain()
    assert graph.missing_before("b", {"a", "x"}) == set()
    assert graph.missing_before("a", {"x", "b", "y"}) == {"b", "y"}
    assert graph.missing_before("a", {"a"}) == {"a"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda g: g.node("nope"), "graph chain has no node 'nope'"),
        (lambda g: g.add(node("a"), {}), "graph chain already has a node 'a'"),
        (lambda g: g.add(node("n"), {"src": Value("nope")}), "node n (eltwise): operand src reads nope, which is not"),
        (lambda g: g.add(node("n"), {"src": Value("a", 1)}), "node a (eltwise) has 1 results, no result 1"),
        (lambda g: g.remove("a"), "node a (eltwise) cannot be removed: b reads it"),
        (
            lambda g: g.set_input("a", "weights", Value("x")),
            "node a (eltwise) has no operand 'weights'; it has",
        ),
        (lambda g: g.desc_of(Value("a")), "node a (eltwise) has no format yet: assign formats first"),
    ],
)
def test_a_wrong_edit_is_refused(edit, message):
    graph = chain()
    with pytest.raises(GraphError) as caught:
        edit(graph)
    assert message in str(caught.value)
    assert names(graph) == names(chain())


def test_a_cycle_is_named():
    graph = chain()
    graph.set_input("a", "src", Value("b"))
    with pytest.raises(GraphError, match=r"graph chain has a cycle: (a -> b|b -> a)"):
        graph.nodes()


def test_dimensions_must_be_natural_numbers():
    with pytest.raises(ValueError, match="dimension 1 must be a non-negative int, got -3"):
        TensorType((2, -3))


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.replace(graph.node("a").with_(origin="elsewhere")),
        lambda graph: graph.set_input("b", "src", Value("x")),
        lambda graph: graph.constants.update(w=object()),
        lambda graph: graph.insert(node("new"), {"src": Value("x")}, before="b"),
    ],
)
def test_a_changed_copy_is_none(change):
    graph = chain()
    other = graph.copy()
    assert other.is_copy_of(graph)
    change(other)
    assert not other.is_copy_of(graph)


def test_edits_of_a_copy_and_of_its_original_are_apart():
    graph = chain()
    other = graph.copy()
    another = other.copy()
    other.set_input("b", "src", Value("x"))
    relu(graph, Value("x"), "new")
    assert graph.inputs("b")["src"] == another.inputs("b")["src"] == Value("a") != other.inputs("b")["src"]
    assert "new" in graph and "new" not in other and "new" not in another


@pytest.mark.parametrize("seed", range(30))
def test_after_any_edits_the_order_is_that_of_a_graph_made_anew(seed):
    draw, graph = random.Random(seed), Graph("edited")
    graph.input("x", TYPE)
    graph.output(relu(graph, Value("x")))
    for _ in range(25):
        nodes = [one for one in graph.nodes() if not one.is_boundary]
        node = draw.choice(nodes)
        before = [one for one in nodes if one is not node and node.name not in graph.ancestors(one.name)]
        source = Value(draw.choice(before).name if before else "x")
        match draw.randrange(5):
            case 0:
                emit(
                    graph, "binary", {"src_0": Value(node.name), "src_1": Value(draw.choice(nodes).name)}, Binary("add")
                )
            case 1:
                value = emit(graph, "eltwise", {"src": source}, Eltwise("abs"), before=node.name)
                graph.set_input(node.name, next(iter(graph.inputs(node.name))), value)
            case 2:
                graph.set_input(node.name, next(iter(graph.inputs(node.name))), source)
            case 3:
                graph.output(source)
            case 4:
                graph = graph.copy()
        if draw.random() < 0.5:
            assert names(graph) == names(Graph.from_networkx(graph.to_networkx()))
