"""One model under changing numbers of threads: a plan for each, made from the same formats and constants."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling import planned
from fmtprop.ir.node import Node
from fmtprop.ir.ports import result_names
from fmtprop.runtime import threads as threading_plans
from fmtprop.runtime.agreement import relative_error
from fmtprop.runtime.plan import Home
from fmtprop.runtime.selfcheck import Mismatch
from fmtprop.runtime.threads import current_threads, running_with
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.bound import MovableMemory, OwnStream, Place
from tests.threads import torch_threads


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    with torch_threads():
        yield


class Net(nn.Module):
    """Convolutions (one grouped), a residual, views, a pool to 1×1, a product and an op that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(x + self.b(x))
        x = torch.nn.functional.adaptive_avg_pool2d(self.c(x), 1)
        return torch.softmax(self.head(x.flatten(1)), -1).cumsum(-1)


def compiled(threads: int, policy: str = "propagate") -> tuple[nn.Module, fp.CompiledModel, torch.Tensor]:
    torch.manual_seed(3)
    module, x = Net().eval(), torch.randn(4, 3, 31, 17)
    torch.set_num_threads(threads)
    return module, fp.compile(module, x, policy=policy), x


def expected(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


@pytest.mark.parametrize("policy", ["propagate", "plain"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (4, 3)])
def test_a_model_follows_torchs_number_of_threads(before, after, policy):
    module, net, x = compiled(before, policy)
    want = expected(module, x)
    for threads in (before, after, before, after):
        torch.set_num_threads(threads)
        assert relative_error(net(x), want) < 1e-5
        assert net.prepare(threads).threads == threads
        assert dnnl.lib().threads == torch.get_num_threads() == threads


def test_the_plan_for_another_number_keeps_activations_and_shares_constants():
    _, net, _ = compiled(2)
    other = net.prepare(1)
    assert other.threads == 1
    assert {id(one) for one in other.constants} == {id(one) for one in net.plan.constants}
    for mine, theirs in zip(net.plan.steps, other.steps, strict=True):
        assert [access.desc for access in mine.results] == [access.desc for access in theirs.results]
        for name, access in mine.operands.items():
            if net.plan.buffers[access.buffer].home is not Home.CONSTANT:
                assert theirs.operands[name].desc == access.desc
        if mine.target == "onednn":
            assert mine.node.choice.impl == theirs.node.choice.impl
            assert mine.executable is not theirs.executable


def test_weights_that_the_other_number_blocks_otherwise_are_packed_again(monkeypatch):
    """As brgconv does on AVX2, in blocks of 24 or 16; equal layers share what is packed for them."""
    torch.manual_seed(0)
    shared = nn.Conv2d(32, 32, 3, padding=1)
    module, x = nn.Sequential(shared, nn.ReLU(), shared).eval(), torch.randn(1, 32, 10, 10)
    torch.set_num_threads(2)
    net = fp.compile(module, x, policy="propagate")
    convolutions = [step for step in net.plan.steps if step.node.op == "convolution"]
    before = {step.node.choice.operands["weights"] for step in convolutions}
    honest = OneDnnTarget.candidates

    def another_block(self, node, request):
        for candidate in honest(self, node, request):
            if node.op != "convolution" or candidate.operands["weights"] not in before:
                yield candidate

    monkeypatch.setattr(OneDnnTarget, "candidates", another_block)
    other = net.prepare(1)
    after = [step for step in other.steps if step.node.op == "convolution"]
    assert not before & {step.node.choice.operands["weights"] for step in after}
    assert {node.op for node in other.packed} == {"reorder"} and len(other.packed) == len(before)
    assert len({id(one) for one in other.constants} & {id(one) for one in net.plan.constants}) == 1, "bias"
    for step in after:
        access = step.operands["weights"]
        assert access.desc == step.node.choice.operands["weights"]
        assert other.buffers[access.buffer].nbytes == access.desc.nbytes
    torch.set_num_threads(1)
    assert relative_error(net(x), expected(module, x)) < 1e-5
    torch.set_num_threads(2)
    assert relative_error(net(x), expected(module, x)) < 1e-5


def test_weights_of_each_run_that_the_other_number_blocks_otherwise_are_reordered(monkeypatch):
    class Given(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(x, w.tanh())

    torch.manual_seed(0)
    x, w = torch.randn(1, 32, 10, 10), torch.randn(48, 32, 1, 1)
    torch.set_num_threads(2)
    net = fp.compile(Given(), (x, w), policy="propagate")
    (conv,) = [step.node for step in net.plan.steps if step.node.op == "convolution"]
    before, honest = conv.choice.operands["weights"], OneDnnTarget.candidates

    def another_block(self, node, request):
        found = honest(self, node, request)
        return [one for one in found if node.op != "convolution" or one.operands["weights"] != before]

    monkeypatch.setattr(OneDnnTarget, "candidates", another_block)
    torch.set_num_threads(1)
    torch.testing.assert_close(net(x, w), Given()(x, w), rtol=1e-4, atol=1e-4)
    other = net.prepare(1)
    assert other.threads == 1
    (again,) = [step for step in other.steps if step.node.op == "convolution"]
    assert again.node.choice.operands["weights"] == again.operands["weights"].desc != before
    assert [step.results[0].desc for step in other.reorders if step.results[0].desc == again.operands["weights"].desc]


def test_a_plan_is_made_once_for_each_number():
    _, net, x = compiled(1)
    plans = []
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        net(x)
        plans.append(net.prepare(threads))
    assert plans[0] is plans[2]
    assert plans[1] is net.plan


def test_scratchpads_get_the_room_that_they_need():
    # a small product with a long sum is split over the threads, each with a part of the sum of its own
    torch.manual_seed(0)
    module, x = nn.Linear(4096, 64).eval(), torch.randn(8, 4096)
    torch.set_num_threads(1)
    net = fp.compile(module, x)
    other = net.prepare(4)
    for plan in (net.plan, other):
        for step in plan.steps:
            needed = step.node.choice.handle.scratchpad_nbytes
            assert (step.scratchpad is not None) == bool(needed)
            if step.scratchpad is not None:
                buffer = plan.buffers[step.scratchpad]
                assert buffer.nbytes == needed
                assert buffer.offset + buffer.nbytes <= plan.arena_nbytes
    torch.set_num_threads(4)
    assert relative_error(net(x), expected(module, x)) < 1e-5


def test_threads_of_their_own_number_run_side_by_side():
    module, net, x = compiled(2)
    want, wrong, seen = expected(module, x), [], set()

    def work(threads: int) -> None:
        torch.get_num_threads()  # torch's first call in a thread sets the number of the process
        dnnl.lib().set_threads(threads)
        for _ in range(30):
            error = relative_error(net(x), want)
            seen.add(current_threads())
            if error > 1e-5:
                wrong.append(error)

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert seen == {1, 2, 3}
    assert torch.get_num_threads() == 2


def test_running_with_a_number_ends():
    torch.set_num_threads(2)
    with pytest.raises(KeyError), running_with(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


def test_where_torch_has_another_openmp_its_number_is_passed_on(monkeypatch):
    monkeypatch.setattr(threading_plans, "torch_governs", lambda: False)
    torch.set_num_threads(2)
    assert current_threads() == 2 == dnnl.lib().threads


def test_formats_that_exist_for_one_number_only_are_never_misread(monkeypatch):
    module, net, x = compiled(2)
    monkeypatch.setattr(OneDnnTarget, "candidates", lambda *_: iter(()))
    torch.set_num_threads(1)
    with pytest.warns(
        RuntimeWarning,
        match=r"model Net keeps running with 2 threads: node .* has no other primitive that writes its format; "
        "compile it again with 1",
    ):
        got = net(x)
    assert relative_error(got, expected(module, x)) < 1e-5
    assert torch.get_num_threads() == 1
    assert net.prepare(1) is net.plan
    assert relative_error(net(x), got) == 0.0  # and warns once


def others(node: Node) -> int:
    """Return how many optimized implementations besides the chosen one have a node's formats."""
    choice = node.choice
    request = {**choice.operands, **dict(zip(result_names(node), node.descs, strict=True))}
    offers = OneDnnTarget().candidates(node, request)
    return len({offer.impl for offer in offers if not offer.is_ref} - {choice.impl})


def test_a_wrong_primitive_of_the_new_plan_is_replaced(monkeypatch):
    _, net, _ = compiled(2)
    honest, blamed = planned.check_steps, []

    def accuse(steps, memory, packed):
        if not blamed:
            convolutions = [step.node for step in steps if step.node.op == "convolution"]
            replaceable = [node for node in convolutions if others(node)]
            if not replaceable:
                pytest.skip("this oneDNN has one implementation for the formats of each convolution here")
            blamed.append(replaceable[0])
            return [Mismatch(blamed[0], 1.0, "benchdnn")]
        return honest(steps, memory, packed)

    monkeypatch.setattr(planned, "check_steps", accuse)
    with pytest.warns(RuntimeWarning, match=r"is off by 1.0e\+00 relative; .*; choosing another implementation"):
        plan = net.prepare(1)
    replaced = next(step for step in plan.steps if step.node.name == blamed[0].name)
    assert replaced.node.choice.impl != blamed[0].choice.impl


def test_a_plan_that_keeps_failing_its_check_is_refused(monkeypatch):
    module = nn.Conv2d(8, 8, 1)
    torch.set_num_threads(2)
    net = fp.compile(module, torch.ones(1, 8, 4, 4))
    step = next(step for step in net.plan.steps if step.node.op == "convolution")
    monkeypatch.setattr(planned, "check_steps", lambda *_: [Mismatch(step.node, 1.0, "benchdnn")])
    monkeypatch.setattr(planned.Targets, "reject", lambda *_: None)
    with (
        pytest.warns(RuntimeWarning, match="choosing another"),
        pytest.raises(fp.PlanError, match=r"primitives for 1 thread keep failing their check; the last: node conv"),
    ):
        net.prepare(1)


def test_without_verification_nothing_is_checked(monkeypatch):
    torch.set_num_threads(2)
    net = fp.compile(nn.Conv2d(8, 8, 1), torch.ones(1, 8, 4, 4), verify="off")
    monkeypatch.setattr(planned, "check_steps", lambda *_: pytest.fail("checked"))
    assert net.prepare(1).threads == 1


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, 10**6])
def test_what_is_no_number_of_threads_is_refused(threads):
    net = fp.compile("chain")
    with pytest.raises(fp.InputError, match=rf"threads must be a whole number from 1 to \d+, got {threads}"):
        net.prepare(threads)


def test_closing_forgets_the_other_plans():
    module, net, x = compiled(2)
    want = expected(module, x)
    torch.set_num_threads(1)
    net(x)
    first = net.prepare(1)
    net.close()
    assert relative_error(net(x), want) < 1e-5
    assert net.prepare(1) is not first


def test_an_implementation_is_found_where_strides_of_single_elements_differ():
    """Pooling to 1×1 takes a channels-last result only; to everybody else its strides are those of a row-major one."""
    torch.set_num_threads(2)
    last = fp.MemoryDesc((2, 20, 8, 8), "f32", tag="nhwc")
    net = fp.compile(nn.AdaptiveAvgPool2d(1), torch.ones(2, 20, 8, 8), boundary={"input": last})
    other = net.compilation.plan_for(1)
    assert [s.node.choice.impl for s in other.steps] == [s.node.choice.impl for s in net.plan.steps]
    assert {s.target for s in other.steps} <= {"onednn", "jit"}
    assert not any(s.node.choice.impl.startswith("ref") for s in other.steps)


class OneStep(nn.Module):
    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return torch.maximum(a * a + a, x[:, 1])


def test_an_operand_of_a_post_op_may_have_other_strides_where_its_axis_has_one_element():
    """A slice of one time step; oneDNN's binary refuses its strides, but gets them where it may choose."""
    torch.set_num_threads(2)
    x, a = torch.randn(1, 4, 20000), torch.randn(1, 20000)
    net = fp.compile(OneStep(), (x, a), policy="propagate")
    torch.set_num_threads(1)
    assert relative_error(net(x, a), OneStep()(x, a)) < 1e-5
    assert net.prepare(1).threads == 1


class Softmaxes(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.softmax(tensor, -1) for tensor in tensors)


def test_one_thread_runs_steps_that_are_shorter_than_the_start_of_several():
    """RWKV's 1 200 steps of 192 numbers took five times as long with two threads as with one."""
    torch.set_num_threads(2)
    tensors = torch.randn(3, 70), torch.randn(300, 700)
    net = fp.compile(Softmaxes(), tensors, policy="propagate")
    alone = {step.node.results[0].dims: step.node.choice.handle.is_alone for step in net.plan.steps}
    assert alone == {(3, 70): True, (300, 700): False}
    for threads in (2, 3, 1, 2):
        torch.set_num_threads(threads)
        for got, want in zip(net(*tensors), Softmaxes()(*tensors), strict=True):
            assert relative_error(got, want) < 1e-5
        assert torch.get_num_threads() == dnnl.lib().threads == threads


def test_after_a_failure_on_one_thread_the_caller_has_as_many_as_before():
    torch.set_num_threads(2)
    step = fp.compile(Softmaxes(), torch.randn(3, 70), policy="propagate").plan.steps[0]
    accesses = {**step.operands, "dst": step.results[0]}
    empty = {name: MovableMemory(torch.zeros(1024, dtype=torch.uint8)) for name in accesses}
    places = {name: Place(empty[name], one.desc) for name, one in accesses.items()}
    bound = step.executable.bind(step.node, places, OwnStream())
    dnnl.lib().set_threads(1)  # where the list stopped
    assert "dnnl_primitive_execute" in str(bound.failure(1))
    assert torch.get_num_threads() == 2
