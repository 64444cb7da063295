"""ONNX models: read, checked, traced through PyTorch functions, and imported like any PyTorch program.

Needs the package ``onnx`` (the extra ``fmtprop[onnx]``), which reads, checks, converts and inlines models; no other
room of fmtprop imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fmtprop.errors import ImportModelError
from fmtprop.ir.verify import Stage, verify
from fmtprop.system.collector import paused

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph
    from fmtprop.onnx.model.program import OnnxProgram

__all__ = ["deciding_inputs", "from_onnx", "is_onnx", "open_program", "save_onnx"]


def is_onnx(model: object) -> bool:
    """Return whether a caller's model is ONNX: bytes, a ``ModelProto``, or a path with the suffix ``.onnx``.

    >>> is_onnx("model.onnx"), is_onnx("resnet50")
    (True, False)
    """
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)[-5:].lower() in (".onnx", b".onnx")
    return isinstance(model, bytes) or type(model).__module__.partition(".")[0] == "onnx"


def deciding_inputs(program: OnnxProgram) -> tuple[str, ...]:
    """Return the scalar inputs of a program that decide which of its nodes run."""
    from fmtprop.onnx.model import deciding

    return deciding.deciding_inputs(program)


def from_onnx(source: object, shapes: Mapping[str, Sequence[int]] | None = None) -> Graph:
    """Import an ONNX model as a graph.

    Result: inputs and outputs have the model's names; a node's ``origin`` is the ONNX node that it comes from. Raises
    ImportModelError if the package ``onnx`` is missing, the model is invalid, or it cannot be a graph; the message
    names the node.
    """
    with paused():
        program = open_program(source)  # first: its error says how to get the package, which all other modules need
        from fmtprop.onnx.model.graph import graph_of

        graph = graph_of(program, shapes)
        verify(graph, Stage.IMPORTED)
        return graph


def open_program(source: object) -> OnnxProgram:
    """Read a model and make it ready to run node by node.

    Raises ImportModelError if the package ``onnx`` is missing, the model is invalid, or an operator is not supported.
    """
    _check_package()
    from fmtprop.onnx.model.program import OnnxProgram
    from fmtprop.onnx.model.reading import read_model

    return OnnxProgram(read_model(source))


def save_onnx(graph: Graph, path: Path) -> None:
    """Write a graph as an ONNX model: :func:`fmtprop.onnx.model.export.save`.

    Raises ImportModelError if the package ``onnx`` is missing.
    """
    _check_package()
    from fmtprop.onnx.model.export import save

    save(graph, path)


def _check_package() -> None:
    """Check that the package ``onnx`` is installed, which all modules of this room import."""
    try:
        import onnx  # noqa: F401 (asked for here, so that one message says how to get it)
    except ImportError as error:
        raise ImportModelError(
            "ONNX models are read and written with the package onnx, which is not installed: "
            "pip install 'fmtprop[onnx]'"
        ) from error
