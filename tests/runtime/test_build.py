"""From a formatted graph to a plan: whose memory every tensor lives in, and what runs when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.compiling.stages import normalise
from fmtprop.errors import PlanError
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Slice, emit
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.sum import Sum
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.formats import channel_blocked
from fmtprop.passes.assignment.policies import Option, Question
from fmtprop.passes.target import Setting
from fmtprop.runtime import Executor, Plan, build_plan
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.constants import ConstantStore, release
from fmtprop.runtime.plan import Home
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from tests.runtime.in_place import runs_right

DIMS = (1, 16, 8, 8)
IMAGE = TensorType(DIMS)
RELU, TANH = Eltwise("relu"), Eltwise("tanh")


def planned(graph: Graph, policy: str = "propagate", *, verified: bool = True) -> Plan:
    """Plan a graph; rule V9 keeps sums from what others read, but a user's own pass need not have checked it."""
    target = OneDnnTarget()
    formatted = AssignFormats(policy, Setting(target, ReferenceTarget())).run(graph)
    if verified:
        verify(formatted, Stage.FORMATTED)
    return build_plan(formatted, target)


def convolution(g: Graph, name: str, src):
    generator = torch.Generator().manual_seed(len(name))
    weights = g.constant(f"{name}.w", TensorType((16, 16, 1, 1)), torch.randn(16, 16, 1, 1, generator=generator) / 4)
    return emit(g, "convolution", {"src": src, "weights": weights}, Conv.make(2), name=name)


def blocked(question: Question) -> Iterator[Option]:
    """Ask for blocks of eight channels everywhere, which PyTorch cannot copy."""
    images = [*question.activations(), *question.results]
    given = {**question.given, **question.results}
    yield Option(question.fill({name: channel_blocked(given[name], 8) for name in images}), "blocks of eight")


def step(plan: Plan, name: str):
    return next(s for s in plan.steps if s.node.name == name)


def place(plan: Plan, name: str) -> int:
    return step(plan, name).results[0].buffer


def summing(readers: int) -> Graph:
    """Return conv b adding into conv a in place; `readers` other nodes read a afterwards."""
    g = Graph("sum")
    a = convolution(g, "a", g.input("x", IMAGE))
    b = convolution(g, "b", convolution(g, "between", a))
    node = g.node("b")
    g.replace(node.with_(post_ops=(PostOp("sum", Sum((1.0,)), "post_op_0"),)))
    g.set_inputs("b", {**g.inputs("b"), "post_op_0": a})
    g.output(b)
    for index in range(readers):
        g.output(emit(g, "eltwise", {"src": a}, TANH, name=f"late_{index}"))
    return g


# ---------------------------------------------------------------- in place


def test_an_element_wise_op_writes_over_what_nobody_reads_again():
    g = Graph("chain")
    value = emit(g, "eltwise", {"src": convolution(g, "conv", g.input("x", IMAGE))}, TANH, name="tanh")
    g.output(emit(g, "binary", {"src_0": value, "src_1": value}, Binary("mul"), name="square"))
    plan = planned(g)
    assert place(plan, "tanh") == place(plan, "conv")
    runs_right(g, plan)


def test_what_others_read_later_is_not_overwritten():
    g = Graph("fork")
    value = convolution(g, "conv", g.input("x", IMAGE))
    tanh = emit(g, "eltwise", {"src": value}, TANH, name="tanh")
    g.output(emit(g, "binary", {"src_0": tanh, "src_1": value}, Binary("mul"), name="mul"))
    plan = planned(g)
    assert place(plan, "tanh") != place(plan, "conv")
    runs_right(g, plan)


def test_what_a_view_of_it_reads_later_is_not_overwritten():
    g = Graph("view")
    value = convolution(g, "conv", g.input("x", IMAGE))
    part = emit(g, "slice", {"src": value}, Slice((0, 0, 0, 0), (1, 1, 1, 1), (1, 8, 8, 8)), name="part")
    g.output(emit(g, "eltwise", {"src": value}, TANH, name="tanh"))
    g.output(part)
    plan = planned(g, "plain")
    assert place(plan, "tanh") != place(plan, "conv")
    runs_right(g, plan)


