"""``fmtprop lens``: PyTorch's hidden reorders in a program, by module and source line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from fmtprop.cli.arguments import Json
from fmtprop.cli.arguments import words as words_of
from fmtprop.cli.console import FAILED, USAGE, emit, failing, note
from fmtprop.cli.verbose import run_program
from fmtprop.errors import FmtpropError
from fmtprop.lens.gain import WAYS
from fmtprop.verbose import Ledger

_NOTHING = (
    "PyTorch's oneDNN executed nothing in this program's own process, so there are no reorders to remove: PyTorch runs "
    "f32 matrix products in its own BLAS, and f64, integers, very small convolutions and code of torch.compile without "
    "oneDNN. For child processes and other libraries: fmtprop verbose -- COMMAND; to see whether a plan is faster: "
    "fmtprop bench file.py:factory --vs torch"
)


def lens(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- python SCRIPT...", help="A Python program and its arguments.", show_default=False),
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Also write the run for Perfetto, on torch.profiler's clock.",
            show_default=False,
        ),
    ] = None,
    ways: Annotated[
        str,
        typer.Option(
            "--ways",
            metavar="NAME[,NAME...]",
            help="Other ways to run the costliest module, measured after the program: channels_last, mkldnn, inductor, "
            "fmtprop; or none.",
        ),
    ] = ",".join(WAYS),
    as_json: Json = False,
) -> None:
    """Show the reorders that PyTorch's own oneDNN executes in a program: by module and source line.

    The unchanged program runs in eager mode under a tracer; its own output goes to stderr. When it has ended well, the
    module with the costliest reorders runs again, with the inputs of its last call: as it is, and in other ways.
    Example: fmtprop lens -- python script.py
    """
    from fmtprop.lens.findings import lens_from

    with failing(USAGE):
        interpreter, words = _program(command)
        wanted = _wanted(ways)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "lens.json"
            elsewhere = Ledger()
            code = run_program(
                [*interpreter, "-m", "fmtprop.lens.script", folder, wanted, *words], elsewhere, os.environ
            )
            data: dict[str, Any] | None = json.loads(result.read_text()) if result.exists() else None
            if data is not None and trace is not None:
                from fmtprop.report.files import OURS_TRACE, write_text  # imports torch, which only the program needs

                write_text((Path(folder) / "trace.json").read_text(), trace, OURS_TRACE)
                note(f"wrote {trace}")
    if data is not None:
        emit(json.dumps(data, indent=1) if as_json else lens_from(data).to_text())
    if data is None:
        note("there are no findings: a signal or os._exit ended the program, or it could not be watched")
    elif code:
        note(f"the program ended with status {code}; these are its findings until then")
    elif not data["primitives"]["count"]:
        note(_NOTHING)
    if count := elsewhere.primitives.count:
        seconds = elsewhere.primitives.seconds
        note(f"{count} more executions ({seconds * 1e3:.3f} ms) are in no row: child processes, or outside operators")
    if code or data is None:
        raise typer.Exit(code or FAILED)


def _wanted(ways: str) -> str:
    """Return the ways, separated by commas; empty for none."""
    names = [] if ways.strip() == "none" else words_of([ways])
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        raise FmtpropError(f"unknown way {unknown[0]!r} to run a module; known: {', '.join(WAYS)}, or none")
    return ",".join(names)


def _program(command: list[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter, and the script or module with its arguments."""
    first, *words = command
    if not Path(first).name.startswith("python"):
        first, words = sys.executable, command
    elif Path(first).name == first:  # another interpreter on the path may lack fmtprop: that one is named by its path
        first = sys.executable
    if not words or (words[0].startswith("-") and words[0] != "-m") or words == ["-m"]:
        raise FmtpropError("lens runs a Python script or module: fmtprop lens -- python script.py, or python -m module")
    if words[0] != "-m" and not Path(words[0]).exists():
        raise FmtpropError(f"{words[0]} cannot be run: there is no such file")
    return [first], words
