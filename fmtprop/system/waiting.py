"""How long threads of this process waited for a processor that other programs used."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

#: Linux's directory of this process's threads
_TASKS = Path("/proc/self/task")

#: bytes of a thread's line: nanoseconds on a processor, nanoseconds of waiting for one, turns
_LINE_NBYTES = 128


class Waiting:
    """A clock of waiting: a thread that could run, and did not, since another program's thread had its processor.

    `tasks`: Linux's directory of threads, with a file ``schedstat`` for each. Where there is none, nothing ever waited.

    A time of which a part was waiting is no time of the work. Beside two busy programs on two processors, half of the
    executions of a millisecond wait for 4 ms, the others not at all: these take as long as on an idle machine.

    >>> with Waiting(Path("/nowhere")) as waiting:
    ...     waiting.lap()
    0.0
    """

    def __init__(self, tasks: Path = _TASKS) -> None:
        self._tasks = tasks
        #: file descriptor of each thread's line, and the nanoseconds that it had waited at the last call
        self._files: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        self.lap()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def lap(self) -> float:
        """Return the longest time in seconds that one thread waited since the last call."""
        try:
            present = os.listdir(self._tasks)
        except OSError:
            return 0.0
        longest = 0
        for name in present:
            waited = self._read(name)
            longest = max(longest, waited - self._waited.get(name, waited))
            self._waited[name] = waited
        return longest / 1e9

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self, name: str) -> int:
        """Return the nanoseconds that a thread has waited; 0 for one that ended, or without such a file."""
        with suppress(OSError, ValueError, IndexError):
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = os.open(self._tasks / name / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(file, _LINE_NBYTES, 0).split()[1])
        return 0
