"""The program as a user runs it: in this process, and in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from fmtprop.cli import main

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def fmtprop(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    """Run a command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return Outcome(ended.value.code or 0, out, err)


def start(*words: object, environment: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fmtprop", *map(str, words)],
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": listen_to_control_c, **options},
    )


def listen_to_control_c() -> None:
    """Answer Ctrl-C, which a shell lets those ignore that it runs in the background, and their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
