"""Locks that are released in a forked child."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

_all: WeakSet[ProcessLock] = WeakSet()


class ProcessLock:
    """A reentrant lock among the threads of one process: ``with lock.current: ...``.

    If another thread holds the lock at a fork, that thread does not exist in the child and would never release it. So
    the child gets a new lock. A block that the forking thread itself has entered releases the old lock.

    >>> lock = ProcessLock()
    >>> with lock.current, lock.current:
    ...     pass
    """

    __slots__ = ("__weakref__", "current")

    def __init__(self) -> None:
        self.current = threading.RLock()
        _all.add(self)


def _in_child() -> None:
    for lock in _all:
        lock.current = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
