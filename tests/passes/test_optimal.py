"""The `optimal` policy against a table-driven target: exact figures, no CPU's opinion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Concat, Permute, emit
from fmtprop.ops.convolution import Conv
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.optimal import Certificate, OptimalFormats, price, resolve_pins
from fmtprop.passes.optimal.enumerate import _likeness, enumerate_ways
from fmtprop.passes.target import Setting
from fmtprop.targets.reference import ReferenceTarget
from tests.passes.table_target import TableTarget
from tests.passes.test_assign import BLOCKED, LAST, activation_reorders, chain, conv, relu

US = 1e-6


@dataclass
class TableCosts:
    """Seconds from a table: by (node, format of the first operand), and one price for every reorder."""

    nodes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    reorders: float = 5 * US
    prepared: list[str] = field(default_factory=list)

    def prepare(self, work, reorders):
        self.prepared += [node.name for node, _ in work]

    def node(self, node, candidate):
        first = next(iter(candidate.operands.values()))
        return self.nodes.get((node.name, first.tag), self.nodes.get((node.op, first.tag), 10 * US))

    def reorder(self, src, dst):
        return 0.0 if src == dst else self.reorders


class UniformTarget(TableTarget):
    """No primitive writes another format than it reads."""

    def candidates(self, node, request):
        for candidate in super().candidates(node, request):
            if node.op != "convolution" or candidate.operands["src"].tag == candidate.results[0].tag:
                yield candidate


def solve(graph: Graph, target: TableTarget, costs: TableCosts, **options) -> tuple[Graph, Certificate]:
    formatted, certificate = OptimalFormats(Setting(target, ReferenceTarget()), costs, **options).solve(graph)
    verify(formatted, Stage.FORMATTED)
    assert certificate.objective == pytest.approx(price(formatted, costs), rel=1e-9)
    return formatted, certificate


def test_a_fast_format_is_worth_two_reorders():
    costs = TableCosts({("convolution", BLOCKED): 1 * US, ("convolution", "abcd"): 20 * US})
    formatted, certificate = solve(chain(), UniformTarget({"convolution": BLOCKED}), costs)
    assert activation_reorders(formatted) == [f"abcd -> {BLOCKED}", f"{BLOCKED} -> abcd"]
    assert certificate.optimal
    # the convolution, relu and pooling at 10 us each unless told, and two reorders
    assert certificate.objective == pytest.approx((1 + 10 + 10 + 2 * 5) * US)


def test_nodes_that_differ_in_large_sizes_alone_are_asked_what_gave_the_first_a_way():
    g = Graph("dense")
    value = g.input("x", TensorType((1, 64, 8, 8)))
    for index, channels in enumerate((128, 192, 256, 264, 280)):  # blocks of 64 channels divide some, blocks of 8 all
        value = relu(g, conv(g, value, channels, f"c{index}"))
    g.output(value)
    target = UniformTarget({"convolution": BLOCKED})
    found = enumerate_ways(g, Setting(target, ReferenceTarget()), {}, {})
    asked = [[formats for name, formats in target.asked if name == f"c{index}"] for index in range(5)]
    # c1 is not asked what no kernel of c0 took, c2 only what gave c1 a new way; 264 and 280 have another divisor
    assert len(asked[2]) < len(asked[1]) < len(asked[0]) == len(asked[3]) == len(asked[4])
    ways = [{(way.candidate.impl, *_tags(way.candidate)) for way in found.ways[f"c{index}"]} for index in range(1, 5)]
    assert all(ways[0] == others for others in ways)


def test_no_format_of_a_result_is_asked_for_that_the_target_chose_by_itself():
    target = UniformTarget({"convolution": BLOCKED})
    enumerate_ways(chain(), Setting(target, ReferenceTarget()), {}, {})
    asked = {(request["src"].tag, request["dst"].tag) for _, request in target.asked if "weights" in request}
    assert {("abcd", "any"), ("abcd", BLOCKED)} <= asked and ("abcd", "abcd") not in asked


def test_a_request_is_read_as_far_as_it_gave_the_first_of_its_likeness_another_way():
    read = []

    class Repeating(UniformTarget):
        def candidates(self, node, request):
            for candidate in super().candidates(node, request):
                yield candidate
                read.append(node.name)
                yield candidate

    g = Graph("dense")
    value = g.input("x", TensorType((1, 128, 8, 8)))
    for index in range(3):
        value = relu(g, conv(g, value, 128 + 64 * index, f"c{index}"))
    g.output(value)
    found = enumerate_ways(g, Setting(Repeating({"convolution": BLOCKED}), ReferenceTarget()), {}, {})
    assert "c1" in read and "c2" not in read  # the first one reads the network's input
    assert {_tags(way.candidate) for way in found.ways["c2"]} == {_tags(way.candidate) for way in found.ways["c1"]}


def test_depthwise_convolutions_are_alike_in_spite_of_their_groups():
    few, some, many = (_likeness(Conv((1, 1), (0, 0), (1, 1), (1, 1), groups)) for groups in (8, 96, 160))
    assert some == many != few


def test_a_node_whose_likeness_had_other_ways_is_asked_everything():
    class Picky(UniformTarget):
        def candidates(self, node, request):
            found = super().candidates(node, request)
            return (one for one in found if (one.results[0].tag == BLOCKED) == (node.name != "c2"))

    g = Graph("dense")
    value = g.input("x", TensorType((1, 128, 8, 8)))
    for index in range(3):
        value = relu(g, conv(g, value, 128 + 64 * index, f"c{index}"))
    g.output(value)
    found = enumerate_ways(g, Setting(Picky({"convolution": BLOCKED}), ReferenceTarget()), {}, {})
    assert {way.candidate.results[0].tag for way in found.ways["c1"]} == {BLOCKED}
    own = [way.candidate for way in found.ways["c2"] if way.candidate.target != "reference"]
    assert own and BLOCKED not in {candidate.results[0].tag for candidate in own}


def _tags(candidate):
    return (*(desc.tag for desc in candidate.operands.values()), *(desc.tag for desc in candidate.results))


def test_a_fast_format_is_not_worth_dear_reorders():
    costs = TableCosts({("convolution", BLOCKED): 1 * US, ("convolution", "abcd"): 20 * US}, reorders=15 * US)
    formatted, certificate = solve(chain(), UniformTarget({"convolution": BLOCKED}), costs)
    assert activation_reorders(formatted) == []
    assert certificate.objective == pytest.approx((20 + 10 + 10) * US)
    assert certificate.propagate == pytest.approx((1 + 10 + 10 + 2 * 15) * US)


def test_one_compromise_where_the_greedy_policy_reorders_back_and_forth():
    g = Graph("ladder")
    value = g.input("x", TensorType((1, 16, 8, 8)))
    wants, costs = {}, {}
    for index in range(6):
        name = f"c{index}"
        value = conv(g, value, 16, name)
        wants[name] = BLOCKED if index % 2 else LAST
        costs[name, wants[name]] = 9 * US
        costs[name, LAST if index % 2 else BLOCKED] = 10 * US
        costs[name, "abcd"] = 50 * US
    g.output(value)
    target = UniformTarget(wants)
    greedy = AssignFormats("propagate", Setting(target, ReferenceTarget())).run(g)
    assert len(activation_reorders(greedy)) == 7
    formatted, certificate = solve(g, target, TableCosts(costs))
    assert len(activation_reorders(formatted)) == 2
    assert certificate.objective == pytest.approx((3 * 9 + 3 * 10 + 2 * 5) * US)
    assert certificate.propagate == pytest.approx((6 * 9 + 7 * 5) * US)


def test_one_reorder_serves_two_readers():
    g = Graph("fork")
    x = g.input("x", TensorType((1, 16, 8, 8)))
    a, b = conv(g, x, 16, "a"), conv(g, x, 16, "b")
    g.output(emit(g, "binary", {"src_0": a, "src_1": b}, Binary("add"), name="add"))
    costs = TableCosts({(name, tag): us * US for name in "ab" for tag, us in ((BLOCKED, 1), ("abcd", 9), (LAST, 50))})
    formatted, certificate = solve(g, UniformTarget({"convolution": BLOCKED}), costs)
    # each alone would gain 8 us and lose 5: together they share one reorder before, and one after the addition
    assert activation_reorders(formatted) == [f"abcd -> {BLOCKED}", f"{BLOCKED} -> abcd"]
    assert certificate.objective == pytest.approx((1 + 1 + 10 + 2 * 5) * US)


def test_a_pin_is_obeyed_and_paid_for():
    costs = TableCosts({("convolution", BLOCKED): 1 * US, ("convolution", "abcd"): 1 * US})
    free, _ = solve(chain(), UniformTarget(), costs)
    assert activation_reorders(free) == []
    g = chain()
    name = next(node.name for node in g.nodes() if node.op == "convolution")
    pins = resolve_pins(g, {f"{name}.dst": "nChw8c"})
    pinned, certificate = solve(g, UniformTarget(), costs, pins=pins)
    assert pinned.node(name).descs[0].tag == BLOCKED
    assert certificate.objective == pytest.approx((1 + 10 + 10 + 2 * 5) * US)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"nobody.dst": "nchw"}, "names no node"),
        ({"conv.dts": "nchw"}, "has no 'dts'; it has src, weights, dst"),
        ({"conv.dst": "nChw8"}, "is not a format of"),
        ({"conv.dst": 8}, "must be a MemoryDesc or a format tag, got int"),
        ({"conv.dst": MemoryDesc((1, 2, 3))}, "dims and data type must be its own"),
        ({"x.dst": "nchw"}, "give its format as boundary['x']"),
    ],
)
def test_a_pin_that_cannot_be_meant_is_refused(pin, message):
    g = Graph("one")
    g.output(conv(g, g.input("x", TensorType((1, 16, 8, 8))), 16, "conv"))
    with pytest.raises(UnsupportedOpError) as error:
        resolve_pins(g, pin)
    assert message in str(error.value)


def test_a_pin_that_nobody_offers_names_what_is_to_be_had():
    g = Graph("one")
    g.output(conv(g, g.input("x", TensorType((1, 16, 8, 8))), 16, "conv"))
    pins = resolve_pins(g, {"conv.dst": "abdc"})
    with pytest.raises(UnsupportedOpError, match=r"pin 'conv\.dst' asks for f32:abdc.*available: .*f32:abcd"):
        solve(g, UniformTarget(), TableCosts(), pins=pins)


def test_a_concat_is_in_place_where_its_slices_are_dense():
    g = Graph("concat")
    x = g.input("x", TensorType((1, 16, 8, 8)))
    a, b = conv(g, x, 16, "a"), conv(g, x, 16, "b")
    joined = emit(g, "concat", {"src_0": a, "src_1": b}, Concat(1), name="joined")
    g.output(conv(g, joined, 16, "c"))
    costs = TableCosts(
        {("convolution", LAST): 8 * US, ("convolution", BLOCKED): 9 * US, ("convolution", "abcd"): 90 * US}
    )
    formatted, _ = solve(g, UniformTarget({"convolution": LAST}), costs)
    node = formatted.node("joined")
    assert node.choice is not None and (node.choice.target, node.choice.impl) == ("view", "in_place")
    assert node.descs[0].tag == BLOCKED  # a slice of channels-last is not dense


def test_a_concat_copies_where_no_slice_is_dense():
    g = Graph("batch")
    x = g.input("x", TensorType((2, 16, 8, 8)))
    g.output(emit(g, "concat", {"src_0": relu(g, x), "src_1": relu(g, x)}, Concat(1), name="joined"))
    formatted, _ = solve(g, UniformTarget(), TableCosts())
    choice = formatted.node("joined").choice
    assert choice is not None and choice.target == "table"


def test_a_producer_writes_what_makes_the_view_after_it_free():
    g = Graph("view")
    x = g.input("x", TensorType((1, 16, 8, 8)))
    moved = emit(g, "permute", {"src": conv(g, x, 16, "conv")}, Permute((0, 2, 3, 1)))
    g.output(relu(g, moved))
    costs = TableCosts({("conv", "abcd"): 10 * US, ("conv", LAST): 9 * US})
    formatted, certificate = solve(g, UniformTarget(), costs)
    # channels-last before the view is row-major after it: one reorder of x, none of the result
    assert len(activation_reorders(formatted)) == 1
    assert formatted.node("conv").descs[0].tag == LAST
    assert certificate.objective < certificate.propagate


def test_constants_cost_nothing():
    g = Graph("constant")
    x = g.input("x", TensorType((1, 16, 8, 8)))
    g.output(conv(g, x, 16, "conv"))
    costs = TableCosts({("conv", "abcd"): 1 * US})
    _, certificate = solve(g, UniformTarget(), costs)
    assert certificate.objective == pytest.approx(1 * US)
    assert "conv" in costs.prepared


def test_equal_nodes_are_asked_for_once():
    graph, target = Graph("row"), TableTarget()
    values = [graph.input("x", TensorType((1, 16, 8, 8)))]
    for _ in range(6):
        values.append(relu(graph, values[-1]))
    graph.output(values[-1])
    found = enumerate_ways(graph, Setting(target, ReferenceTarget()), {}, {})
    one, another = ([way.candidate for way in found.ways[value.node]] for value in values[3:5])
    assert one == another
    assert one
    assert len({name for name, _ in target.asked} & {value.node for value in values}) < 4


def test_every_choice_says_what_it_was_among():
    costs = TableCosts({("convolution", BLOCKED): 1 * US, ("convolution", "abcd"): 20 * US})
    formatted, certificate = solve(chain(), UniformTarget({"convolution": BLOCKED}), costs)
    reasons = {node.op: node.choice.reason for node in formatted.nodes() if node.choice is not None}
    assert "optimal among" in reasons["convolution"] and "us" in reasons["convolution"]
    assert "proved optimal" in str(certificate)


def test_a_value_of_the_graph_keeps_its_name():
    costs = TableCosts({("convolution", BLOCKED): 1 * US, ("convolution", "abcd"): 20 * US})
    g = chain()
    formatted, _ = solve(g, UniformTarget({"convolution": BLOCKED}), costs)
    assert {node.name for node in g.nodes()} <= {node.name for node in formatted.nodes()}
    assert formatted.type_of(Value("x")) == g.type_of(Value("x"))


@pytest.mark.parametrize(
    ("objective", "saved"), [(0.04651, "0.0% saved"), (0.0464, "0.2% saved"), (0.0466, "-0.2% saved")]
)
def test_a_certificate_never_saves_minus_nothing(objective, saved):
    certificate = Certificate(objective, objective, 0.0, 0.0465, alternatives=2, tensors=1, seconds=0.0)
    assert f" ms ({saved}); 2 alternatives" in str(certificate)
