"""The program: its commands, its own options, and how it ends."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from fmtprop import __version__
from fmtprop.cli.check import check, diff, whatif
from fmtprop.cli.compare import report, run
from fmtprop.cli.console import FAILED, TRACEBACK, WarningsOfLog, emit, failing, printing_help, warning_printer
from fmtprop.cli.doctor import doctor
from fmtprop.cli.graphs import models, show
from fmtprop.cli.layout import layout
from fmtprop.cli.lens import lens
from fmtprop.cli.plan import compile_, plan
from fmtprop.cli.race import bench
from fmtprop.cli.tune import tune
from fmtprop.cli.verbose import LogCommand, verbose

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (run, report, diff, check, whatif, show, models, tune, bench, layout, verbose, lens, doctor):
    app.command(cls=LogCommand if command is verbose else None)(command)

app.command("compile")(compile_)
app.add_typer(plan, name="plan")


def _version(wanted: bool) -> None:
    if wanted:
        emit(f"fmtprop {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 fine, 1 a check failed or a run went wrong, 2 a bad argument or model, 130 interrupted."
)
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Plan the memory format of every tensor of a neural network, run it on oneDNN, and report each reorder's cost.

    MODEL is a built-in name, a graph file (.json), an exported program (.pt2), an ONNX model (.onnx), or a function
    that returns a PyTorch module: package.module:factory or file.py:factory (with --input for its inputs' shapes). Run,
    report and bench also take a plan file (`fmtprop compile`).
    """
    del version
    TRACEBACK.set(traceback)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and end the process; see :func:`fmtprop.cli.main`."""
    with warnings.catch_warnings(), failing(FAILED), printing_help():
        warnings.showwarning = show = warning_printer()
        log, logged = logging.getLogger("fmtprop"), WarningsOfLog(show)
        log.addHandler(logged)
        try:
            app(args=None if arguments is None else list(arguments), prog_name="fmtprop")
        finally:
            log.removeHandler(logged)
