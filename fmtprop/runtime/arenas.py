"""The memory of activations: one run at a time has an arena, and a model's plans for all shapes take turns in it."""

from __future__ import annotations

import threading
from weakref import WeakSet

from fmtprop.system.locks import ProcessLock
from fmtprop.system.machine import has_address_limit
from fmtprop.targets.memory import HugePages

#: addresses that an arena reserves over the bytes of its first plan, where plans for other shapes follow: those whose
#: inputs have up to eight times as many elements are planned alike. Addresses without memory cost nothing
GROWTH = 8


class Arena:
    """Memory for the activations of one run at a time: who has the ``lock`` may write it. Nothing stays in it."""

    def __init__(self, most: int) -> None:
        self._pages, self.nbytes = HugePages(most), most
        #: flat bytes; those that no plan asked for yet are addresses without memory
        self.memory = self._pages.memory
        self.lock = threading.Lock()

    def hold(self, nbytes: int) -> None:
        """Have the first bytes in memory; the caller has the lock."""
        self._pages.write(nbytes)


class Arenas:
    """The arenas of plans that may take turns; each exists as long as a context in it.

    `least`: bytes that each arena has at least. `growth`: addresses that a new one reserves, over the bytes that its
    first plan needs.

    >>> arenas = Arenas(growth=4)
    >>> first = arenas.take(1000)
    >>> arenas.take(1000) is first  # it is taken
    False
    >>> first.lock.release()
    >>> arenas.take(4000) is first
    True
    """

    def __init__(self, least: int = 0, growth: int = 1) -> None:
        self._least, self._growth = least, growth
        self._all: WeakSet[Arena] = WeakSet()
        self._taking = ProcessLock()

    def take(self, nbytes: int) -> Arena:
        """Return an arena of so many bytes that no run has, with its lock; a new one if there is none."""
        nbytes = max(nbytes, self._least)
        with self._taking.current:
            for arena in self._all:
                if arena.nbytes >= nbytes and arena.lock.acquire(blocking=False):
                    break
            else:
                arena = self._new(nbytes)
                arena.lock.acquire()
                self._all.add(arena)
        arena.hold(nbytes)
        return arena

    def _new(self, nbytes: int) -> Arena:
        if self._growth == 1 or has_address_limit():
            return Arena(nbytes)
        try:
            return Arena(nbytes * self._growth)
        except (OSError, ValueError, OverflowError):  # more than the system promises
            return Arena(nbytes)
