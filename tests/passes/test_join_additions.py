from __future__ import annotations

import pytest

from fmtprop.ir import Graph, Value
from fmtprop.ops.view_attrs import Slice
from fmtprop.passes.training.join_additions import JoinAdditions
from tests.passes.rewriting import Builder, rewrite


def part(build: Builder, value: Value, axis: int, start: int, size: int) -> Value:
    dims = list(build.graph.type_of(value).dims)
    if size == dims[axis]:
        return value
    starts = [0] * len(dims)
    starts[axis], dims[axis] = start, size
    return build.op("slice", Slice(tuple(starts), tuple(dims), (1,) * len(dims)), src=value)


def added(build: Builder, a: Value, b: Value) -> Value:
    return build.binary("add", a, b, build.graph.fresh_name("add"))


def sizes(graph: Graph, axis: int = 1) -> list[int]:
    """Return the size of each addition."""
    graph = rewrite(graph, JoinAdditions(), tolerance=0)
    return [node.results[0].dims[axis] for node in graph.nodes() if node.op == "binary"]


def test_the_gradients_of_a_dense_block_become_a_chain():
    build, ends = Builder(), [4, 6, 8, 10]
    wholes = [build.input(1, end, 3, 3, name=f"gradient_{end}") for end in ends]
    found = []
    for place, end in enumerate(ends):
        start = ends[place - 1] if place else 0
        total, *others = (part(build, whole, 1, start, end - start) for whole in reversed(wholes[place:]))
        for other in others:
            total = added(build, total, other)
        found.append(build.conv(total, 2, f"conv_{place}"))
    assert sizes(build.output(*found)) == [8, 6, 4]


@pytest.mark.parametrize("shape", [(2, 6), (6, 2, 3)])
def test_neighbours_along_any_axis_in_any_order(shape):
    build, axis = Builder(), shape.index(6)
    x, y = build.input(*shape, name="x"), build.input(*shape, name="y")
    sums = [added(build, part(build, x, axis, start, 2), part(build, y, axis, start, 2)) for start in (2, 0, 4)]
    assert sizes(build.output(*sums), axis) == [6]


def test_parts_of_other_places_and_gaps_stay():
    build = Builder()
    x, y = build.input(1, 8, name="x"), build.input(1, 8, name="y")
    crossed = [added(build, part(build, x, 1, a, 2), part(build, y, 1, b, 2)) for a, b in ((0, 2), (2, 0))]
    apart = added(build, part(build, x, 1, 4, 1), part(build, y, 1, 6, 1))
    twice = added(build, part(build, x, 1, 1, 2), part(build, y, 1, 3, 2))
    other = build.binary("mul", part(build, x, 1, 2, 2), part(build, y, 1, 4, 2))
    assert sizes(build.output(*crossed, apart, twice, other)) == [2, 2, 1, 2, 2]


def test_an_addition_that_a_function_absorbs_stays():
    build = Builder()
    x, y = build.input(1, 6, name="x"), build.input(1, 6, name="y")
    sums = [added(build, part(build, x, 1, start, 2), part(build, y, 1, start, 2)) for start in (0, 2, 4)]
    assert sizes(build.output(build.act(sums[0]), sums[1], sums[2])) == [2, 4]
