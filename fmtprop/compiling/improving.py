"""Better plans that are made in the background, while a plan that was ready sooner answers.

Owns the thread of one such compilation, and its end with the process. What is compiled, the caller decides.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from weakref import WeakSet

from fmtprop.errors import FmtpropError
from fmtprop.runtime.threads import current_threads, running_with
from fmtprop.system.locks import ProcessLock

_LOG = logging.getLogger("fmtprop")

#: one at a time: two would slow down each other, and the caller's runs
_turn = ProcessLock()

_running: WeakSet[Improvement] = WeakSet()


class Improvement:
    """A compilation in a thread of its own, with the number of threads that the caller has now.

    `make`: compiles and hands over the better plan. It must call its argument between its stages, so that it can be
    ended.
    """

    def __init__(self, make: Callable[[Callable[[str], None]], None], name: str) -> None:
        self._make, self._name, self._threads = make, name, current_threads()
        self._process, self._is_unwanted = os.getpid(), False
        # a thread that still runs when the interpreter ends would be killed inside of native code: see _end
        self._thread = threading.Thread(target=self._run, name=f"fmtprop plans {name}", daemon=True)
        _running.add(self)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it has come. A forked child has none."""
        if self._process == os.getpid():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def end(self) -> None:
        """Have it end after its present stage, without a result, and wait for that."""
        self._is_unwanted = True
        self.wait()

    def _run(self) -> None:
        try:
            with _turn.current, running_with(self._threads):
                self._continue()
                self._make(self._continue)
        except _UnwantedError:
            pass
        except (FmtpropError, MemoryError) as error:
            _LOG.warning("model %s keeps its first plan: the better one failed: %s", self._name, error)

    def _continue(self, stage: str = "") -> None:
        if self._is_unwanted:
            raise _UnwantedError


class _UnwantedError(Exception):
    """Nobody needs the result any more."""


@atexit.register
def _end() -> None:
    for one in list(_running):
        one.end()
