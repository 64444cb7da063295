"""Denormal numbers are zero in native steps, in all threads of a run; afterwards, every thread has its own mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.jit import denormals, no_code
from fmtprop.runtime.agreement import error_of_numbers
from tests import processes

pytestmark = pytest.mark.skipif(bool(no_code()), reason="no generated code here")

#: a denormal number, and as many as all threads of PyTorch share
DENORMAL, MANY = 2.0**-130, 1 << 18


class Scaled(nn.Module):
    """A convolution that copies, and an operation of PyTorch's on its result if `then` is one."""

    def __init__(self, then: object = None) -> None:
        super().__init__()
        self.copy, self.then = nn.Conv2d(16, 16, 1, bias=False), then
        self.copy.weight.data = torch.eye(16).reshape(16, 16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.copy(x)
        return x if self.then is None else self.then(x)


def numbers(value: float = DENORMAL) -> torch.Tensor:
    return torch.full((4, 16, 64, 64), value)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def eager_keeps() -> bool:
    """Return whether PyTorch's operators keep denormal numbers, in all threads."""
    return bool((torch.full((MANY * 4,), DENORMAL) * 1.5).ne(0).all())


@pytest.mark.parametrize(("special_values", "kept"), [("kept", False), ("exact", True)])
def test_denormals_are_zero_in_all_threads_unless_exact(threads, special_values, kept):
    net = fp.compile(Scaled(), numbers(), special_values=special_values)
    before = denormals.mode() & denormals.FLUSH
    for _ in range(2):
        assert net(numbers()).ne(0).all() if kept else net(numbers()).eq(0).all()
        assert denormals.mode() & denormals.FLUSH == before
        assert eager_keeps()
    assert net(numbers(2.0**-120)).eq(2.0**-120).all()


def test_other_numbers_of_threads_and_new_threads_have_their_own_mode(threads):
    net, found = fp.compile(Scaled(), numbers()), []

    def run() -> None:
        for count in (threads, 1, 4, 2, threads):
            torch.set_num_threads(count)
            found.append(bool(net(numbers()).eq(0).all()) and eager_keeps())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True] * 5
    with net.throughput(2) as pool:
        assert all(bool(y.eq(0).all()) for y in pool.map([numbers()] * 4))
    assert eager_keeps()


def test_the_callers_own_mode_is_kept(threads):
    net, exact = (fp.compile(Scaled(), numbers(), special_values=values) for values in ("fast", "exact"))
    torch.set_flush_denormal(True)
    try:
        for each in (net, exact):
            each(numbers())
            assert denormals.mode() & denormals.FLUSH == denormals.FLUSH
    finally:
        torch.set_flush_denormal(False)
    assert exact(numbers()).ne(0).all()
    assert denormals.mode() & denormals.FLUSH == 0


def test_pytorchs_operators_run_in_the_callers_mode():
    net = fp.compile(Scaled(lambda y: torch.cumsum(y, 3) * 2.0**-10), numbers(2.0**-120))
    inner = [step.target for step in net.plan.steps]
    assert "reference" in inner or "aten" in inner, inner
    y = net.run_flat([numbers(2.0**-120)])[0]
    assert y.shape == numbers().shape
    assert eager_keeps()


def test_training_flushes_too():
    x = numbers()
    for values, kept in (("kept", False), ("exact", True)):
        step = fp.compile(Scaled(), x, training=True, confirm=False, special_values=values)
        assert step(x).ne(0).all() if kept else step(x).eq(0).all()
    assert eager_keeps()


def test_blocks_are_nested_and_errors_leave_them():
    assert denormals.mode() & denormals.FLUSH == 0
    with pytest.raises(KeyError), denormals.flushed():
        with denormals.flushed():
            assert denormals.mode() & denormals.FLUSH == denormals.FLUSH
        assert denormals.mode() & denormals.FLUSH == denormals.FLUSH
        raise KeyError
    assert denormals.mode() & denormals.FLUSH == 0


def test_an_interrupted_and_a_failed_run_leave_the_mode(monkeypatch):
    net = fp.compile(nn.Embedding(4, 16), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(fp.InputError):
        net(torch.tensor([0, 9]))
    assert denormals.mode() & denormals.FLUSH == 0


def test_a_check_takes_differences_of_denormal_numbers_for_none():
    expected = torch.full((4,), DENORMAL)
    assert error_of_numbers(torch.zeros(4), expected) == 0.0
    assert error_of_numbers(torch.zeros(4), torch.full((4,), 2.0**-120)) == 1.0
    assert error_of_numbers(torch.zeros(4, dtype=torch.float64), expected.double()) == 1.0


def test_without_generated_code_the_mode_stays(tmp_path):
    script = (
        "import torch, fmtprop as fp\n"
        "from fmtprop.jit import denormals, memory\n"
        "def refuse(code): raise OSError(1, 'refused')\n"
        "memory.place_code = refuse\n"
        "assert fp.jit.no_code()\n"
        "net = fp.compile(torch.nn.Linear(4, 4), torch.ones(2, 4))\n"
        "with denormals.flushed(): assert denormals.mode() == 0\n"
        "net(torch.ones(2, 4))\n"
    )
    done = processes.run("-c", script)
    assert done.returncode == 0, done.stderr
