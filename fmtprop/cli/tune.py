"""``fmtprop tune``: costs of a model's primitives and reorders on this machine, measured once and recorded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fmtprop.cli.arguments import Dtype, Inputs, Json, Model, Shapes, Threads
from fmtprop.cli.console import USAGE, emit, failing, progress
from fmtprop.cli.named import graph_of
from fmtprop.system.printable import counted, printable


def tune(
    model: Model,
    dtype: Dtype = "f32",
    threads: Threads = None,
    shape: Shapes = None,
    inputs: Inputs = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", "-b", min=0.001, help="Seconds after which measuring ends.", show_default="no end"),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure recorded costs again: after a change, or if the machine was busy.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the costs of a model's primitives and reorders here.

    Fills the tuning cache for one model, data type and number of threads: later, policy optimal uses the measured
    costs without measuring. Prints the certificate of the resulting plan.
    """
    with progress() as say:
        from fmtprop.api import Options, compile_graph
        from fmtprop.runtime.process import use_threads

        def measuring(done: int, total: int) -> None:
            say("measuring", done, total)

        with failing(USAGE):
            options = Options(
                dtype=dtype, tune="remeasure" if again else "measure", tune_budget=budget, progress=measuring
            )
            graph = graph_of(model, inputs, shape)
        use_threads(threads)
        net = compile_graph(graph, options)
    tuning, certificate = net.tuning, net.certificate
    data = {
        "model": net.plan.name,
        "precision": net.precision,
        "threads": net.plan.threads,
        "tuning": None if tuning is None else asdict(tuning),
        "certificate": None if certificate is None else asdict(certificate),
    }
    if as_json:
        emit(json.dumps(data, indent=1))
        return
    lines = [f"{printable(net.plan.name)}, {net.precision}, {counted(net.plan.threads, 'thread')}"]
    if tuning is not None:
        lines.append(
            f"costs: {tuning.measured} measured in {tuning.seconds:.1f} s, {tuning.cached} known before, "
            f"{tuning.modelled} from the model"
        )
    if certificate is not None:
        lines.append(f"plan: {certificate}")
    emit("\n".join(lines))
