"""A Python program under the tracer: ``python -m fmtprop.lens.script FOLDER WAYS PROGRAM ARGUMENTS…``.

Runs in a separate process; :mod:`fmtprop.cli` makes its command line.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmtprop.capture.factories import FlatModule
from fmtprop.lens.explain import in_other_ways
from fmtprop.lens.findings import Lens, lens_of
from fmtprop.lens.gain import LEAST_TURNS
from fmtprop.lens.tracer import CalledModule, Tracer
from fmtprop.lens.variants import FAILURES


def main(arguments: list[str]) -> None:
    """Run a program, and write the tracer's findings, however the program ends.

    `arguments`: the folder for ``lens.json`` and ``trace.json``, the other ways to run the costliest module, separated
    by commas, then the program (``-m MODULE`` or a path) and its own arguments.
    """
    folder, ways, *words = arguments
    ended: SystemExit | None = None
    tracer, process = Tracer(), os.getpid()
    signal.signal(signal.SIGTERM, _end)
    interrupted: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        with tracer.watching(threads=True):
            try:
                _execute(words)
            finally:
                _wait_for_threads()
    except SystemExit as end:
        ended = end
    except KeyboardInterrupt:
        ended = SystemExit(_INTERRUPTED)
    finally:
        if os.getpid() == process:  # not a forked child, which ends here, too
            program = words[1] if words[0] == "-m" else os.path.basename(words[0])
            lens = lens_of(program, tracer.calls)
            Path(folder, "lens.json").write_text(lens.to_json())
            Path(folder, "trace.json").write_text(lens.to_trace())
    if os.getpid() == process and ways and (ended is None or not ended.code):
        try:
            lens = _in_other_ways(lens, tracer.subject, ways.split(","))
        except BaseException:  # a compiler may raise its own for Ctrl-C
            if not interrupted:
                raise
        if interrupted:
            ended = SystemExit(_INTERRUPTED)
        Path(folder, "lens.json").write_text(lens.to_json())
    if ended is not None:
        raise ended


#: exit code of a program that Ctrl-C ends
_INTERRUPTED = 128 + signal.SIGINT


def _in_other_ways(lens: Lens, subject: CalledModule | None, ways: list[str]) -> Lens:
    """Return a program's findings with other ways to run its costliest module."""
    if subject is None:
        return lens
    name = type(subject.module).__name__
    called = FlatModule(subject.module, subject.inputs, subject.keywords)
    if subject.module.training or not called.examples:
        why = "it is in training mode" if subject.module.training else "no argument is a tensor"
        print(f"{name} is not measured in other ways: {why}", file=sys.stderr)
        return lens
    print(f"measuring {name} in other ways; --ways none leaves this out", file=sys.stderr)
    try:
        measured = in_other_ways(called, called.examples, ways, LEAST_TURNS)
    except FAILURES as error:
        print(f"{name} cannot run again: {error}", file=sys.stderr)
        return lens
    return replace(lens, subject=name, variants=measured)


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
