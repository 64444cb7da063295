"""Format assignment against a table-driven target: which formats, how many reorders, and why."""

from __future__ import annotations

import pytest

from fmtprop.errors import GraphError
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Concat, Conv, Eltwise, Permute, Pooling, Reorder, Reshape, Slice, emit
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.target import Setting
from fmtprop.targets.reference import ReferenceTarget
from tests.passes.table_target import TableTarget

BLOCKED = "aBcd8b"
LAST = "acdb"


def conv(graph: Graph, src: Value, oc: int, name: str | None = None) -> Value:
    ic = graph.type_of(src).dims[1]
    weights = graph.constant(graph.fresh_name("w"), TensorType((oc, ic, 1, 1)), Initialiser.constant(0.5))
    return emit(
        graph, "convolution", {"src": src, "weights": weights}, Conv((1, 1), (0, 0), (0, 0), (0, 0), 1), name=name
    )


def relu(graph: Graph, src: Value) -> Value:
    return emit(graph, "eltwise", {"src": src}, Eltwise("relu"))


def pool(graph: Graph, src: Value) -> Value:
    return emit(graph, "pooling", {"src": src}, Pooling("max", (2, 2), (2, 2), (0, 0), (0, 0), (0, 0)))


def assign(graph: Graph, target: TableTarget, policy: str = "propagate", **options) -> Graph:
    formatted = AssignFormats(policy, Setting(target, ReferenceTarget(), **options)).run(graph)
    verify(formatted, Stage.FORMATTED)
    return formatted


def activation_reorders(graph: Graph) -> list[str]:
    """Return ``from -> to`` of each reorder of something that is not a constant."""
    found = []
    for node in graph.nodes():
        if node.op == "reorder":
            (src,) = graph.inputs(node.name).values()
            if graph.node(src.node).op != "constant":
                found.append(f"{graph.desc_of(src).tag} -> {node.descs[0].tag}")
    return found


def chain() -> Graph:
    g = Graph("chain")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    g.output(pool(g, relu(g, conv(g, x, 16))))
    return g


def test_m9_chain_reorders_at_its_two_ends_only():
    formatted = assign(chain(), TableTarget({"convolution": BLOCKED}))
    assert activation_reorders(formatted) == [f"abcd -> {BLOCKED}", f"{BLOCKED} -> abcd"]


def test_m9_bandwidth_ops_ask_with_the_producers_format():
    target = TableTarget({"convolution": BLOCKED})
    assign(chain(), target)
    request = next(request for name, request in target.asked if name.startswith("relu"))
    assert request["src"].tag == BLOCKED
    assert request["dst"].kind == "any"


def test_m7_compute_ops_ask_any():
    target = TableTarget({"convolution": BLOCKED})
    assign(chain(), target)
    request = next(request for name, request in target.asked if name.startswith("conv"))
    assert {desc.kind for desc in request.values()} == {"any"}


def test_naive_pays_back_to_plain_after_each_compute_op():
    g = Graph("two")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    g.output(conv(g, relu(g, conv(g, x, 8)), 8))
    formatted = assign(g, TableTarget({"convolution": BLOCKED}), "naive")
    assert activation_reorders(formatted) == [f"abcd -> {BLOCKED}", f"{BLOCKED} -> abcd"] * 2


def test_plain_never_reorders():
    formatted = assign(chain(), TableTarget({"convolution": BLOCKED}), "plain")
    assert formatted.count("reorder") == 0
    assert {desc.tag for node in formatted.nodes() for desc in node.descs} == {"abcd"}


def test_one_reorder_serves_all_readers():
    g = Graph("shared")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    g.output(conv(g, x, 8, "a"))
    g.output(conv(g, x, 8, "b"))
    formatted = assign(g, TableTarget({"convolution": BLOCKED}))
    assert activation_reorders(formatted).count(f"abcd -> {BLOCKED}") == 1


