"""Concats in place: sources are written straight into the result's buffer, nothing that is needed is overwritten."""

from __future__ import annotations

import pytest
import torch

from fmtprop.capture import load
from fmtprop.compiling.stages import normalise
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Choice, PostOp, Value
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Concat, Reshape, Slice, emit
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.sum import Sum
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.target import Setting
from fmtprop.runtime import Executor, Plan, build_plan
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.plan import Access, Home
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from tests.runtime.in_place import blocks_of, put_in_place, runs_right

TANH, RELU = Eltwise("tanh"), Eltwise("relu")


class Model:
    """A graph in the making, on images of 6 x 6."""

    def __init__(self) -> None:
        self.graph = Graph("model")

    def input(self, channels: int, name: str = "x") -> Value:
        return self.graph.input(name, TensorType((1, channels, 6, 6)))

    def conv(self, src: Value, channels: int, name: str, residual: Value | None = None) -> Value:
        have = self.graph.type_of(src).dims[1]
        data = torch.randn(channels, have, 1, 1, generator=torch.Generator().manual_seed(channels)) / have**0.5
        weights = self.graph.constant(f"{name}.w", TensorType(tuple(data.shape)), data)
        value = emit(self.graph, "convolution", {"src": src, "weights": weights}, Conv.make(2), name=name)
        if residual is not None:
            post_op = PostOp("sum", Sum((1.0,)), "post_op_0")
            self.graph.replace(self.graph.node(name).with_(post_ops=(post_op,)))
            self.graph.set_inputs(name, {**self.graph.inputs(name), "post_op_0": residual})
        return value

    def act(self, src: Value, name: str, attrs: Eltwise = TANH) -> Value:
        return emit(self.graph, "eltwise", {"src": src}, attrs, name=name)

    def join(self, *values: Value, name: str = "cat") -> Value:
        return emit(self.graph, "concat", {f"src_{i}": v for i, v in enumerate(values)}, Concat(1), name=name)

    def part(self, src: Value, start: int, size: int, name: str) -> Value:
        dims = self.graph.type_of(src).dims
        attrs = Slice((0, start, 0, 0), (1, size, *dims[2:]), (1, 1, 1, 1))
        return emit(self.graph, "slice", {"src": src}, attrs, name=name)

    def plan(self, *outputs: Value, policy: str = "plain", verified: bool = True) -> Plan:
        """Put every concat in place, plan, and check what the plan computes and where."""
        for value in outputs:
            self.graph.output(value)
        target = OneDnnTarget()
        rule = blocks_of(8) if policy == "blocked" else None
        formatted = put_in_place(
            AssignFormats(policy, Setting(target, ReferenceTarget()), rule=rule).run(self.graph), target
        )
        if verified:
            verify(formatted, Stage.FORMATTED)
        plan = build_plan(formatted, target)
        assert not any(step.node.op == "concat" for step in plan.steps)
        runs_right(self.graph, plan)
        disjoint(plan)
        return plan


def disjoint(plan: Plan) -> None:
    """Check that buffers alive together share no bytes, and that the arena is no smaller than its bound."""
    alive = [b for b in plan.buffers if b.home is Home.ARENA]
    for i, a in enumerate(alive):
        for b in alive[:i]:
            together = a.first <= b.last and b.first <= a.last
            assert not together or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    assert plan.peak_nbytes <= plan.arena_nbytes


def copies(plan: Plan) -> list[str]:
    return [step.node.name for step in plan.steps if step.node.name.endswith("_copy")]


def result(plan: Plan, name: str) -> Access:
    return next(step for step in plan.steps if step.node.name == name).results[0]


def start(plan: Plan, name: str) -> tuple[int, int]:
    """Return the buffer in which a node's result lies, and the channel (of 36 elements) at which it begins."""
    access = result(plan, name)
    return access.buffer, access.desc.offset0 // 36


POLICIES = pytest.mark.parametrize("policy", ["plain", "blocked"])

# ---------------------------------------------------------------- where sources are written


