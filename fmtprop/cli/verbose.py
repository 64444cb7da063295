"""``fmtprop verbose``: the log of any program that runs oneDNN, added up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fmtprop.cli.arguments import Json
from fmtprop.cli.console import FAILED, USAGE, emit, failing, note
from fmtprop.errors import FmtpropError
from fmtprop.verbose import Ledger

#: how the log was and is asked for; every version knows 1
_SWITCHES = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKLDNN_VERBOSE")
#: characters that are read at once, and of the longest line: what is longer comes in pieces
_BLOCK_CHARACTERS, _PIECE_CHARACTERS = 1 << 20, 1 << 16


def verbose(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG | -- COMMAND...", help="A file, - for stdin, or a command to run.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Add up the log that oneDNN prints in any program (ONEDNN_VERBOSE=1).

    Tells what reorders take, by kind, by implementation and by format, and what should not be there. Examples: fmtprop
    verbose log.txt; ONEDNN_VERBOSE=1 python script.py | fmtprop verbose -; fmtprop verbose -- python script.py. Exits
    with 1 if the log has no execution.
    """
    ledger, code = Ledger(), 0
    with failing(USAGE):
        if len(what) > 1:
            code = _run(what, ledger)
        else:
            with closing(_pieces(what[0])) as pieces:
                ledger.read(pieces)
    emit(json.dumps(ledger.to_dict(), indent=1) if as_json else ledger.to_text())
    if not ledger.primitives.count:
        note("there is no execution in this log; set ONEDNN_VERBOSE=1 in the environment of the program")
    if code or not ledger.primitives.count:
        raise typer.Exit(code or FAILED)


def _pieces(name: str) -> Generator[str, None, None]:
    try:
        source = sys.stdin.fileno() if name == "-" else Path(name)
        with open(source, encoding="utf-8", errors="replace", closefd=name != "-") as file:
            rest = ""
            while block := file.read(_BLOCK_CHARACTERS):
                *lines, rest = (rest + block).split("\n")
                yield from lines
                if len(rest) > _PIECE_CHARACTERS:
                    yield rest
                    rest = ""
            yield rest
    except OSError as error:
        raise FmtpropError(f"{name} cannot be read: {error.strerror}") from error


def _run(command: list[str], ledger: Ledger) -> int:
    """Run a program; its log goes to the ledger, whatever else it prints to stderr."""
    environment = {**dict.fromkeys(_SWITCHES, "1"), **os.environ}
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", env=environment
        )
    except OSError as error:
        raise FmtpropError(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        while process.stdout is not None and (piece := process.stdout.readline(_PIECE_CHARACTERS)):
            if not ledger.read_line(piece):
                note(piece.rstrip("\n"))
    return process.returncode
