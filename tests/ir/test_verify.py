"""One negative test per rule, each named after it; the rules themselves are in docs/verifier.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fmtprop.errors import VerifyError
from fmtprop.ir import Attrs, Category, Choice, Graph, Node, PostOp, TensorType, Value, opdef
from fmtprop.ir.grid import Grid
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.verify import RULES, Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Concat, Eltwise, Expand, FakeQuantize, Permute, Reorder, Reshape, Slice, Sum, emit
from fmtprop.ops.convolution import Conv
from tests.ir.graphs import TYPE, chain

IMAGE = TensorType((1, 16, 6, 6))
PLAIN, LAST = MemoryDesc(IMAGE.dims), MemoryDesc(IMAGE.dims, tag="acdb")


def broken(rule: str, graph: Graph, stage: Stage = Stage.FORMATTED) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(graph, stage)
    assert caught.value.rule == rule, str(caught.value)
    return str(caught.value).removeprefix(f"{rule}: ")


def residual(alg: str = "sum") -> Graph:
    """x -> conv_a -> conv_b (+ conv_a by a post-op) -> output."""
    graph = Graph("residual")
    x = graph.input("x", IMAGE)
    w = graph.constant("w", TensorType((16, 16, 1, 1)), Initialiser.constant(0.5))
    a = emit(graph, "convolution", {"src": x, "weights": w}, Conv.make(2), name="conv_a")
    mid = emit(graph, "eltwise", {"src": a}, Eltwise("relu"), name="mid")
    b = emit(graph, "convolution", {"src": mid, "weights": w}, Conv.make(2), name="conv_b")
    add_post_op(graph, "conv_b", PostOp("sum", Sum((1.0,)), "post_op_0"), a)
    graph.output(b, "y")
    return graph


def add_post_op(graph: Graph, name: str, post_op: PostOp, value: Value | None = None) -> None:
    node = graph.node(name)
    graph.replace(node.with_(post_ops=(*node.post_ops, post_op)))
    if value is not None:
        graph.set_inputs(name, {**graph.inputs(name), post_op.operand: value})


def formatted(graph: Graph) -> Graph:
    """Give every tensor its plain format."""
    for node in graph.nodes():
        descs = tuple(MemoryDesc(type_.dims, type_.dtype) for type_ in node.results)
        graph.replace(node.with_(descs=descs))
    for node in graph.nodes():
        operands = {name: graph.desc_of(value) for name, value in graph.inputs(node.name).items()}
        if not node.is_boundary:
            target = "view" if opdef(node.op).category is Category.VIEW else "table"
            graph.replace(node.with_(choice=Choice(target, "plain", operands)))
    return graph


def reordered() -> Graph:
    """x -> to_last -> relu -> to_plain -> output, formats assigned."""
    graph = Graph("reordered")
    value = graph.input("x", IMAGE)
    for name, op, attrs in (("to_last", "reorder", Reorder()), ("act", "eltwise", Eltwise("relu"))):
        value = emit(graph, op, {"src": value}, attrs, name=name)
    graph.output(emit(graph, "reorder", {"src": value}, Reorder(), name="to_plain"), "y")
    formatted(graph)
    for name, src, dst in (("to_last", PLAIN, LAST), ("act", LAST, LAST), ("to_plain", LAST, PLAIN)):
        change(graph, name, descs=(dst,), choice=Choice("table", "jit", {"src": src}))
    return graph


def change(graph: Graph, name: str, **changes) -> Graph:
    graph.replace(graph.node(name).with_(**changes))
    return graph


def test_sound_graphs_pass():
    verify(chain(), Stage.NORMAL)
    verify(residual(), Stage.NORMAL)
    verify(formatted(chain()), Stage.FORMATTED)
    verify(formatted(residual()), Stage.FORMATTED)
    verify(reordered(), Stage.FORMATTED)


def test_each_stage_keeps_the_rules_before_it():
    graph = chain()
    del graph.constants["w"]
    for stage in Stage:
        assert broken("V6", graph, stage)
    verify(residual(), Stage.NORMAL)
    broken("V11", residual(), Stage.FORMATTED)


def test_v1_names_ops_and_attributes():
    graph = chain()
    graph._graph.nodes["a"]["node"] = graph.node("a").with_(name="other")
    assert broken("V1", graph) == "node other (eltwise) is stored under the name 'a'"
    assert "node a (relu): unknown op 'relu'" in broken("V1", change(chain(), "a", op="relu"))
    graph = change(chain(), "a", attrs=Reshape((16,)))
    assert broken("V1", graph) == "node a (eltwise): attrs must be Eltwise, got Reshape"


def test_v2_operands():
    graph = chain()
    graph.set_inputs("a", {})
    assert broken("V2", graph) == "node a (eltwise): op eltwise needs operand 'src'"
    graph.set_inputs("a", {"src": Value("x"), "weights": Value("x")})
    assert broken("V2", graph) == "node a (eltwise): op eltwise has no operand 'weights'; it has ['src']"
    graph = chain()
    graph.set_inputs("w", {"src": Value("x")})
    assert broken("V2", graph) == "node w (constant) must have the operands [], not ['src']"
    graph = residual()
    graph.set_inputs("conv_b", {"src": Value("mid"), "weights": Value("w")})
    assert broken("V2", graph) == "node conv_b (convolution): operand 'post_op_0' of its sum post-op is not connected"


def test_v3_results():
    form = chain().to_networkx()
    form.edges["x", "a", "src"]["result"] = 2
    with pytest.raises(VerifyError, match=r"V3: node a \(eltwise\): operand src reads result 2 of node x \(input\)"):
        Graph.from_networkx(form)


def test_v4_boundary():
    graph = chain()
    graph.remove("y")
    graph.remove("z")
    assert broken("V4", graph) == "graph chain has no output; mark one with Graph.output"
    assert broken("V4", change(chain(), "y", results=(TYPE,))) == "node y (output) must have 0 results, has 1"
    graph = Graph()
    graph.add(Node("x", "input", Attrs(), (TYPE, TYPE)), {})
    assert broken("V4", graph) == "node x (input) must have 1 results, has 2"
    graph = change(chain(), "x", post_ops=(PostOp("eltwise", Eltwise("relu")),))
    assert broken("V4", graph) == "node x (input) computes nothing, but has the post-op eltwise"
    graph = chain()
    graph.add(Node("n", "eltwise", Eltwise("relu"), ()), {"src": Value("x")})
    assert broken("V4", graph) == "node n (eltwise) has no result"


def test_v5_cycle():
    graph = chain()
    graph.set_input("a", "src", Value("b"))
    assert re.fullmatch("graph chain has a cycle: (a -> b|b -> a)", broken("V5", graph))


def test_v6_constants():
    graph = chain()
    graph.constants["w"] = torch.zeros(8, 2)
    assert broken("V6", graph) == "node w (constant): data is f32[8,2], but the node declares f32[2,8]"
    graph.constants["w"] = torch.zeros(2, 8, dtype=torch.complex64)
    assert "node w (constant): unknown data type torch.complex64" in broken("V6", graph)
    graph.constants["w"] = [0.0]
    assert broken("V6", graph) == "node w (constant): data must be a torch tensor or an Initialiser, got list"
    del graph.constants["w"]
    assert "node w (constant) has no data" in broken("V6", graph)
    graph = chain()
    graph.constants["a"] = torch.zeros(2, 8)
    assert broken("V6", graph) == "graph chain has data for 'a', which is not a constant"


def test_v7_types():
    graph = change(chain(), "a", results=(TensorType((2, 8), "bf16"),))
    assert broken("V7", graph) == "node a (eltwise): recorded results are [bf16[2,8]], inferred are [f32[2,8]]"
    graph = Graph()
    graph.output(graph.add(Node("r", "reshape", Reshape((5,)), (TYPE,)), {"src": graph.input("x", TYPE)})[0])
    assert broken("V7", graph).startswith("node r (reshape): src (2, 8) has 16 elements but shape (5,) holds 5")


def test_v8_post_ops():
    graph = chain()
    add_post_op(graph, "a", PostOp("prelu", Attrs(), "post_op_0"), Value("w"))
    assert "node a (eltwise) cannot absorb the post-op prelu; it can absorb " in broken("V8", graph)
    graph = residual()
    add_post_op(graph, "conv_a", PostOp("eltwise", Eltwise("relu"), "post_op_0"), Value("x"))
    assert broken("V8", graph) == "node conv_a (convolution): its eltwise post-op has an operand"
    graph = residual()
    add_post_op(graph, "conv_a", PostOp("binary", Attrs()))
    assert broken("V8", graph) == "node conv_a (convolution): its binary post-op has no operand"
    graph = residual()
    add_post_op(graph, "conv_b", PostOp("binary", Attrs(), "post_op_1"), Value("w"))
    assert broken("V8", graph) == (
        "node conv_b (convolution): operand post_op_1 of its binary is f32[16,16,1,1], dst is f32[1,16,6,6]"
    )


def test_v9_sum_overwrites_a_boundary():
    graph = residual()
    graph.set_input("conv_b", "post_op_0", Value("x"))
    assert broken("V9", graph) == (
        "node conv_b (convolution): its sum post-op overwrites operand post_op_0, but x lies in the buffer of "
        "node x (input)"
    )


def test_v9_sum_overwrites_what_is_read_later():
    graph = residual()
    graph.output(emit(graph, "eltwise", {"src": Value("conv_a")}, Eltwise("abs"), name="late"))
    assert "but node late (eltwise) reads conv_a too and need not run before it" in broken("V9", graph)
    graph = residual()
    graph.output(Value("conv_a"), "also")
    assert "but node also (output) reads conv_a too" in broken("V9", graph)


def test_v9_sum_overwrites_its_own_source():
    graph = residual()
    graph.set_input("conv_b", "src", Value("conv_a"))
    graph.remove_dead()
    assert "but it reads conv_a as src too" in broken("V9", graph)


def test_v9_sum_overwrites_through_views():
    graph = residual()
    view = emit(graph, "permute", {"src": Value("conv_a")}, Permute((0, 1, 3, 2)), name="view")
    graph.output(emit(graph, "eltwise", {"src": view}, Eltwise("abs"), name="late"))
    assert "but node late (eltwise) reads view too" in broken("V9", graph)
    graph.set_input("conv_b", "post_op_0", view)
    assert "but node late (eltwise) reads view too" in broken("V9", graph)


@pytest.mark.parametrize(
    ("op", "attrs", "dims", "hazard"),
    [
        ("expand", Expand(IMAGE.dims), (1, 16, 6, 1), "but part repeats act"),
        ("slice", Slice((0, 0, 0, 0), IMAGE.dims, (1, 1, 1, 1)), (1, 16, 6, 7), ""),
    ],
)
def test_v9_sum_overwrites_a_repetition_but_it_may_overwrite_a_part(op, attrs, dims, hazard):
    graph = residual()
    z = emit(graph, "eltwise", {"src": graph.input("z", TensorType(dims))}, Eltwise("relu"), name="act")
    graph.set_input("conv_b", "post_op_0", emit(graph, op, {"src": z}, attrs, name="part"))
    if hazard:
        assert hazard in broken("V9", graph)
    else:
        verify(graph, Stage.NORMAL)


def test_v9_two_sums():
    graph = residual()
    add_post_op(graph, "conv_b", PostOp("sum", Sum((1.0,)), "post_op_1"), Value("mid"))
    assert broken("V9", graph) == "node conv_b (convolution) has 2 sum post-ops; there is one destination to add to"


def test_v10_identities():
    for op, attrs in (("reshape", Reshape((2, 8))), ("permute", Permute((0, 1))), ("expand", Expand((2, 8)))):
        graph = chain()
        graph.output(emit(graph, op, {"src": Value("a")}, attrs, name="same"))
        assert broken("V10", graph) == f"node same ({op}) returns its source unchanged; remove it"


def test_v11_descriptors_match():
    graph = change(formatted(chain()), "a", descs=())
    assert broken("V11", graph) == "node a (eltwise) has 0 descriptors for 1 results"
    graph = change(formatted(chain()), "a", descs=(MemoryDesc((2, 9)),))
    assert broken("V11", graph) == "node a (eltwise): result 0 is f32[2,8], its descriptor is f32[2,9]:ab"
    graph = change(formatted(chain()), "a", descs=(MemoryDesc((2, 8), "bf16"),))
    assert broken("V11", graph) == "node a (eltwise): result 0 is f32[2,8], its descriptor is bf16[2,8]:ab"


def test_v12_any_is_left():
    any_ = MemoryDesc.any((2, 8))
    graph = change(formatted(chain()), "a", descs=(any_,))
    assert broken("V12", graph) == "node a (eltwise): the format of result 0 is still any"
    graph = change(formatted(chain()), "a", choice=Choice("table", "x", {"src": any_}))
    assert broken("V12", graph) == "node a (eltwise): the format of operand src is still any"


def test_v13_choices():
    graph = change(formatted(chain()), "a", choice=None)
    assert broken("V13", graph) == "node a (eltwise) has no choice of how to run"
    graph = change(formatted(chain()), "a", choice=Choice("table", "x", {}))
    assert broken("V13", graph) == "node a (eltwise) reads ['src'], but its choice names formats of []"


def test_v14_a_missing_reorder():
    graph = reordered()
    graph.set_input("act", "src", Value("x"))
    assert broken("V14", graph) == (
        "node act (eltwise) reads src as f32[1,16,6,6]:acdb, but x is stored as f32[1,16,6,6]:abcd"
    )


def test_v15_views_follow_their_source():
    graph = Graph()
    value = emit(graph, "permute", {"src": graph.input("x", TYPE)}, Permute((1, 0)), name="view")
    graph.output(emit(graph, "eltwise", {"src": value}, Eltwise("relu"), name="act"))
    formatted(graph)
    assert broken("V15", graph) == (
        "node view (permute) is stored as f32[8,2]:ab, but as a view of f32[2,8]:ab it is f32[8,2]:ba"
    )
    graph = Graph()
    source = emit(graph, "eltwise", {"src": graph.input("x", IMAGE)}, Eltwise("relu"), name="act")
    graph.output(emit(graph, "reshape", {"src": source}, Reshape((1, 576)), name="flat"))
    formatted(graph)
    change(graph, "act", descs=(LAST,))
    change(graph, "flat", choice=Choice("view", "view", {"src": LAST}))
    assert "node flat (reshape) cannot be a view of f32[1,16,6,6]:acdb: " in broken("V15", graph)


def test_v16_outputs_are_plain_inputs_need_not_be():
    blocked = MemoryDesc((2, 8), tag="aB8b")
    graph = change(formatted(chain()), "x", descs=(blocked,))
    change(graph, "a", choice=Choice("table", "x", {"src": blocked}))
    verify(graph, Stage.FORMATTED)
    graph = change(formatted(chain()), "b", descs=(blocked,))
    assert broken("V16", graph) == "node y (output) is stored as f32[2,8]:aB8b, which is not plain"


def test_v17_a_reorder_that_changes_nothing():
    graph = change(reordered(), "to_last", descs=(PLAIN,))
    change(graph, "act", choice=Choice("table", "jit", {"src": PLAIN}))
    assert broken("V17", graph) == (
        "node to_last (reorder) changes nothing: source and destination are f32[1,16,6,6]:abcd"
    )


def test_v18_a_sum_in_another_format():
    graph = formatted(residual())
    change(graph, "conv_a", descs=(LAST,))
    change(graph, "mid", choice=Choice("table", "jit", {"src": LAST}))
    operands = {**graph.node("conv_b").choice.operands, "post_op_0": LAST}
    change(graph, "conv_b", choice=Choice("table", "jit", operands))
    assert broken("V18", graph) == (
        "node conv_b (convolution): operand post_op_0 of its sum is f32[1,16,6,6]:acdb, dst is f32[1,16,6,6]:abcd"
    )


def joined(tag: str) -> Graph:
    """x_0, x_1 -> reorders -> a concat in place along the channels -> reorder -> output."""
    graph = Graph("joined")
    sources = [graph.input(f"x_{i}", TensorType((1, size, 6, 6))) for i, size in enumerate((16, 32))]
    parts = [emit(graph, "reorder", {"src": value}, Reorder(), name=f"part_{i}") for i, value in enumerate(sources)]
    whole = emit(graph, "concat", {f"src_{i}": value for i, value in enumerate(parts)}, Concat(1), name="cat")
    graph.output(emit(graph, "reorder", {"src": whole}, Reorder(), name="back"), "y")
    formatted(graph)
    descs = [MemoryDesc(graph.type_of(value).dims, tag=tag) for value in (*parts, whole)]
    for index in range(2):
        change(graph, f"part_{index}", descs=(descs[index],))
    change(graph, "cat", descs=(descs[2],), choice=Choice("view", "in_place", {"src_0": descs[0], "src_1": descs[1]}))
    change(graph, "back", choice=Choice("table", "jit", {"src": descs[2]}))
    return graph


def test_v19_what_moves_no_data():
    verify(joined("aBcd16b"), Stage.FORMATTED)
    assert broken("V19", joined("acdb")) == (
        "node cat (concat) cannot be in place: its result is f32[1,48,6,6]:acdb, where its sources are not dense; "
        "let a target join them"
    )
    graph, other = joined("aBcd16b"), MemoryDesc((1, 32, 6, 6), tag="aBcd8b")
    change(graph, "part_1", descs=(other,))
    operands = {**graph.node("cat").choice.operands, "src_1": other}
    change(graph, "cat", choice=Choice("view", "in_place", operands))
    assert broken("V19", graph) == (
        "node cat (concat) is in place, but operand src_1 is f32[1,32,6,6]:aBcd8b; as a part of "
        "f32[1,48,6,6]:aBcd16b it is f32[1,32,6,6]:aBcd16b; a reorder must come first"
    )
    graph = reordered()
    change(graph, "act", choice=Choice("view", "view", {"src": LAST}))
    assert broken("V19", graph) == ("node act (eltwise) computes, so it cannot be run as a view; a target must run it")


def quantized(stored, read):
    """Return a graph in which a rounding writes bytes of one grid, and a reorder reads them on another."""
    graph = Graph("bytes")
    x = graph.input("x", TensorType((2, 3)))
    rounded = emit(graph, "fake_quantize", {"src": x}, FakeQuantize(0.5, 0, 255), name="round")
    back = emit(graph, "reorder", {"src": rounded}, Reorder(), name="back")
    graph.output(back)
    written = MemoryDesc((2, 3), stored)
    plain = MemoryDesc((2, 3), "f32")
    changes = {
        "x": {"descs": (plain,)},
        "round": {
            "results": (TensorType((2, 3), stored),), "descs": (written,), "grids": {"dst": Grid((0.5,), 0, 255)},
            "choice": Choice("onednn", "reorder:jit:uni", {"src": plain}),
        },
        "back": {
            "descs": (plain,), "grids": {"src": read, "dst": read},
            "choice": Choice("onednn", "jit:uni", {"src": written}),
        },
        graph.output_nodes[0].name: {"choice": Choice("boundary", "output", {"src": plain})},
    }  # fmt: skip
    return graph.map_nodes(lambda node: node.with_(**changes[node.name]))


def test_v20_bytes_have_the_grid_of_their_producer():
    verify(quantized("u8", Grid((0.5,), 0, 255)), Stage.FORMATTED)
    other = broken("V20", quantized("u8", Grid((0.25,), 0, 255)))
    assert other.startswith("node back (reorder): operand src lies on Grid(scales=(0.25,)") and "(0.5,)" in other


def test_v20_bytes_have_the_type_of_their_grid():
    message = broken("V7", quantized("s8", Grid((0.5,), 0, 255)))  # the rounding's own result is checked before
    assert message.startswith("node round (fake_quantize): recorded results are [s8[2,3]]")


def test_a_node_that_agreed_is_examined_again_where_it_or_its_operands_change():
    graph = chain()
    verify(graph, Stage.IMPORTED)
    graph.replace(graph.node("x").with_(results=(TensorType((3, 8)),)))
    assert "inferred are [f32[3,8]]" in broken("V7", graph)
    graph = chain()
    verify(graph, Stage.IMPORTED)
    graph.replace(graph.node("a").with_(results=(TensorType((3, 8)),)))
    assert "recorded results are [f32[3,8]]" in broken("V7", graph)
    graph = chain()
    verify(graph, Stage.IMPORTED)
    assert graph.node("a").agreed is not None
    assert graph.node("a").with_(origin="there").agreed is not None
    with pytest.raises(TypeError, match="a node has no ops"):
        graph.node("a").with_(ops="relu")


def test_every_rule_has_a_negative_test():
    tested = {match[1] for name in globals() if (match := re.match(r"test_v(\d+)_", name))}
    assert tested == {rule.number.removeprefix("V") for rule in RULES}


def test_the_document_lists_every_rule():
    text = (Path(__file__).parents[2] / "docs" / "verifier.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if "| V" in line]
    assert rows == [(rule.number, rule.stage.name.lower(), rule.text) for rule in RULES]
