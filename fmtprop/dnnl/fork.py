"""Forked children of a process with OpenMP threads.

A fork copies only the calling thread. GNU OpenMP keeps one thread pool per thread that opened a parallel region. In
the child, the pool's threads do not exist, and the next parallel region waits for them forever, in PyTorch and in
oneDNN. Setting the number of threads to one does not help: a primitive asks for the number that it was created with,
and if it gets fewer threads it computes only their share. But a *new* thread gets a new pool, so such a child runs
everything in one new thread.

Owns the detection and the new thread; must not know the functions that run there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fmtprop.dnnl.library import lib, loaded
from fmtprop.errors import LibraryError, LoadError
from fmtprop.system.locks import ProcessLock

T = TypeVar("T")

_TASKS = "/proc/self/task"


class _State:
    """Knowledge of this process about its forks."""

    # The thread that lost its OpenMP pool in a fork.
    crippled: int | None = None
    pool_at_fork = False
    worker: ThreadPoolExecutor | None = None


_lock = ProcessLock()


def fork_guard() -> bool:
    """Return whether the calling thread must not open a parallel region."""
    return _State.crippled is not None and _State.crippled == threading.get_ident()


def after_fork(function: Callable[[], T]) -> T:
    """Call a function in a thread in which parallel regions work: this one, or a new one after a fork.

    The new thread is kept and takes one call at a time. It uses the calling thread's number of OpenMP threads.
    """
    if not fork_guard():
        return function()
    library = loaded()
    if library is not None and library.runtime not in ("OMP", "SEQ"):
        raise LibraryError(
            f"this process was forked from one that used oneDNN with {library.runtime} threads, which do not survive "
            'a fork; start it with multiprocessing.set_start_method("spawn")'
        )
    return _worker().submit(function).result()


def _worker() -> ThreadPoolExecutor:
    with _lock.current:
        if _State.worker is None:
            _State.worker = ThreadPoolExecutor(1, "fmtprop-after-fork", _keeping_threads())
        return _State.worker


def _keeping_threads() -> Callable[[], None]:
    """Return a function that gives a new thread this thread's number of OpenMP threads (if a library is loaded)."""
    try:
        threads = lib().threads
    except LoadError:
        return lambda: None
    return lambda: lib().set_threads(threads)


def _before() -> None:
    _State.pool_at_fork = _has_native_threads() or fork_guard()


def _in_child() -> None:
    _State.worker = None
    _State.crippled = threading.get_ident() if _State.pool_at_fork else None


def _has_native_threads() -> bool:
    """Return whether threads run that Python did not start; without /proc, whether oneDNN is loaded."""
    try:
        return len(os.listdir(_TASKS)) > threading.active_count()
    except OSError:
        return loaded() is not None


os.register_at_fork(before=_before, after_in_child=_in_child)
