"""``fmtprop compile`` and ``fmtprop plan``: plan files, made and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Inputs,
    Json,
    Model,
    Pins,
    Policy,
    Shapes,
    SpecialValues,
    Target,
    Threads,
    Tune,
    Verify,
    Weights,
    pairs_of,
)
from fmtprop.cli.console import USAGE, emit, failing, note, progress
from fmtprop.cli.named import graph_of
from fmtprop.errors import FmtpropError

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph
    from fmtprop.layout import MemoryDesc

#: options with which a model is compiled, where nothing else is asked for
_DEFAULTS = {
    "dtype": "f32", "weights": None, "verify": "on", "tune": "auto", "target": "onednn", "special_values": None,
}  # fmt: skip

plan = typer.Typer(no_args_is_help=True, help="Plan files of `fmtprop compile` and `net.save`.")


def is_plan(model: str) -> bool:
    """Return whether a model is given as a plan file."""
    from fmtprop.system.files import starts_as

    return starts_as(Path(model), PLAN_FILE)


#: the beginning of a plan file
PLAN_FILE = b'{"__metadata__":{"format":"fmtprop-plan"'


def check_no_options(model: str, given: Mapping[str, Any], **others: object) -> None:
    """Refuse options of a compilation for a plan file, which has its own.

    `given`: options that have a default, with their values. `**others`: further options, with whether each is given.
    """
    changed = [key for key, value in given.items() if value != _DEFAULTS[key]]
    asked = [f"--{key.replace('_', '-')}" for key in (*changed, *(key for key, on in others.items() if on))]
    if asked:
        raise FmtpropError(f"{model} is a plan, compiled with its own options: leave out {', '.join(asked)}")


def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan file: .fmtplan.")],
    policy: Policy = "optimal",
    dtype: Dtype = "f32",
    weights: Weights = None,
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    budget: Annotated[
        float | None,
        typer.Option("--tune-budget", min=0.001, help="Seconds after which measuring ends.", show_default="no end"),
    ] = None,
    confirm: Annotated[bool, typer.Option(help="Race the cheapest plan with others, and keep the fastest.")] = True,
    winograd: Annotated[
        bool, typer.Option(help="Compute convolutions by minimal filtering where it costs less.")
    ] = True,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Modelled costs alone: each compilation makes the same plan.")
    ] = False,
    pin: Pins = None,
    boundary: Annotated[
        list[str] | None,
        typer.Option("--boundary", metavar="NAME=TAG", help="Format of an input or output.", show_default=False),
    ] = None,
    shape: Shapes = None,
    inputs: Inputs = None,
    weights_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--weights-file",
            metavar="FILE",
            help="A file with the model's weights: .safetensors, .onnx, .pt2. The plan refers to it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compile a model to a plan file, which any process loads in a moment.

    The file has weights, formats and implementations, and no code. fp.load_plan(FILE) in Python; run, bench, report,
    diff and `plan show` take it. It fits machines with the same library, instruction set, threads and caches; anywhere
    else, it is planned again when it is loaded.
    """
    with progress() as say:
        from fmtprop.api import Options, compile_graph
        from fmtprop.compiling.saving import check_destination
        from fmtprop.runtime.process import use_threads

        with failing(USAGE):
            check_destination(output)
            graph = graph_of(model, inputs, shape, deferred=True)
            options = Options(
                dtype=dtype, weights=weights, policy=policy, target=target, tune=tune, verify=verify,
                tune_budget=budget, special_values=special_values or "fast", confirm=confirm, winograd=winograd,
                deterministic=deterministic, pin=pairs_of("--pin", pin), boundary=_boundary(graph, boundary),
            )  # fmt: skip
        use_threads(threads)
        say("compiling", 0, 2)
        net = compile_graph(graph, options, owned=True)
        say("writing", 1, 2)
        net.save(output, weights_file)
    note(f"wrote {output}: {net!r}")


@plan.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show what is in a plan file: what it was made for, whether it fits here, and every node with its choice.

    Nothing is built or run. The JSON form can be given to `fmtprop diff`, as the file itself can.
    """
    from fmtprop.compiling.loading import read_plan
    from fmtprop.report.plan_text import plan_data, plan_text

    with failing(USAGE):
        found = read_plan(file)
    emit(json.dumps(plan_data(found), indent=1) if as_json else plan_text(found))


def _boundary(graph: Graph, values: Sequence[str] | None) -> dict[str, MemoryDesc]:
    from fmtprop.layout import MemoryDesc

    types = {node.name: node.results[0] for node in graph.input_nodes}
    types |= {node.name: graph.type_of(graph.inputs(node.name)["src"]) for node in graph.output_nodes}
    pairs = pairs_of("--boundary", values)
    for name in pairs:
        if name not in types:
            raise FmtpropError(f"--boundary names {name!r}, but the inputs and outputs are {', '.join(types)}")
    return {name: MemoryDesc(types[name].dims, types[name].dtype, tag=tag) for name, tag in pairs.items()}
