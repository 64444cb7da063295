from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fmtprop.ir import Graph, Value
from fmtprop.ops import Concat
from fmtprop.passes.rewrites.nest_concats import NestConcats
from tests.passes.rewriting import Builder, rewrite


def joined(build: Builder, name: str, *values: Value, axis: int = 1) -> Value:
    return build.op("concat", Concat(axis), name, **{f"src_{i}": value for i, value in enumerate(values)})


def joins(graph: Graph) -> dict[str, list[str]]:
    """Return the sources of each concat, by name."""
    return {
        node.name: [str(graph.inputs(node.name)[f"src_{i}"]) for i in range(len(graph.inputs(node.name)))]
        for node in graph.nodes()
        if node.op == "concat"
    }


def nested(graph: Graph) -> dict[str, list[str]]:
    return joins(rewrite(graph, NestConcats(), tolerance=0))


def test_a_dense_block_becomes_a_chain():
    build = Builder()
    values = [build.input(1, 4, 3, 3, name="x")]
    for index in range(4):
        whole = joined(build, f"cat_{index}", *values) if index else values[0]
        values.append(build.act(whole, "tanh", f"new_{index}"))
        values[-1] = build.conv(values[-1], 2, f"conv_{index}")
    found = nested(build.output(joined(build, "all", *values)))
    assert found == {
        "cat_1": ["x", "conv_0"],
        "cat_2": ["cat_1", "conv_1"],
        "cat_3": ["cat_2", "conv_2"],
        "all": ["cat_3", "conv_3"],
    }


def test_the_longer_list_may_come_first():
    build = Builder()
    a, b, c = (build.input(1, size, name=name) for size, name in ((2, "a"), (3, "b"), (4, "c")))
    graph = build.output(joined(build, "long", a, b, c), joined(build, "short", a, b))
    assert nested(graph) == {"short": ["a", "b"], "long": ["short", "c"]}


def test_equal_concats_become_one():
    build = Builder()
    a, b = build.input(1, 2, name="a"), build.input(1, 3, name="b")
    first, second = joined(build, "first", a, b), joined(build, "second", a, b)
    graph = build.output(joined(build, "all", first, second), second)
    assert nested(graph) == {"first": ["a", "b"], "all": ["first", "first"]}


def test_what_begins_otherwise_stays():
    build = Builder()
    a, b, c = (build.input(2, 2, name=name) for name in "abc")
    graph = build.output(
        joined(build, "ab", a, b),
        joined(build, "ba", b, a),
        joined(build, "bac", b, c, a),
        joined(build, "cab", c, a, b),  # ends with another's list, does not begin with it
        joined(build, "rows", a, b, c, axis=0),
        joined(build, "twice", a, a),
    )
    assert nested(graph) == joins(graph)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=5), min_size=1, max_size=8),
    st.lists(st.integers(0, 1), min_size=8, max_size=8),
)
def test_the_meaning_stays_and_no_list_begins_with_another_any_more(lists, axes):
    build = Builder()
    values = [build.input(3, 3, name=name) for name in "abcd"]
    joined_values = [
        joined(build, f"cat_{i}", *[values[k] for k in picked], axis=axis)
        for i, (picked, axis) in enumerate(zip(lists, axes, strict=False))
    ]
    graph = rewrite(build.output(*joined_values), NestConcats(), tolerance=0)
    found = [(graph.node(name).attrs, tuple(sources)) for name, sources in joins(graph).items()]
    for attrs, sources in found:
        for other_attrs, other in found:
            begins = attrs == other_attrs and len(other) > 1 and sources[: len(other)] == other
            assert not begins or sources == other
    assert len(set(found)) == len(found)
