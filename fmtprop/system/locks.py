"""Locks that a forked child finds open."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

__all__ = ["ProcessLock"]

_all: WeakSet[ProcessLock] = WeakSet()


class ProcessLock:
    """A reentrant lock among the threads of one process: ``with lock.current: ...``.

    Where another thread holds it at the moment of a fork, that thread does not exist in the child and would never let
    it go. So the child has a new one; a block that the forking thread itself is in leaves the one that it entered.

    Examples
    --------
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