@POLICIES
def test_sources_are_written_straight_into_the_result(policy):
    m = Model()
    x = m.input(16)
    a, b = m.conv(x, 16, "a"), m.conv(x, 24, "b")
    plan = m.plan(m.act(m.conv(m.join(a, b), 8, "after"), "end"), policy=policy)
    (root, first), (other, second) = start(plan, "a"), start(plan, "b")
    assert (root, first, second) == (other, 0, 16)
    read = next(step for step in plan.steps if step.node.name == "after").operands["src"]
    assert (read.buffer, read.desc.offset0) == (root, 0)
    assert copies(plan) == []
    buffer = plan.buffers[root]
    assert buffer.nbytes == 40 * 36 * 4
    assert (buffer.first, buffer.last) == (
        min(i for i, s in enumerate(plan.steps) if s.node.name in "ab"),
        max(i for i, s in enumerate(plan.steps) if s.node.name == "after"),
    )


@POLICIES
def test_concats_of_concats_are_one_buffer(policy):
    m = Model()
    x = m.input(16)
    whole = m.conv(x, 16, "c0")
    for index in range(1, 4):
        new = m.conv(m.act(whole, f"act{index}"), 8, f"c{index}")
        whole = m.join(whole, new, name=f"cat{index}")
    plan = m.plan(m.conv(whole, 8, "end"), policy=policy)
    assert copies(plan) == []
    root = start(plan, "c0")[0]
    assert [start(plan, f"c{i}") for i in range(4)] == [(root, 0), (root, 16), (root, 24), (root, 32)]


def test_every_source_through_a_view_of_all_of_it():
    m = Model()
    x = m.input(16)
    flat = emit(m.graph, "reshape", {"src": m.conv(x, 16, "a")}, Reshape((1, 16, 36)), name="flat")
    plan = m.plan(emit(m.graph, "concat", {"src_0": flat, "src_1": flat}, Concat(1), name="cat"))
    assert copies(plan) == ["cat.src_1_copy"]
    assert start(plan, "a")[1] == 0


def test_rows_of_any_format():
    g = Graph("rows")
    x = g.input("x", TensorType((3, 40)))
    parts = [emit(g, "eltwise", {"src": x}, TANH, name=name) for name in ("a", "b")]
    value = emit(g, "concat", {"src_0": parts[0], "src_1": parts[1]}, Concat(0), name="cat")
    g.output(emit(g, "eltwise", {"src": value}, RELU, name="end"))
    target = OneDnnTarget()
    plan = build_plan(
        put_in_place(AssignFormats("propagate", Setting(target, ReferenceTarget())).run(g), target), target
    )
    assert len(plan.steps) == 3
    assert result(plan, "b").desc.offset0 == 120
    runs_right(g, plan)


# ---------------------------------------------------------------- what cannot be written there is copied


def test_inputs_and_constants_are_copied():
    m = Model()
    x = m.input(16)
    c = m.graph.constant("c", TensorType((1, 8, 6, 6)), torch.randn(1, 8, 6, 6))
    plan = m.plan(m.conv(m.join(x, m.conv(x, 8, "a"), c), 8, "end"))
    assert copies(plan) == ["cat.src_0_copy", "cat.src_2_copy"]
    assert [start(plan, name)[1] for name in ("cat.src_0_copy", "a", "cat.src_2_copy")] == [0, 16, 24]
    assert [step.node.name for step in plan.reorders] == copies(plan)
    assert all("must be inside the result" in step.node.choice.reason for step in plan.reorders)


def test_what_lies_in_another_concat_or_twice_in_one_is_copied():
    m = Model()
    a = m.conv(m.input(16), 16, "a")
    first = m.join(a, a, name="first")
    second = m.join(m.conv(first, 8, "b"), a, name="second")
    plan = m.plan(m.conv(second, 8, "end"))
    assert copies(plan) == ["first.src_1_copy", "second.src_1_copy"]


def test_a_slice_of_a_tensor_is_copied_and_a_slice_of_a_concat_is_a_view():
    m = Model()
    x = m.input(16)
    whole = m.join(m.conv(x, 16, "a"), m.conv(x, 16, "b"))
    part = m.part(whole, 8, 16, "part")
    plan = m.plan(m.join(m.act(part, "act"), m.part(whole, 24, 8, "other"), name="second"), policy="blocked")
    assert copies(plan) == ["second.src_1_copy"]
    read = next(step for step in plan.steps if step.node.name == "act").operands["src"]
    assert (read.buffer, read.desc.offset0) == (start(plan, "a")[0], 8 * 36)


