"""``fmtprop doctor``: the libraries in use and the missing ones, and whether costs predict runs here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fmtprop.cli.arguments import Dtype, Inputs, Json, Threads
from fmtprop.cli.console import FAILED, USAGE, emit, failing, progress
from fmtprop.cli.named import graph_of


def doctor(
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs",
            metavar="MODEL",
            help="Compile and run a model, and show how its costs predict the run: in all, and step by step.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = "f32",
    threads: Threads = None,
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Show the libraries in use and the missing ones.

    Shows the oneDNN library, the instruction set, and packages to install. Exits with 1 if oneDNN cannot be used.
    With --costs, shows the costs of a model over its times on this machine instead.
    """
    if costs is not None:
        _show_costs(costs, inputs, dtype, threads, as_json)
        return
    from fmtprop.dnnl.doctor import diagnose
    from fmtprop.jit import no_tiles, unavailable

    diagnosis = diagnose()
    missing = unavailable() if diagnosis.ok else "they need oneDNN"
    without_tiles = missing or no_tiles()
    if as_json:
        emit(json.dumps({**diagnosis.to_dict(), "kernels": not missing, "tiles": not without_tiles}, indent=1))
    else:
        emit(diagnosis.to_text())
        for name, reason in (("own kernels", missing), ("AMX tiles", without_tiles)):
            emit(f"{name:<16} {f'no: {reason}' if reason else 'yes'}")
    if not diagnosis.ok:
        raise typer.Exit(FAILED)


def _show_costs(model: str, inputs: list[str] | None, dtype: str, threads: int | None, as_json: bool) -> None:
    """Compile a model, run it, and print its costs over its times."""
    with progress():
        from fmtprop.api import Options, compile_graph
        from fmtprop.report.predictions import Predictions
        from fmtprop.runtime.process import use_threads

        with failing(USAGE):
            options, graph = Options(dtype=dtype), graph_of(model, inputs, None)
        use_threads(threads)
        found = Predictions.of(compile_graph(graph, options))
    emit(json.dumps(found.to_dict(), indent=1) if as_json else found.to_text())
