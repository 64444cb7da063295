"""``fmtprop show`` and ``fmtprop models``: output of graphs, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fmtprop.cli.arguments import Dtype, Inputs, Json, Model, Policy, Shapes, Target
from fmtprop.cli.console import USAGE, emit, failing, keep_stdout, note
from fmtprop.cli.named import graph_of
from fmtprop.errors import FmtpropError
from fmtprop.system.printable import aligned

#: forms of a printed graph
_FORMS = ("text", "dot", "json")
_FILES = (".svg", ".onnx", ".json")


def show(
    model: Model,
    stage: Annotated[
        str, typer.Option("--stage", "-s", help="How far the model goes: imported, normal or formatted.")
    ] = "formatted",
    passes: Annotated[bool, typer.Option("--passes", help="Show the graph after each pass on the way.")] = False,
    policy: Policy = "optimal",
    dtype: Dtype = "f32",
    target: Target = "onednn",
    shape: Shapes = None,
    inputs: Inputs = None,
    form: Annotated[str, typer.Option("--format", "-f", help="How it is printed: text, dot or json.")] = "text",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Save the graph instead: .svg (a picture), .onnx (for viewers such as Netron) or .json.",
            show_default=False,
        ),
    ] = None,
    constants: Annotated[bool, typer.Option("--constants", help="With --format dot: draw constants, too.")] = False,
) -> None:
    """Show the graph after a stage, or after every pass.

    One line for each node: name, op with its post-ops, operands, result types, and the formats, implementation and
    reason if they are chosen already. For a picture: fmtprop show MODEL -o graph.svg, or for
    Graphviz: fmtprop show MODEL --format dot | dot -Tsvg > graph.svg
    """
    from fmtprop.api import Options
    from fmtprop.capture import save
    from fmtprop.compiling.snapshots import STAGES, costs_of, snapshots
    from fmtprop.report.files import OURS_SVG, write_text
    from fmtprop.report.graph_dot import graphs_dot
    from fmtprop.report.graph_svg import graph_svg
    from fmtprop.report.graph_text import graph_data, graphs_text

    if form == "json":
        keep_stdout()
    with failing(USAGE):
        for option, value, known in (("format", form, _FORMS), ("stage", stage, STAGES)):
            if value not in known:
                raise FmtpropError(f"--{option} must be one of {', '.join(known)}; got {value!r}")
        if output is not None and output.suffix.lower() not in _FILES:
            raise FmtpropError(f"{output}: a graph is saved as {', '.join(_FILES)}, not as {output.suffix!r}")
        options = Options(policy=policy, dtype=dtype, target=target)
        graph = graph_of(model, inputs, shape)
    shots = snapshots(graph, stage, policy=options.policy, dtype=options.dtype, target=options.target, passes=passes)
    if output is not None and output.suffix.lower() == ".svg":
        write_text(graph_svg(shots[-1].graph, f"{graph.name}, {shots[-1].title}"), output, OURS_SVG)
    elif output is not None:
        save(shots[-1].graph, output)
    if output is not None:
        note(f"wrote {output}")
        return
    if form == "json":
        data = [
            {
                "stage": shot.stage, "after": shot.after, "policy": options.policy, "dtype": options.dtype,
                **graph_data(shot.graph, costs_of(shot.graph, target) if shot.stage == "formatted" else None),
            }
            for shot in shots
        ]  # fmt: skip
        emit(json.dumps(data if passes else data[0], indent=1, allow_nan=False))
        return
    titled = [(shot.title, shot.graph) for shot in shots]
    emit(graphs_text(titled) if form == "text" else graphs_dot(titled, constants=constants))


def models(as_json: Json = False) -> None:
    """List the built-in graphs: inputs, parameters, ops."""
    from fmtprop.builtin import catalogue

    rows = catalogue()
    if as_json:
        emit(json.dumps(rows, indent=1))
        return
    words = [
        (
            row["name"],
            " ".join(row["inputs"].values()),
            f"{row['parameters'] / 1e6:.2f} M",
            ", ".join(f"{count} {op}" for op, count in row["ops"].items()),
        )
        for row in rows
    ]
    emit("\n".join(aligned([("name", "inputs", "parameters", "ops"), *words])))
