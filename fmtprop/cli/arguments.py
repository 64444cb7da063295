"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fmtprop.cli.console import keep_stdout
from fmtprop.errors import FmtpropError
from fmtprop.system.limits import MAX_RUNS, MAX_THREADS


def _named(model: str) -> str:
    """Refuse an empty name: as a path, it would be the working directory."""
    if not model:
        raise typer.BadParameter("the name is empty; `fmtprop models` lists the built-in graphs")
    return model


def _json_alone(wanted: bool) -> bool:
    if wanted:
        keep_stdout()
    return wanted


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=_named,
        help="A built-in graph (`fmtprop models` lists them), a graph file (.json), an exported program (.pt2), an "
        "ONNX model (.onnx), or package.module:factory or file.py:factory, a function that returns a PyTorch module "
        "(with --input), or (module, inputs).",
        show_default=False,
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SIZE,...",
        help="For an ONNX model with dynamic axes: the sizes of all axes of an input, such as x=1,3,224,224. Repeated "
        "for several inputs.",
        show_default=False,
    ),
]
Policy = Annotated[
    str, typer.Option("--policy", "-p", help="How formats are chosen: optimal, propagate, naive or plain.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "--policies",
        "-p",
        metavar="NAME[,NAME...]",
        help="How formats are chosen: optimal, propagate, naive, plain. Several are compared with the first.",
        show_default=False,
    ),
]
Tune = Annotated[
    str,
    typer.Option(
        "--tune",
        help="Source of the costs of policy optimal: model (a roofline), measure (timed here, and recorded), "
        "remeasure (all timed again) or auto (recorded times, else the model).",
    ),
]
Target = Annotated[
    str, typer.Option("--target", help="Who executes: onednn (the library) or mkldnn (the oneDNN inside PyTorch).")
]
Dtype = Annotated[str, typer.Option("--dtype", "-d", help="Data type of compute-intensive ops: f32, bf16 or f16.")]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Keep the weights of large products as codes: int8 or int4. Where outputs are compared with other "
        "runtimes, these have the numbers that the codes stand for.",
        show_default="as the model has them",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        min=1,
        max=MAX_THREADS,
        help="Threads of PyTorch and oneDNN.",
        show_default="as PyTorch chooses",
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        "--verify", help="The plan's own check: on (each distinct primitive once), full (the whole model too) or off."
    ),
]
SpecialValues = Annotated[
    str | None,
    typer.Option(
        "--special-values",
        help="NaN and infinities: fast (as in oneDNN's instructions), kept (never lost, but filtered convolutions "
        "spread them) or exact (as in PyTorch, everywhere; such steps take longer).",
        show_default="fast; kept in training",
    ),
]
Train = Annotated[
    bool,
    typer.Option(
        "--train",
        help="A step of training, forward and backward, instead of a run of inference. MODEL is package.module:factory "
        "or file.py:factory, which may also return (module, inputs, loss); or the .pt2 of a program that was exported "
        "in train mode.",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Shape of an input, such as 8x3x224x224, for a factory that returns only a module. Repeated for several.",
        show_default=False,
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NODE.OPERAND=TAG",
        help="A format that policy optimal must use, such as conv_1.dst=nChw16c. Repeated for several.",
        show_default=False,
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", "-n", min=1, max=MAX_RUNS, help="Runs over which medians are taken.")
]
Json = Annotated[
    bool,
    typer.Option("--json", callback=_json_alone, help="Print JSON instead of text, and nothing else, on stdout."),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report", "-r", metavar="FILE", help="Also write the whole report: .html, .txt or .json.", dir_okay=True
    ),
]
TableFile = Annotated[
    Path | None,
    typer.Option("--report", "-r", metavar="FILE", help="Also write the whole report: .txt or .json.", dir_okay=True),
]


def no_weights_in_training(weights: str | None) -> None:
    """Refuse codes for a step of training, which changes its weights."""
    if weights is not None:
        raise FmtpropError("--weights is for inference: leave it out with --train")


def words(values: Sequence[str]) -> list[str]:
    """Return the values of an option that takes several: repeated, or separated by commas, or both."""
    found = [word.strip() for value in values for word in value.split(",") if word.strip()]
    if not found:
        raise typer.BadParameter(f"{','.join(values)!r} has no name in it")
    return found


def pairs_of(option: str, values: Sequence[str] | None) -> dict[str, str]:
    """Return the values of an option that is a name, ``=`` and a tag.

    >>> pairs_of("--pin", ["conv_1.dst=nChw16c"])
    {'conv_1.dst': 'nChw16c'}
    """
    found: dict[str, str] = {}
    for text in values or ():
        name, equals, tag = text.partition("=")
        if not (name and equals and tag):
            raise FmtpropError(f"{option} {text!r} must be a name, = and a tag")
        if name in found:
            raise FmtpropError(f"{option} gives {name!r} twice")
        found[name] = tag
    return found


def shapes_of(values: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ``--shape`` by input.

    >>> shapes_of(["x=1,3,224,224", "mask=1"])
    {'x': (1, 3, 224, 224), 'mask': (1,)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for text in values or ():
        parts = re.fullmatch(r"(.+)=(\d{1,18}(?:,\d{1,18})*)", text, re.ASCII | re.DOTALL)
        if parts is None:
            raise typer.BadParameter(f"--shape {text!r} is no input with its sizes; one is x=1,3,224,224")
        name, sizes = parts.groups()
        if name in found:
            raise typer.BadParameter(f"--shape gives input {name!r} twice")
        found[name] = tuple(map(int, sizes.split(",")))
    return found
