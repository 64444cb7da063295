"""The option ``--train`` of several commands: a model's module instead of its graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fmtprop.frontends.trainable import Trainable


def module_maker(
    model: str, inputs: Sequence[str] | None, train: bool, sizes: Mapping[str, object]
) -> Callable[[], Trainable] | None:
    """Return a function that makes the module for ``--train``, after one trial; None without the option.

    Parameters
    ----------
    inputs : sequence of str, optional
        Shapes, as ``8x3x224x224``.
    sizes : mapping
        The shapes of ``--shape``, which other models have.

    Raises
    ------
    ImportModelError
        The model cannot train.
    """
    shapes = [_shape(text) for text in inputs or ()]
    if not train:
        if shapes:
            raise typer.BadParameter("--input is for --train: the inputs of other models have their shapes")
        return None
    if sizes:
        raise typer.BadParameter("--shape is for ONNX models, which have no --train; --input has the shapes")
    from fmtprop.frontends.trainable import trainable

    make = partial(trainable, model, shapes)
    make()
    return make


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", text):
        raise typer.BadParameter(f"--input {text!r} is no shape; one is 8x3x224x224")
    return tuple(map(int, text.split("x")))
