"""Locks among threads, and after a fork that found one held."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fmtprop.system.locks import ProcessLock


def in_child(work) -> int:
    """Return the exit code of a forked child that does some work."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def lock() -> ProcessLock:
    return ProcessLock()


def test_one_thread_at_a_time_and_again_in_the_same(lock):
    with lock.current, lock.current:
        entered = threading.Event()
        thread = threading.Thread(target=lambda: lock.current.acquire() and entered.set(), daemon=True)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)


def test_a_child_finds_it_open_though_another_thread_held_it(lock):
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock.current:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: not lock.current.acquire(timeout=5)) == 0
        assert not lock.current.acquire(blocking=False), "it is the child's lock that is open"
    finally:
        done.set()
        thread.join()


def test_a_fork_inside_of_a_block(lock):
    with lock.current:

        def work() -> int:
            with lock.current:
                return 0

        assert in_child(work) == 0


def test_a_child_can_plan_for_other_threads_while_its_parent_was_about_to(monkeypatch):
    import torch

    import fmtprop as fp
    from fmtprop.compiling.compilation import Compilation

    reached, go_on = threading.Event(), threading.Event()
    honest, parent = Compilation.plan_for, os.getpid()

    def slow(self, threads):
        if os.getpid() == parent:
            reached.set()
            go_on.wait()
        return honest(self, threads)

    monkeypatch.setattr(Compilation, "plan_for", slow)
    net = fp.compile(torch.nn.Linear(4, 4).eval(), torch.ones(2, 4), tune="model")
    threads = torch.get_num_threads() + 1
    thread = threading.Thread(target=lambda: net.prepare(threads))
    thread.start()
    reached.wait()

    def prepared() -> int:
        signal.alarm(20)  # ends the child, should it wait for the thread of its parent
        return int(net.prepare(threads).threads != threads)

    try:
        assert in_child(prepared) == 0
    finally:
        go_on.set()
        thread.join()