def test_a_view_of_a_source_begins_where_the_source_was_placed():
    m = Model()
    x = m.input(16)
    a, b = m.conv(x, 16, "a"), m.conv(x, 16, "b")
    tail = m.act(m.part(b, 8, 8, "part"), "tail")
    plan = m.plan(m.conv(m.join(a, b), 8, "end"), tail, policy="blocked")
    read = next(step for step in plan.steps if step.node.name == "tail").operands["src"]
    assert (read.buffer, read.desc.offset0) == (start(plan, "a")[0], 24 * 36)


def test_integers_and_the_reference_target():
    g = Graph("integers")
    x = g.input("x", TensorType((1, 4), "s64"))
    value = emit(g, "concat", {"src_0": x, "src_1": x}, Concat(1), name="cat")
    g.output(emit(g, "reshape", {"src": value}, Reshape((8,)), name="flat"))
    target = OneDnnTarget()
    formatted = put_in_place(AssignFormats("plain", Setting(target, ReferenceTarget())).run(g), target)
    plan = build_plan(formatted, target)
    assert [step.target for step in plan.steps] == ["reference", "reference"]
    numbers = torch.arange(4).reshape(1, 4)
    assert torch.equal(Executor(plan).run([numbers])[0], torch.cat([numbers, numbers], 1).reshape(8))


def test_constants_alone():
    m = Model()
    c = m.graph.constant("c", TensorType((1, 8, 6, 6)), torch.randn(1, 8, 6, 6))
    whole = m.join(c, c)
    plan = m.plan(emit(m.graph, "binary", {"src_0": m.act(whole, "once"), "src_1": m.input(16)}, Binary("add")))
    assert copies(plan) == ["cat.src_0_copy", "cat.src_1_copy"]


# ---------------------------------------------------------------- nothing that is needed is overwritten


@POLICIES
def test_an_element_wise_op_does_not_overwrite_a_source_or_the_result_that_is_read_later(policy):
    m = Model()
    x = m.input(16)
    a, b = m.conv(x, 16, "a"), m.conv(x, 16, "b")
    early = m.act(a, "early")
    whole = m.join(a, b)
    late = m.act(whole, "late")
    plan = m.plan(early, m.conv(whole, 8, "c"), m.conv(late, 8, "d"), policy=policy)
    root = start(plan, "a")[0]
    assert start(plan, "early")[0] != root
    assert start(plan, "late")[0] != root


@POLICIES
def test_the_last_reader_of_the_result_writes_over_it(policy):
    m = Model()
    x = m.input(16)
    whole = m.join(m.conv(x, 16, "a"), m.conv(x, 16, "b"))
    plan = m.plan(m.conv(m.act(whole, "act"), 8, "end"), policy=policy)
    assert start(plan, "act") == start(plan, "a")


def test_a_concat_of_one_source_keeps_it_while_it_is_read():
    m = Model()
    a = m.conv(m.input(16), 16, "a")
    whole = m.join(a)
    act = m.act(a, "act")
    plan = m.plan(m.conv(act, 8, "b"), m.conv(whole, 8, "c"))
    assert start(plan, "act")[0] != start(plan, "a")[0]


def test_a_sum_is_added_into_its_slot():
    m = Model()
    a = m.conv(m.input(16), 16, "a")
    b = m.conv(m.conv(a, 16, "between"), 16, "b", residual=a)
    d = m.conv(m.conv(b, 16, "again"), 16, "d", residual=b)
    plan = m.plan(m.conv(m.join(m.conv(d, 8, "first"), d), 8, "end"))
    assert copies(plan) == []
    assert start(plan, "a") == start(plan, "b") == start(plan, "d") == (start(plan, "first")[0], 8)
    for name in "bd":
        step = next(step for step in plan.steps if step.node.name == name)
        assert check_node(step.node, step.executable) is None