def test_inputs_and_outputs_are_not_overwritten():
    g = Graph("boundary")
    tanh = emit(g, "eltwise", {"src": g.input("x", IMAGE)}, TANH, name="tanh")
    g.output(tanh)
    g.output(emit(g, "eltwise", {"src": tanh}, RELU, name="relu"))
    plan = planned(g)
    homes = [plan.buffers[place(plan, name)].home for name in ("tanh", "relu")]
    assert homes == [Home.OUTPUT, Home.OUTPUT]
    assert place(plan, "tanh") != place(plan, "relu")
    runs_right(g, plan)


# ---------------------------------------------------------------- sums


def test_a_sum_is_added_into_the_residuals_own_buffer():
    g = summing(0)
    plan = planned(g)
    assert place(plan, "b") == place(plan, "a")
    assert [s for s in plan.steps if s.node.name.endswith("_copy")] == []
    runs_right(g, plan)


def test_a_residual_that_is_read_later_is_copied_first():
    g = summing(1)
    plan = planned(g, verified=False)
    copy = step(plan, "b.post_op_0_copy")
    assert plan.steps.index(copy) == plan.steps.index(step(plan, "b")) - 1
    assert "adds into post_op_0 in place, but others still read it" in copy.node.choice.reason
    assert place(plan, "b") == copy.results[0].buffer != place(plan, "a")
    assert copy in plan.reorders
    runs_right(g, plan)


def test_a_residual_that_is_the_callers_input_is_copied():
    g = Graph("input")
    x = g.input("x", IMAGE)
    out = convolution(g, "conv", g.input("y", IMAGE))
    g.replace(g.node("conv").with_(post_ops=(PostOp("sum", Sum((1.0,)), "post_op_0"),)))
    g.set_inputs("conv", {**g.inputs("conv"), "post_op_0": x})
    g.output(out)
    plan = planned(g, "plain", verified=False)
    assert [s.node.name for s in plan.steps] == ["conv.post_op_0_copy", "conv"]
    runs_right(g, plan)


# ---------------------------------------------------------------- outputs


def test_results_are_written_straight_into_the_callers_tensors():
    g = Graph("direct")
    g.output(emit(g, "eltwise", {"src": g.input("x", IMAGE)}, RELU, name="relu"))
    plan = planned(g)
    ((_, access),) = plan.outputs
    assert plan.buffers[access.buffer].home is Home.OUTPUT
    assert access.buffer == place(plan, "relu")
    assert plan.arena_nbytes == 0
    runs_right(g, plan)


def test_one_value_returned_twice_is_copied_out():
    g = Graph("twice")
    value = emit(g, "eltwise", {"src": g.input("x", IMAGE)}, RELU)
    g.output(value)
    g.output(value)
    plan = planned(g)
    assert {plan.buffers[access.buffer].home for _, access in plan.outputs} == {Home.ARENA}
    runs_right(g, plan)