def test_a_format_that_exists_is_not_made_again():
    g = Graph("back")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    a = conv(g, x, 8, "a")
    b = conv(g, a, 8, "b")
    g.output(conv(g, a, 8, "c"))
    g.output(b)
    formatted = assign(g, TableTarget({"a": BLOCKED, "b": LAST, "c": BLOCKED}))
    assert activation_reorders(formatted).count(f"{BLOCKED} -> {LAST}") == 1
    assert formatted.desc_of(formatted.inputs("c")["src"]).tag == BLOCKED


def test_disagreement_of_two_equals_goes_to_the_first_source():
    g = Graph("add")
    x = g.input("x", TensorType((1, 17, 8, 8)))
    a, b = conv(g, x, 17, "a"), conv(g, x, 17, "b")
    g.output(emit(g, "binary", {"src_0": a, "src_1": b}, Binary("add"), name="add"))
    formatted = assign(g, TableTarget({"a": BLOCKED, "b": LAST}))
    assert formatted.node("add").descs[0].tag == BLOCKED
    assert "least of" in formatted.node("add").choice.reason


def test_disagreement_goes_to_the_least_reorder_cost():
    g = Graph("concat")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    small, large = conv(g, x, 8, "small"), conv(g, x, 64, "large")
    g.output(emit(g, "concat", {"src_0": small, "src_1": large}, Concat(1), name="cat"))
    formatted = assign(g, TableTarget({"small": BLOCKED, "large": LAST}))
    assert formatted.node("cat").descs[0].tag == LAST
    assert activation_reorders(formatted).count(f"{BLOCKED} -> {LAST}") == 1


def test_concat_brings_its_sources_to_one_format():
    g = Graph("concat")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    sources = [conv(g, x, 8, name) for name in "abc"]
    g.output(emit(g, "concat", {f"src_{i}": v for i, v in enumerate(sources)}, Concat(1), name="cat"))
    formatted = assign(g, TableTarget({"a": BLOCKED, "b": LAST, "c": LAST}))
    assert formatted.node("cat").descs[0].tag == LAST
    assert activation_reorders(formatted).count(f"{BLOCKED} -> {LAST}") == 1


def test_a_view_on_a_blocked_format_reorders_first():
    g = Graph("m8")
    x = g.input("x", TensorType((1, 16, 4, 4)))
    y = emit(g, "reshape", {"src": conv(g, x, 16)}, Reshape((1, 256)))
    g.output(y)
    formatted = assign(g, TableTarget({"convolution": BLOCKED}))
    assert activation_reorders(formatted)[-1] == f"{BLOCKED} -> abcd"
    view = next(node for node in formatted.nodes() if node.op == "reshape")
    assert view.choice.reason.startswith("view after a reorder")


def test_a_view_that_the_format_takes_costs_nothing():
    g = Graph("free")
    x = g.input("x", TensorType((1, 16, 4, 4)))
    g.output(emit(g, "permute", {"src": conv(g, x, 16)}, Permute((0, 2, 3, 1))))
    formatted = assign(g, TableTarget({"convolution": LAST}))
    assert activation_reorders(formatted) == [f"abcd -> {LAST}"]


def test_a_slice_is_made_dense_where_the_op_wants_it():
    g = Graph("slice")
    x = g.input("x", TensorType((1, 16, 4, 4)))
    half = emit(g, "slice", {"src": conv(g, x, 16)}, Slice((0, 8, 0, 0), (1, 8, 4, 4), (1, 1, 1, 1)))
    g.output(conv(g, half, 8, "after"))
    formatted = assign(g, TableTarget({"convolution": LAST}))
    assert formatted.desc_of(formatted.inputs("after")["src"]) == MemoryDesc((1, 8, 4, 4), tag=LAST)