def test_a_residual_that_a_concat_holds_is_copied_before_it_is_added_to():
    m = Model()
    x = m.input(16)
    a = m.conv(x, 16, "a")
    whole = m.join(m.conv(x, 8, "other"), a)
    b = m.conv(m.conv(whole, 16, "between"), 16, "b", residual=a)
    plan = m.plan(m.conv(b, 8, "end"), m.conv(whole, 8, "late"), verified=False)
    assert copies(plan) == ["b.post_op_0_copy"]
    assert start(plan, "b")[0] != start(plan, "a")[0]


def test_a_residual_is_copied_into_the_slot_of_the_sum_where_others_read_it_later():
    m = Model()
    a = m.conv(m.input(16), 16, "a")
    b = m.conv(m.conv(a, 16, "between"), 16, "b", residual=a)
    plan = m.plan(m.conv(m.join(m.conv(b, 8, "first"), b), 8, "end"), m.act(a, "late"), verified=False)
    assert copies(plan) == ["b.post_op_0_copy"]
    assert start(plan, "b.post_op_0_copy") == start(plan, "b") == (start(plan, "first")[0], 8)


# ---------------------------------------------------------------- outputs


def test_a_result_that_is_an_output_is_written_straight_into_the_callers_tensor():
    m = Model()
    x = m.input(16)
    plan = m.plan(m.join(m.conv(x, 16, "a"), m.conv(x, 8, "b")))
    ((_, access),) = plan.outputs
    assert plan.buffers[access.buffer].home is Home.OUTPUT
    assert [start(plan, name) for name in "ab"] == [(access.buffer, 0), (access.buffer, 16)]


def test_a_source_that_is_an_output_too():
    m = Model()
    x = m.input(16)
    a = m.conv(x, 16, "a")
    whole = m.join(m.conv(x, 8, "b"), a)
    m.plan(a, m.conv(whole, 8, "end"))
    m = Model()
    x = m.input(16)
    a = m.conv(x, 16, "a")
    m.plan(a, m.join(m.conv(x, 8, "b"), a))


def test_a_format_without_dense_parts_is_refused():
    m = Model()
    x = m.input(16)
    m.graph.output(m.join(m.conv(x, 16, "a"), m.conv(x, 8, "b")))
    formatted = AssignFormats("plain", Setting(OneDnnTarget(), ReferenceTarget())).run(m.graph)
    node = formatted.node("cat")
    last = MemoryDesc(node.results[0].dims, tag="acdb")
    choice = Choice("view", "in_place", node.choice.operands)
    formatted.replace(node.with_(descs=(last,), choice=choice))
    with pytest.raises(PlanError, match=r"node cat \(concat\) cannot be in place: its sources are not dense parts"):
        build_plan(formatted, OneDnnTarget())


# ---------------------------------------------------------------- whole networks


def compared(name: str) -> tuple[Graph, Plan, Plan]:
    """Return a built-in graph, its plain plan, and the blocked one with concats in place; compare what they give."""
    normal, _ = normalise(load(name))
    target, fallback = OneDnnTarget(), ReferenceTarget()
    plain = build_plan(AssignFormats("plain", Setting(target, fallback)).run(normal), target)
    formatted = put_in_place(AssignFormats("blocked", Setting(target, fallback), rule=blocks_of(8)).run(normal), target)
    verify(formatted, Stage.FORMATTED)
    plan = build_plan(formatted, target)
    disjoint(plan)
    shape = normal.input_nodes[0].results[0].dims
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for want, got in zip(Executor(plain).run([x]), Executor(plan).run([x]), strict=True):
        assert relative_error(got, want) < 2e-5
    return formatted, plain, plan


def test_a_dense_net_executes_no_concat():
    _, plain, plan = compared("densenet121")
    assert sum(step.node.op == "concat" for step in plain.steps) == 58
    assert [step.node.name for step in plan.steps if step.node.op == "concat"] == []
    assert copies(plan) == []
    # at most two around the first convolution and one around the last pooling, as the library's kernels want
    assert len(plan.reorders) == len([s for s in plan.steps if s.node.op == "reorder"]) <= 3


@pytest.mark.parametrize("name", ["concat", "shufflenet_v2", "inception_v3"])
def test_other_networks_give_the_same(name):
    graph, _, plan = compared(name)
    assert graph.count("concat") > 0
    assert copies(plan) == [] or name == "shufflenet_v2"  # its slices lie elsewhere


@pytest.mark.slow
def test_a_large_one():
    compared("unet")
