"""A forked child neither hangs nor computes half of the answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import fork
from fmtprop.errors import LibraryError

pytest.importorskip("torch")

PREPARE = """
import os, signal, sys
import numpy as np, torch
from fmtprop import dnnl
from fmtprop.dnnl import Arg
from fmtprop.layout import MemoryDesc

threads = int(sys.argv[1])
torch.set_num_threads(threads)
# Large enough that both PyTorch and oneDNN open parallel regions.
shape = (1, 16, 128, 128)
x, w = torch.randn(shape), torch.randn(16, 16, 3, 3)
want = torch.nn.functional.conv2d(x, w, padding=1)

def convolution():
    plain, weights = (dnnl.NativeDesc.from_desc(MemoryDesc(d, "f32")) for d in (shape, (16, 16, 3, 3)))
    window = {"strides": (1, 1), "dilates": (0, 0), "pad_l": (1, 1), "pad_r": (1, 1)}
    pd = dnnl.create(dnnl.Convolution(src=plain, weights=weights, dst=plain, **window))
    y = torch.zeros(shape)
    args = {Arg.SRC: dnnl.memory_of(x, plain), Arg.WEIGHTS: dnnl.memory_of(w, weights)}
    args[Arg.DST] = dnnl.memory_of(y, plain)
    scratchpad = pd.query_md("scratchpad")
    if scratchpad is not None:
        args[Arg.SCRATCHPAD] = dnnl.memory_of(torch.zeros(scratchpad.nbytes, dtype=torch.uint8), scratchpad)
    primitive = dnnl.Primitive(pd)
    return lambda: (y.numpy().fill(0), primitive.execute(dnnl.Stream(), args), y.numpy().copy())[-1]

before = convolution()
assert np.allclose(before(), want.numpy(), atol=1e-3)
assert not dnnl.fork_guard()
want = want.numpy()
sys.stdout.flush()

def in_child(body):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:
            print("child:", repr(error), flush=True)
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    print("status", status, flush=True)
    return status
"""


def run(body: str, threads: int) -> str:
    code = PREPARE + body
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code, str(threads)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# Primitives of the parent, primitives made in the child, PyTorch, and a grandchild.
CHILD = """
def body():
    print("guard", dnnl.fork_guard())
    assert np.allclose(dnnl.after_fork(before), want, atol=1e-3)
    assert np.allclose(dnnl.after_fork(lambda: convolution()()), want, atol=1e-3)
    assert np.allclose(dnnl.after_fork(lambda: torch.nn.functional.conv2d(x, w, padding=1).numpy()), want, atol=1e-3)
    assert dnnl.after_fork(lambda: dnnl.lib().threads) == threads
    try:
        dnnl.after_fork(lambda: 1 / 0)
    except ZeroDivisionError:
        print("raised here")
    def grandchild():
        assert np.allclose(dnnl.after_fork(before), want, atol=1e-3)
        print("grandchild", dnnl.fork_guard())
    assert in_child(grandchild) == 0
in_child(body)
assert np.allclose(before(), want, atol=1e-3)
"""


def test_child_of_a_threaded_parent() -> None:
    if dnnl.lib().threads < 2 or dnnl.lib().runtime != "OMP":
        pytest.skip("needs two CPUs and OpenMP")
    output = run(CHILD, 2).splitlines()
    assert output == ["guard True", "raised here", "grandchild True", "status 0", "status 0"]


def test_the_danger_is_real() -> None:
    """Without the guard the child hangs: the alarm ends it. (When this fails, the guard can go.)"""
    if dnnl.lib().threads < 2 or dnnl.lib().runtime != "OMP":
        pytest.skip("needs two CPUs and OpenMP")
    assert run("in_child(lambda: (signal.alarm(3), before()))", 2).splitlines() == ["status 14"]


def test_here_it_changes_nothing() -> None:
    assert not dnnl.fork_guard()
    assert dnnl.after_fork(lambda: 42) == 42


def test_threads_that_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sycl:
        runtime = "SYCL"

    monkeypatch.setattr(fork, "fork_guard", lambda: True)
    monkeypatch.setattr(fork, "loaded", lambda: Sycl())
    with pytest.raises(LibraryError, match=r"forked from one that used oneDNN with SYCL threads.*set_start_method"):
        dnnl.after_fork(lambda: 42)
