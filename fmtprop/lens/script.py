"""A Python program under the tracer: ``python -m fmtprop.lens.script FOLDER PROGRAM ARGUMENTS…``.

Runs in a separate process; :mod:`fmtprop.cli` makes its command line.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from fmtprop.lens.findings import lens_of
from fmtprop.lens.tracer import Tracer

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run a program, and write the tracer's findings, however the program ends.

    Parameters
    ----------
    arguments : list of str
        The folder for ``lens.json`` and ``trace.json``, then the program (``-m MODULE`` or a path) and its own
        arguments.
    """
    folder, *words = arguments
    tracer, process = Tracer(), os.getpid()
    signal.signal(signal.SIGTERM, _end)
    try:
        with tracer.watching(threads=True):
            try:
                _execute(words)
            finally:
                _wait_for_threads()
    finally:
        if os.getpid() == process:  # not a forked child, which ends here, too
            program = words[1] if words[0] == "-m" else os.path.basename(words[0])
            lens = lens_of(program, tracer.calls)
            Path(folder, "lens.json").write_text(lens.to_json())
            Path(folder, "trace.json").write_text(lens.to_trace())


def _execute(words: list[str]) -> None:
    """Run a program as Python would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _wait_for_threads() -> None:
    """Wait for the program's threads, as Python does at its end."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _end(number: int, _: Any) -> None:
    """End the program as the signal does, but with its findings."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
