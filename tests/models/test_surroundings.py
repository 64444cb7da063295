"""Compiling and running amid what a program may have set in PyTorch, in threads, and with tensors without memory."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import InputError, PlanError, UnsupportedOpError
from tests.models.fuzz import differ

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Upsample(scale_factor=2)).eval()
X = torch.randn(2, 3, 9, 9)
with torch.no_grad():
    Y = MODEL(X)


class Host(nn.Module):
    """Ops that run on the reference target, one of which autocast would lower."""

    def forward(self, x):
        x = x.flatten(0, 1)
        return torch.cumsum(x, 1), torch.addbmm(x[0], x, x)


def check(net, x=X):
    assert differ(net(x), Y) is None


@pytest.mark.parametrize("surroundings", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes(surroundings):
    with surroundings():
        net = fp.compile(MODEL, X)
        check(net)
    check(net)
    assert not net(X.clone().requires_grad_()).requires_grad


class PyTorchBetween(nn.Module):
    """Ops that PyTorch runs, whose results lie in the plan's memory."""

    def forward(self, x):
        return torch.cumsum(torch.erfinv(x.tanh()), 1).relu().flip(2)


@pytest.mark.parametrize("target", ["onednn", "mkldnn"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_runs_in_inference_mode_and_outside_of_it_take_turns(first, compiled, target):
    module = PyTorchBetween()
    with torch.inference_mode(compiled):
        net = fp.compile(module, X, target=target)
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            assert differ(net(X), module(X)) is None
            assert len(net.profile(X)) == len(net.plan.steps)
    assert not net(X).is_inference()


def test_module_and_inputs_made_in_inference_mode():
    with torch.inference_mode():
        module, x = nn.Conv2d(3, 8, 3), X.clone()
        expected = module(x)
    assert differ(fp.compile(module, x)(x), expected.clone()) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        net = fp.compile(MODEL, X, verify="full")
        check(net)
        assert net.random_inputs()[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device():
    net = fp.compile(MODEL, X)
    with torch.device("meta"):
        check(net)
        check(net, X.to(memory_format=torch.channels_last))
        net.profile(repeats=1)
        check(fp.compile(MODEL, X))


def test_autocast_around_a_call_changes_nothing():
    graph = fp.from_torch(Host(), X)
    net = fp.compile(graph)
    expected = net(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differ(net(X), expected) is None
        assert differ(fp.compile(graph)(X), expected) is None


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        check(fp.compile(MODEL, X, verify="full"))
    finally:
        torch.use_deterministic_algorithms(False)


def test_compile_in_threads_while_others_run():
    net, errors, done = fp.compile(MODEL, X), [], threading.Event()

    def guarded(work):
        try:
            work()
        except (RuntimeError, AssertionError, fp.FmtpropError) as error:
            errors.append(error)

    def run():
        while not done.is_set():
            check(net)

    runner = threading.Thread(target=guarded, args=(run,))
    compilers = [threading.Thread(target=guarded, args=(lambda: check(fp.compile(MODEL, X)),)) for _ in range(3)]
    runner.start()
    for thread in compilers:
        thread.start()
    for thread in compilers:
        thread.join()
    done.set()
    runner.join()
    assert not errors


def test_copies_share_the_plan():
    net = fp.compile(MODEL, X)
    for made in (copy.copy(net), copy.deepcopy(net)):
        assert made.plan is net.plan
        check(made)
        net.close()
        check(made)
        made.close()
        made.close()
        check(net)


def test_a_compiled_model_is_pickled():
    net = fp.compile(MODEL, X)
    assert torch.equal(pickle.loads(pickle.dumps(net))(X), net(X))


def test_tensors_without_memory_are_refused():
    net = fp.compile(MODEL, X)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 3, 9, 9)
    empty = X.clone()
    empty.untyped_storage().resize_(0)
    for tensor in (fake, empty):
        with pytest.raises(InputError, match=r"input input has no memory of its own.*pass a real tensor"):
            net(tensor)
    with pytest.raises(InputError, match=r"torch\.func\.vmap"):
        torch.func.vmap(net)(X[None])


def test_more_memory_than_there_is():
    class Huge(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def forward(self, x):
            return torch.cumsum(x.expand(self.size, self.size), 0).relu().sum()

    with pytest.raises(PlanError, match=r"model Huge needs [\d.]+ GB of memory at once, this machine has"):
        fp.compile(Huge(1 << 20), torch.ones(1, 1))


def test_medians_need_a_run():
    net = fp.compile(MODEL, X)
    for measure in (net.profile, net.report):
        with pytest.raises(InputError, match="repeats must be a whole number from 1 to 100000, for a median, got 0"):
            measure(repeats=0)


def test_boundary_is_checked():
    desc = fp.MemoryDesc((2, 3, 9, 9), "f32", tag="acdb")
    blocked = fp.MemoryDesc((2, 8, 18, 18), "f32", tag="aBcd8b")
    check(fp.compile(MODEL, X, boundary={"input": desc}), X.to(memory_format=torch.channels_last))
    for boundary, message in (
        (5, "The 'boundary' parameter of compile must map names to formats. Got 5 instead."),
        ({"input": 3}, r"boundary\['input'\] must be a MemoryDesc, got int"),
        ({"nosuch": desc}, "boundary names 'nosuch', but the inputs and outputs of Sequential are input, output_1"),
        ({"input": fp.MemoryDesc((2, 3, 9), "f32")}, "it needs these dims and data type"),
        ({"output_1": blocked}, "it needs these dims and data type, and strides without blocks"),
    ):
        with pytest.raises(UnsupportedOpError, match=message):
            fp.compile(MODEL, X, boundary=boundary)
