"""Lists of native calls: the same as one call after the other, and the one that fails is found."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_int, c_uint, c_uint64, c_void_p
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop.errors import DnnlError
from fmtprop.jit import CallList, no_code
from fmtprop.runtime import context as context_module
from fmtprop.runtime.executor import Executor

pytestmark = pytest.mark.skipif(bool(no_code()), reason=no_code())


class Recorder:
    """A native function that notes its arguments."""

    def __init__(
        self, name: str, seen: list[tuple[object, ...]], status: int = 0, restype: type | None = c_int
    ) -> None:
        def note(a: int, b: int, c: int, d: int) -> int | None:
            seen.append((name, a, b, c, d))
            return status if restype else None

        self.function = CFUNCTYPE(restype, *[c_uint64] * 4)(note)


def run(calls: CallList) -> int:
    function, *arguments = calls.call
    return int(function(*arguments))


def test_calls_come_in_order_with_their_arguments() -> None:
    seen: list[tuple[object, ...]] = []
    first, second = Recorder("first", seen), Recorder("second", seen)
    array = (c_int * 3)()
    calls = CallList(
        [
            (first.function, c_void_p(7), c_void_p(2**63 + 1), c_int(3), array),
            (second.function, c_void_p(None), c_uint(2**32 - 1), None, c_void_p(5)),
            (first.function, *[c_void_p(0)] * 4),
        ]
    )
    assert calls.reached is None, "nothing has run"
    for _ in range(2):
        seen.clear()
        assert run(calls) == 0 and calls.reached is None
        assert seen == [
            ("first", 7, 2**63 + 1, 3, ctypes.addressof(array)),
            ("second", 0, 2**32 - 1, 0, 5),
            ("first", 0, 0, 0, 0),
        ]


def test_the_first_failure_ends_the_list() -> None:
    seen: list[tuple[object, ...]] = []
    good, bad = Recorder("good", seen), Recorder("bad", seen, status=5)
    nothing = [c_void_p(0)] * 4
    made = [(one.function, *nothing) for one in (good, bad, good)]
    calls = CallList(made)
    assert run(calls) == 5 and [name for name, *_ in seen] == ["good", "bad"]
    assert calls.reached is made[1]


def test_what_returns_nothing_cannot_fail() -> None:
    seen: list[tuple[object, ...]] = []
    silent = Recorder("silent", seen, restype=None)
    silent.function.restype = None
    assert run(CallList([(silent.function, *[c_void_p(0)] * 4)] * 3)) == 0 and len(seen) == 3


def test_an_empty_list_succeeds() -> None:
    assert run(CallList([])) == 0


class Mixed(nn.Module):
    """Two stretches of primitives, with a step of PyTorch's between."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.cumsum(self.before(x), 1).relu())


@pytest.fixture
def mixed() -> tuple[fmtprop.CompiledModel, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module, x = Mixed().eval(), torch.randn(16, 16)  # more rows than kernels of our own take
    return fmtprop.compile(module, x), module, x


@pytest.fixture
def lists(monkeypatch) -> list[CallList]:
    """The lists of calls that contexts make."""
    made: list[CallList] = []
    monkeypatch.setattr(
        context_module, "CallList", lambda calls, **how: made.append(CallList(calls, **how)) or made[-1]
    )
    return made


def test_steps_of_pytorch_stand_between_lists(mixed, lists) -> None:
    net, module, x = mixed
    context, _ = Executor(net.plan).lease()
    assert len(lists) == 2
    assert torch.allclose(context.run([x])[0], module(x), atol=1e-5)


def test_the_step_that_fails_in_a_list_is_named(mixed, monkeypatch) -> None:
    net, _, x = mixed
    last = net.plan.steps[-1]
    honest = type(last.executable).bind

    def broken(self, node, places, stream):
        nowhere = SimpleNamespace(native=SimpleNamespace(handle=c_void_p(0)), memory=stream.memory)
        return honest(self, node, places, nowhere if node is last.node else stream)

    monkeypatch.setattr(type(last.executable), "bind", broken)
    with pytest.raises(DnnlError, match=r"dnnl_primitive_execute.*invalid_arguments") as error:
        Executor(net.plan).run([x])
    assert last.node.label in str(error.value)


def test_without_code_of_our_own_python_calls_each(mixed, no_executable_memory, lists) -> None:
    net, module, x = mixed
    context, _ = Executor(net.plan).lease()
    assert not lists
    assert torch.allclose(context.run([x])[0], module(x), atol=1e-5)
