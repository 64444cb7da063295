"""``fmtprop doctor``: the libraries in use and the missing ones, and whether costs predict runs here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fmtprop.cli.arguments import Dtype, Inputs, Json, Threads
from fmtprop.cli.console import FAILED, USAGE, emit, failing, finish, progress
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
    libraries: Annotated[
        str | None,
        typer.Option(
            "--libraries",
            metavar="MODEL",
            help="Time a model with each oneDNN that is installed, in turns, a process each.",
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
    With --costs, shows the costs of a model over its times on this machine instead; with --libraries, what each
    installed oneDNN makes of a model.
    """
    if libraries is not None:
        _race_libraries(libraries, inputs, dtype, threads, as_json)
        return
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


def _race_libraries(model: str, inputs: list[str] | None, dtype: str, threads: int | None, as_json: bool) -> None:
    """Time a model with each oneDNN, compare the results first, and print the times."""
    with progress() as say:
        from fmtprop.api import Options
        from fmtprop.bench.contenders import libraries, race

        with failing(USAGE):
            contenders = libraries(Options(dtype=dtype))
            graph = graph_of(model, inputs, None)
        result = race(graph, contenders, reference=contenders[0].name, threads=threads, progress=say)
    emit(result.to_json() if as_json else result.to_text())
    finish(result, None)