@pytest.mark.parametrize("policy", ["propagate", "plain", "naive"])
def test_a_slice_in_the_format_that_the_op_wants_is_read_where_it_lies(policy):
    g = Graph("slice")
    x = g.input("x", TensorType((2, 16, 4, 4)))
    second = emit(g, "slice", {"src": x}, Slice((1, 0, 0, 0), (1, 16, 4, 4), (1, 1, 1, 1)))
    g.output(conv(g, second, 8, "after"))
    formatted = assign(g, TableTarget({"convolution": "abcd"}), policy)
    assert activation_reorders(formatted) == []
    assert formatted.node("after").choice.operands["src"].offset0 == 16 * 4 * 4


def test_ref_is_never_planned_where_another_format_has_more():
    target = TableTarget({"convolution": BLOCKED}, ref=frozenset({("pooling", BLOCKED)}))
    formatted = assign(chain(), target)
    node = next(node for node in formatted.nodes() if node.op == "pooling")
    assert node.choice.impl == "jit"
    assert node.choice.operands["src"].tag != BLOCKED


def test_pytorch_runs_what_the_target_has_only_loops_for():
    everything = frozenset(("pooling", tag) for tag in ("abcd", LAST, BLOCKED, "aBcd16b"))
    formatted = assign(chain(), TableTarget({"convolution": BLOCKED}, ref=everything))
    node = next(node for node in formatted.nodes() if node.op == "pooling")
    assert (node.choice.target, node.choice.operands["src"].tag) == ("reference", "abcd")
    assert node.choice.reason == "table has only a reference implementation: PyTorch runs it"


def test_what_the_target_lacks_runs_on_the_reference_target():
    nothing = frozenset(("pooling", tag) for tag in ("abcd", LAST, BLOCKED, "aBcd16b"))
    formatted = assign(chain(), TableTarget({"convolution": BLOCKED}, missing=nothing))
    node = next(node for node in formatted.nodes() if node.op == "pooling")
    assert node.choice.target == "reference"
    assert node.choice.reason == "table has no implementation of it here: PyTorch runs it"
    assert node.choice.operands["src"].is_plain


def test_a_conversion_of_data_type_and_of_format_is_one_reorder():
    g = Graph("cast")
    x = g.input("x", TensorType((1, 8, 8, 8)))
    low = emit(g, "reorder", {"src": x}, Reorder("bf16"))
    weights = g.constant("w", TensorType((8, 8, 1, 1), "bf16"), Initialiser.constant(0.5))
    y = emit(g, "convolution", {"src": low, "weights": weights}, Conv((1, 1), (0, 0), (0, 0), (0, 0), 1))
    g.output(emit(g, "reorder", {"src": y}, Reorder("f32")))
    formatted = assign(g, TableTarget({"convolution": BLOCKED}))
    assert activation_reorders(formatted) == [f"abcd -> {BLOCKED}", f"{BLOCKED} -> abcd"]
    assert formatted.type_of(formatted.inputs(formatted.output_nodes[0].name)["src"]).dtype is DataType.F32


def test_boundary_formats_are_the_callers():
    last = MemoryDesc((1, 8, 8, 8), tag=LAST)
    g = Graph("edge")
    g.output(conv(g, g.input("x", TensorType((1, 8, 8, 8))), 8), name="y")
    formatted = assign(g, TableTarget({"convolution": LAST}), boundary={"x": last, "y": last})
    assert activation_reorders(formatted) == []


def test_reasons_name_reader_and_producer():
    formatted = assign(chain(), TableTarget({"convolution": BLOCKED}))
    reasons = [node.choice.reason for node in formatted.nodes() if node.op == "reorder"]
    assert "conv_1.src wants f32:aBcd8b, x gives f32:abcd" in reasons


def test_assignment_is_deterministic():
    def names():
        formatted = assign(chain(), TableTarget({"convolution": BLOCKED}))
        return [(node.name, node.descs) for node in formatted.nodes()]

    assert names() == names()


def test_an_unknown_policy_is_refused():
    with pytest.raises(GraphError, match=r"unknown policy 'best'; known: plain, naive, propagate"):
        AssignFormats("best", Setting(TableTarget(), ReferenceTarget()))