def test_what_has_no_numbers_is_no_step():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    for policy in ("plain", "propagate", "optimal"):
        net = fp.compile(module, torch.randn(0, 3, 16, 16), policy=policy)
        assert not net.plan.steps
        assert net(torch.randn(0, 3, 16, 16)).shape == (0, 4)
        assert net(torch.randn(0, 3, 16, 16), out=torch.empty(0, 4)).shape == (0, 4)

    class Total(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().sum(0)

    total = fp.compile(Total(), torch.randn(0, 3))
    assert len(total.plan.steps) == 1 and total(torch.randn(0, 3)).tolist() == [0, 0, 0]


def test_an_input_returned_as_it_is_and_one_that_nobody_reads():
    g = Graph("through")
    g.output(g.input("x", IMAGE))
    g.input("unused", IMAGE)
    plan = planned(g)
    assert plan.steps == ()
    assert [buffer >= 0 for _, _, buffer in plan.inputs] == [True, False]
    x = torch.randn(DIMS)
    (y,) = Executor(plan).run([x, x])
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()


# ---------------------------------------------------------------- constants


def test_weights_are_packed_once_and_their_originals_are_not_kept():
    g = Graph("weights")
    g.output(convolution(g, "conv", g.input("x", IMAGE)))
    plan = planned(g)
    assert [node.op for node in plan.packed] == ["reorder"]
    weights = step(plan, "conv").operands["weights"]
    assert plan.buffers[weights.buffer].home is Home.CONSTANT
    assert weights.desc.tag not in (None, "abcd")
    assert len(plan.constants) == 1
    assert plan.constant_nbytes == weights.desc.nbytes
    assert plan.constants[0].data_ptr() % 64 == 0
    runs_right(g, plan)


def test_shared_weights_are_packed_once():
    g = Graph("shared")
    weights = g.constant("w", TensorType((16, 16, 1, 1)), torch.randn(16, 16, 1, 1) / 4)
    value = g.input("x", IMAGE)
    for name in ("first", "second"):
        value = emit(g, "convolution", {"src": value, "weights": weights}, Conv.make(2), name=name)
    g.output(value)
    plan = planned(g)
    first, second = step(plan, "first"), step(plan, "second")
    if first.operands["weights"].desc == second.operands["weights"].desc:
        assert first.operands["weights"].buffer == second.operands["weights"].buffer
    assert len(plan.constants) == len({s.operands["weights"].desc for s in (first, second)})
    runs_right(g, plan)


def test_equal_weights_are_kept_once():
    g = Graph("tied")
    value, data = g.input("x", IMAGE), torch.randn(16, 16, 1, 1) / 4
    almost = data.clone()
    almost.view(-1)[101] += 1
    for name, weights in (("a", data), ("b", data.clone()), ("c", almost)):
        operands = {"src": value, "weights": g.constant(f"{name}.w", TensorType((16, 16, 1, 1)), weights)}
        value = emit(g, "convolution", operands, Conv.make(2), name=name)
    g.output(value)
    target = OneDnnTarget()
    plan = build_plan(AssignFormats("blocked", Setting(target, ReferenceTarget()), rule=blocked).run(g), target)
    places = [plan.buffers[step(plan, name).operands["weights"].buffer].index for name in "abc"]
    assert places[0] == places[1] != places[2]
    assert plan.constant_nbytes == 2 * data.nbytes == sum(constant.nbytes for constant in plan.constants)
    runs_right(g, plan)


def test_memory_of_the_user_stands_for_no_other_constant():
    store, desc = ConstantStore(), MemoryDesc((64,))
    theirs = torch.ones(64)
    borrowed = store.add(theirs, TensorType((64,)), desc, packed=True, native=True)
    first, second = (store.add(torch.ones(64), TensorType((64,)), desc, packed=False, native=True) for _ in range(2))
    kept = store.keep(first)
    assert borrowed is not kept is store.keep(second)
    theirs.zero_()
    assert torch.equal(kept.view(torch.float32), torch.ones(64))


def noted(made, tensors):
    made.extend(map(weakref.ref, tensors))
    return tensors


def test_what_was_computed_of_constants_goes_when_it_is_packed(monkeypatch):
    made, compute = [], ConstantStore.compute
    monkeypatch.setattr(ConstantStore, "compute", lambda *args: noted(made, compute(*args)))
    g = Graph("computed")
    weights = g.constant("w", TensorType((32, 16, 1, 1)), torch.randn(32, 16, 1, 1))
    negative = emit(g, "eltwise", {"src": weights}, Eltwise("linear", -1.0), name="negative")
    half = emit(g, "slice", {"src": negative}, Slice((0, 0, 0, 0), (16, 16, 1, 1), (1, 1, 1, 1)), name="half")
    x = g.input("x", TensorType((1, 16, 8, 8)))
    g.output(emit(g, "convolution", {"src": x, "weights": half}, Conv.make(2), name="conv"))
    plan = planned(g)
    assert len(made) > 1
    alive = [tensor for tensor in (reference() for reference in made) if tensor is not None]
    assert [tensor.nbytes for tensor in alive] == [plan.constant_nbytes] == [16 * 16 * 4]
    runs_right(g, plan)


def test_released_weights_are_freed_and_the_plan_keeps_its_own():
    array = np.random.default_rng(0).standard_normal((64, 48), dtype=np.float32)
    freed = weakref.ref(array)
    module = nn.Linear(48, 64)
    module.weight = nn.Parameter(torch.from_numpy(array))
    bias, x = module.bias.detach(), torch.randn(2, 48)
    want = module(x).detach()
    graph = from_torch(module, x)
    plan = planned(normalise(graph)[0])
    release(graph, module)
    del array
    gc.collect()
    assert freed() is None
    assert graph.constants == {}
    assert [tuple(tensor.shape) for tensor in module.parameters()] == [(0,), (0,)]
    assert bias.shape == (64,)  # what the caller holds stays valid
    with pytest.raises(RuntimeError):
        module(x)
    assert relative_error(Executor(plan).run([x])[0], want) < 1e-5


def test_an_exported_program_can_be_released():
    program = torch.export.export(nn.BatchNorm2d(4).eval(), (torch.ones(1, 4, 2, 2),))
    release(from_torch(program, None), program)
    assert {tuple(tensor.shape) for tensor in (*program.parameters(), *program.buffers())} == {(0,)}


def test_what_depends_on_constants_alone_runs_while_planning():
    g = Graph("folded")
    scale = emit(g, "eltwise", {"src": g.constant("c", IMAGE, torch.randn(DIMS))}, RELU, name="once")
    g.output(emit(g, "binary", {"src_0": g.input("x", IMAGE), "src_1": scale}, Binary("add"), name="add"))
    plan = planned(g)
    assert [s.node.name for s in plan.steps if s.node.op != "reorder"] == ["add"]
    assert "once" in [node.name for node in plan.packed]
    runs_right(g, plan)


def test_equal_primitives_are_compiled_once():
    g = Graph("equal")
    value = g.input("x", IMAGE)
    for name in "abc":
        value = emit(g, "eltwise", {"src": value}, TANH, name=name)
    g.output(value)
    plan = planned(g)
    assert len({id(s.executable) for s in plan.steps}) == 1


# ---------------------------------------------------------------- the arena


@pytest.mark.parametrize("policy", ["plain", "naive", "propagate"])
def test_buffers_alive_at_one_step_do_not_overlap_and_the_arena_is_near_its_bound(policy):
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3, padding=1)
            self.parts = nn.ModuleList(nn.Conv2d(32, 16 * k, 3, padding=1) for k in (1, 2, 3))
            self.join = nn.Conv2d(96, 32, 1)

        def forward(self, x):
            x = torch.relu(self.stem(x))
            y = torch.cat([torch.tanh(part(x)) for part in self.parts], 1)
            return nn.functional.max_pool2d(self.join(y) + x, 2)

    module, x = Block().eval(), torch.randn(1, 3, 16, 16)
    net = fp.compile(module, x, policy=policy)
    plan = net.plan
    alive = [
        (b.offset, b.offset + b.nbytes, b.first, b.last) for b in plan.buffers if b.home is Home.ARENA and b.nbytes
    ]
    for i, (start, end, first, last) in enumerate(alive):
        assert end <= plan.arena_nbytes
        for other_start, other_end, other_first, other_last in alive[:i]:
            together = first <= other_last and other_first <= last
            assert not together or end <= other_start or other_end <= start
    assert plan.peak_nbytes <= plan.arena_nbytes <= 1.3 * plan.peak_nbytes
    with torch.no_grad():
        assert relative_error(net(x), module(x)) < 1e-5


