"""``fmtprop verbose``: the log of any program that runs oneDNN, added up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import IO, Annotated, Any

import typer
from typer.core import TyperCommand

from fmtprop.cli.arguments import Json
from fmtprop.cli.console import FAILED, USAGE, emit, exit_code, failing, note, pass_on
from fmtprop.errors import FmtpropError
from fmtprop.verbose import Ledger
from fmtprop.verbose.parse import MARKER
from fmtprop.verbose.source import PIECE_CHARACTERS, pieces

#: environment variables of the log, by oneDNN's age; every version knows the value 1
_SWITCHES = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKLDNN_VERBOSE")
#: their values without executions in the log
_OFF = ("", "0", "none", "error", "warn", "check")
#: what may be done if a program, or a log, has no execution
_NONE_RAN = (
    "oneDNN executed nothing in this program, or not in a way that its log shows: other libraries may compute (ONNX "
    "Runtime and numpy do without oneDNN), PyTorch runs some operators and data types by itself, and some programs "
    "contain a oneDNN without log"
)
_CREATED_ALONE = (
    "this log has creations of primitives and refusals of implementations, but no execution: set ONEDNN_VERBOSE=1 (or "
    "profile_exec, all) in the program's environment"
)
_NONE_LOGGED = (
    "there is no line of oneDNN's in this log; set ONEDNN_VERBOSE=1 in the program's environment. If it was set: "
)


class LogCommand(TyperCommand):
    """A command that knows whether ``--`` precedes its words: then a single word is a program, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as any command does."""
        ctx.obj = "--" in args
        return super().parse_args(ctx, args)


def verbose(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG | -- COMMAND...", help="A file, - for stdin, or a command to run.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Add up the log that oneDNN prints in any program (ONEDNN_VERBOSE=1).

    Shows the time of reorders by kind, implementation and format, and avoidable executions. Examples: fmtprop
    verbose log.txt; ONEDNN_VERBOSE=1 python script.py | fmtprop verbose -; fmtprop verbose -- python script.py. Exits
    with 1 if the log has no execution.
    """
    ledger, code, runs = Ledger(), 0, context.obj or len(words) > 1
    with failing(USAGE):
        if runs:
            code = run_program(words, ledger, _logging(os.environ))
        else:
            with closing(pieces(words[0])) as found:
                ledger.read(found)
    if as_json or ledger.primitives.count:
        emit(json.dumps(ledger.to_dict(), indent=1) if as_json else ledger.to_text())
    if code and not ledger.primitives.count:
        note(f"the command ended with status {code}, and oneDNN had executed nothing in it")
    elif not ledger.primitives.count:
        known = _CREATED_ALONE if ledger.has_creations else _NONE_RAN
        note(known if runs or ledger.knows_library else _NONE_LOGGED + _NONE_RAN)
    if code or not ledger.primitives.count:
        raise typer.Exit(code or FAILED)


def _logging(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the log switched on; a switch that is on already keeps its value."""
    given = {name: value for name, value in environment.items() if name not in _SWITCHES or value not in _OFF}
    return {**dict.fromkeys(_SWITCHES, "1"), **given}


def run_program(command: list[str], ledger: Ledger, environment: Mapping[str, str]) -> int:
    """Run a program; oneDNN's log goes to the ledger, its other output to stderr. Return its exit code."""
    with _signals_left() as leave_to:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", env=environment
            )
        except OSError as error:
            several = "; of several logs: cat LOG... | fmtprop verbose -" if len(command) > 1 else ""
            raise FmtpropError(f"{command[0]} cannot be run: {error.strerror}{several}") from error
        leave_to(process)
        with process:
            ledger.read(_log_alone(process.stdout))
    return exit_code(process.returncode)


@contextmanager
def _signals_left() -> Iterator[Callable[[subprocess.Popen[str]], None]]:
    """Yield a function that leaves signals to a program, also earlier ones: its log until then is added up."""
    processes: list[subprocess.Popen[str]] = []
    asked: list[int] = []

    def end(number: int, _: Any) -> None:
        if number == signal.SIGTERM:  # a terminal sends Ctrl-C to all
            asked.append(number)
            for process in processes:
                process.terminate()

    def leave_to(process: subprocess.Popen[str]) -> None:
        processes.append(process)
        if asked:
            process.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield leave_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_alone(output: IO[str] | None) -> Iterator[str]:
    """Yield the pieces that may have oneDNN's lines at once; pass on all other output of the program."""
    while output is not None and (piece := output.readline(PIECE_CHARACTERS)):
        marker = MARKER.search(piece)
        if marker is not None:
            yield piece
        pass_on(piece if marker is None else piece[: marker.start()])
