"""A run is one generated function: the caller's tensors, modes and errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fmtprop as fp
from fmtprop.errors import PlanError


class Steps(nn.Module):
    """Operators of PyTorch between primitives: they read inputs whole and in part, and write results."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.relu(x) + y
        return x.cumsum(-1), torch.stack((x, y)).cumsum(-1), x[:, 1:].cumsum(-1), z.flip(-1), x, y.gt(0.3)


class Complex(nn.Module):
    """A product of complex numbers, of inputs and as a result."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


class StatesOnly(nn.Module):
    """Calls that make their results, of which some are read late and others never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(5, 6, proj_size=3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, (h, c) = self.first(x)
        y, (g, d) = self.second(x)
        return h * 1, c * 1, y * 1, g * 1, d * 1


#: storages that ``noted`` made, and of each call: which of them were freed before it
MADE: list[StorageWeakRef] = []
FREED: list[list[bool]] = []


@torch.library.custom_op("fmtprop_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose storage is noted."""
    FREED.append([storage.expired() for storage in MADE])
    result = x.clone()
    MADE.append(StorageWeakRef(result.untyped_storage()))
    return result


noted.register_fake(torch.empty_like)
noted.register_autograd(lambda _, gradient: noted(gradient))


class Noted(nn.Module):
    """Operators of PyTorch between primitives, which are the last to read their results."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(noted(x))
        return x


class Inverse(nn.Module):
    """An operator that may refuse numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x.cumsum(-1))


@pytest.mark.parametrize("module", [Steps(), Complex()], ids=["steps", "complex"])
def test_each_run_reads_and_makes_other_tensors(module: nn.Module) -> None:
    shape = (4, 6, 2) if isinstance(module, Complex) else (4, 6)
    net = fp.compile(module, (torch.randn(shape), torch.randn(shape)))
    kept = []
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            given = torch.randn(shape), torch.randn(shape)
            before = torch.is_grad_enabled()
            kept.append((given, net(*given)))
            assert torch.is_grad_enabled() == before
            same = given[0], given[0]
            kept.append((same, net(*same)))
    for given, results in kept:
        wanted = module(*given)
        pairs = zip(results, wanted, strict=True) if isinstance(wanted, tuple) else [(results, wanted)]
        for result, one in pairs:
            assert torch.allclose(result, one, atol=1e-6)
            assert all(result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in given)


def test_results_that_nobody_reads_take_no_name_of_others() -> None:
    module, x = StatesOnly().eval(), torch.randn(4, 2, 5)
    net = fp.compile(module, (x,), confirm=False)
    with torch.no_grad():
        for got, wanted in zip(net(x), module(x), strict=True):
            torch.testing.assert_close(got, wanted)


def test_an_error_names_the_node_and_leaves_the_callers_mode() -> None:
    net = fp.compile(Inverse(), (torch.eye(3),))
    with pytest.raises(PlanError, match="inv"):
        net(torch.zeros(3, 3))
    assert torch.is_grad_enabled()
    assert torch.allclose(net(torch.eye(3)), Inverse()(torch.eye(3)), atol=1e-6)


def test_autocast_does_not_change_the_planned_types() -> None:
    net = fp.compile(Steps(), (x := torch.randn(4, 6), y := torch.randn(4, 6)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(net(x, y)[0], x.cumsum(-1))


def test_a_run_keeps_no_tensor_and_a_model_no_cycle() -> None:
    net = fp.compile(Steps(), (torch.randn(4, 6), torch.randn(4, 6)))
    x = torch.randn(4, 6)
    results = net(x, torch.randn(4, 6))
    gone = [weakref.ref(one) for one in (x, *results)]
    del x, results
    assert not any(one() is not None for one in gone)
    context, give_back = net._executor.lease()
    give_back()
    made = weakref.ref(context._direct)
    gc.disable()
    try:
        net.close()
        del context, give_back
        assert made() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("half", ["generated", "planned", "backward"])
def test_what_primitives_read_last_is_freed_before_the_next_operator(half: str) -> None:
    module, x = Noted(), torch.randn(8, 16)
    if half == "backward":
        net = fp.compile(module, (x,), training=True, confirm=False)
        loss = net(x).sum()
    else:
        net = fp.compile(module.eval(), (x,))
    MADE.clear()
    FREED.clear()
    if half == "backward":
        loss.backward()
    elif half == "planned":
        with torch.autocast("cpu"):
            net(x)
    else:
        net(x)
    assert [[True] * count for count in range(2 if half == "backward" else 3)] == FREED
