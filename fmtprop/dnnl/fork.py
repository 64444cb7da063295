"""Forked children of a process with OpenMP threads.

A fork copies the calling thread only. GNU OpenMP keeps one thread pool per thread that opened a parallel region; in
the child the copied thread's pool consists of threads that do not exist, and its next parallel region waits for them
for ever, in PyTorch as in oneDNN. Setting one thread does not help: a primitive asks for the number of threads that
it was created with, and when it gets fewer it computes only their share. But a *new* thread gets a new pool. So in
such a child everything runs in one.

Owns the detection and the way out; must not know what is run.
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
    """What this process knows of its forks."""

    # The thread whose OpenMP pool was lost in a fork.
    crippled: int | None = None
    pool_at_fork = False
    worker: ThreadPoolExecutor | None = None


_lock = ProcessLock()


def fork_guard() -> bool:
    """Tell whether the calling thread must not open a parallel region.

    Returns
    -------
    bool
        True in the main thread of a forked child whose parent had started OpenMP threads (or other native threads:
        they cannot be told apart). Call oneDNN and PyTorch through `after_fork` there.
    """
    return _State.crippled is not None and _State.crippled == threading.get_ident()


def after_fork(function: Callable[[], T]) -> T:
    """Call a function where parallel regions work: here, or in a new thread after a fork.

    Parameters
    ----------
    function : callable
        Without arguments.

    Returns
    -------
    object
        What it returned; what it raises is raised here.

    Raises
    ------
    LibraryError
        If this child's parent used a oneDNN whose threads cannot be replaced (SYCL, TBB).

    Notes
    -----
    The new thread stays, with as many OpenMP threads as the calling one would have used, and takes one call at a time.
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
    """Return what gives a new thread the calling one's number of OpenMP threads; nothing where there is no library."""
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
    """Tell whether threads run that Python did not start; without /proc, assume so once oneDNN is loaded."""
    try:
        return len(os.listdir(_TASKS)) > threading.active_count()
    except OSError:
        return loaded() is not None


os.register_at_fork(before=_before, after_in_child=_in_child)
