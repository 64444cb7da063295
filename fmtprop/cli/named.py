"""The model that a command is given: its graph, or with ``--train`` its module."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from fmtprop.cli.arguments import shapes_of

if TYPE_CHECKING:
    from fmtprop.capture.factories import FlatModule, Made
    from fmtprop.ir.graph import Graph


def graph_of(model: str, inputs: Sequence[str] | None, shape: Sequence[str] | None, *, deferred: bool = False) -> Graph:
    """Return the graph of a command's model.

    `inputs`: the values of ``--input``: shapes, as ``8x3x224x224``. Raises ImportModelError if there is no such model,
    or it cannot be imported.
    """
    sizes, shapes = inputs_of(inputs), shapes_of(shape)
    from fmtprop.capture.factories import graph_named

    return graph_named(model, sizes, shapes=shapes, deferred=deferred)


def original_of(graph: Graph, model: str, inputs: Sequence[str] | None) -> Callable[[], FlatModule] | None:
    """Return what makes the module of a command's model; None where the model is a graph."""
    from fmtprop.capture import factories

    return factories.original_of(graph, model, inputs_of(inputs))


def module_maker(model: str, inputs: Sequence[str] | None, shape: Sequence[str] | None) -> Callable[[], Made]:
    """Return a function that makes the module for ``--train``, after one trial.

    Raises ImportModelError if the model cannot train.
    """
    if shape:
        raise typer.BadParameter("--shape is for ONNX models, which have no --train; --input has the shapes")
    sizes = inputs_of(inputs)
    from fmtprop.capture.factories import trainable

    make = partial(trainable, model, sizes)
    make()
    return make


def inputs_of(texts: Sequence[str] | None) -> list[tuple[int, ...]]:
    """Return the shapes of ``--input``.

    >>> inputs_of(["8x3x224x224"])
    [(8, 3, 224, 224)]
    """
    for text in texts or ():
        if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", text):
            raise typer.BadParameter(f"--input {text!r} is no shape; one is 8x3x224x224")
    return [tuple(map(int, text.split("x"))) for text in texts or ()]