def test_lifetimes_cover_every_use():
    plan = planned(summing(2), verified=False)
    for number, s in enumerate(plan.steps):
        for access in (*s.operands.values(), *s.results):
            buffer = plan.buffers[access.buffer]
            if buffer.home is Home.ARENA:
                assert buffer.first <= number <= buffer.last
        if s.scratchpad is not None:
            assert (plan.buffers[s.scratchpad].first, plan.buffers[s.scratchpad].last) == (number, number)


# ---------------------------------------------------------------- errors


def test_a_graph_without_formats_is_refused_by_node():
    g = Graph("raw")
    g.output(emit(g, "eltwise", {"src": g.input("x", IMAGE)}, RELU))
    with pytest.raises(PlanError, match=r"node x \(input\) has no choice: assign formats before planning"):
        build_plan(g, OneDnnTarget())


def test_a_residual_that_cannot_be_copied_is_named():
    class Helpless(ReferenceTarget):
        def candidates(self, node, request):
            return ()

    formatted = AssignFormats("blocked", Setting(OneDnnTarget(), ReferenceTarget()), rule=blocked).run(summing(1))
    with pytest.raises(PlanError, match=r"node b \(convolution\): operand post_op_0 \(.*\) cannot be copied"):
        build_plan(formatted, Helpless())
