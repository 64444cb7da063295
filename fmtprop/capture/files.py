"""Models from files and by name: built-in graphs, graph files, exported programs, ONNX models.

This module owns the distinction between names and paths, and the errors of unreadable files. Other modules read the
kinds of files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from logging import LogRecord
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from fmtprop.builtin import builtin_names, builtin_path
from fmtprop.capture.torch_log import held_back, reason
from fmtprop.errors import GraphError, ImportModelError
from fmtprop.ir import file as graph_file
from fmtprop.ir.graph import Graph
from fmtprop.onnx.model import from_onnx, is_onnx, save_onnx
from fmtprop.system.files import check_readable, path_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_KINDS = ".json (graph file), .pt2 (torch.export.save), .onnx, or the name of a built-in graph"


def load(path: object, *, shapes: Mapping[str, Sequence[int]] | None = None, deferred: bool = False) -> Graph:
    """Load a graph by name or from a file.

    Parameters
    ----------
    path : str, Path, bytes or onnx.ModelProto
        Name of a built-in graph (``"resnet50"``), a graph file (``.json``), an exported program (``.pt2``) or an ONNX
        model (``.onnx``, its bytes or a model in memory). A path with a separator or an extension is never taken for a
        name.
    shapes : mapping of str to sequence of int, optional
        For an ONNX model: dimensions of inputs with dynamic axes, by input.
    deferred : bool
        Whether a graph file's large weights are read on each request: for a compilation, which packs one after the
        other. The graph is valid only while the file does not change.

    Returns
    -------
    Graph

    Raises
    ------
    ImportModelError
        There is no such file or name, it is of another kind, or it is damaged; for a ``.pt2``, also when it would
        execute code (see :func:`fmtprop.archive.pt2_safety.check_archive`) or cannot be imported.
    GraphError
        The graph file is malformed.

    Examples
    --------
    >>> load("chain").input_nodes[0].results
    (f32[1,3,32,32],)
    """
    if is_onnx(path):
        return from_onnx(path, shapes)
    file = _path(path)
    try:
        exists = file.exists()
    except OSError as error:
        raise ImportModelError(f"{file} cannot be read: {error.strerror}; give a file that can: {_KINDS}") from error
    bare = file.name == str(path) and not file.suffix
    if bare and (file.name in builtin_names() or not exists):
        _refuse_shapes(shapes, f"the built-in graph {file.name}")
        return graph_file.load(_builtin(file.name))
    _check_file(file)
    kind = file.suffix.lower()
    _refuse_shapes(shapes, str(file))
    if kind == ".json":
        return graph_file.load(file, deferred=deferred)
    if kind == ".pt2":
        return _load_exported(file)
    if kind in (".pt", ".pth", ".bin", ".safetensors", ".ckpt"):
        raise ImportModelError(
            f"{file}: holds weights (or a pickle), not a program. Build the module, load the weights into it and call "
            "fmtprop.from_torch(module, example_inputs)"
        )
    if kind == ".py":
        raise ImportModelError(f"{file} is a program: name a function in it that returns a module, as {file}:function")
    if kind == ".fmtplan":
        raise ImportModelError(
            f"{file} is no plan file, is damaged, or is for run, report, bench and plan show, which "
            f"take plans; `fmtprop compile MODEL -o {file}` writes one"
        )
    raise ImportModelError(f"{file}: unknown kind of file {kind!r}; known: {_KINDS}")


def save(graph: Graph, path: str | Path) -> None:
    """Write a graph to a graph file or as an ONNX model; large weights go to another file in the same folder.

    Parameters
    ----------
    graph : Graph
        The graph; for ONNX, at any stage. Formats, implementations and reasons of a formatted graph are metadata of the
        nodes, which viewers such as Netron show; a reorder is an ``Identity``.
    path : str or Path
        The file; must end in ``.json`` or ``.onnx``.

    Raises
    ------
    ImportModelError
        Not a graph, another extension, a directory that does not exist, or the file system refused.
    GraphError
        The graph cannot be written, such as after its constants were released by compilation.
    UnsupportedOpError
        ONNX cannot express a node; the message names it.
    """
    if not isinstance(graph, Graph):
        raise ImportModelError(
            f"only a Graph can be saved, got {type(graph).__name__}; import the model with "
            "fmtprop.from_torch(module, example_inputs) and save the graph"
        )
    file = _path(path)
    kind = file.suffix.lower()
    if kind not in (".json", ".onnx"):
        raise ImportModelError(
            f"{file}: graphs are saved as .json or .onnx, not {file.suffix or 'without extension'!r}"
        )
    try:
        (save_onnx if kind == ".onnx" else graph_file.save)(graph, file)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ImportModelError(f"{file} cannot be written: {reason}; save it to another place") from error


def _refuse_shapes(shapes: object, name: str) -> None:
    if shapes:
        raise ImportModelError(f"shapes are for ONNX models with dynamic axes; {name} has its own: leave them out")


def _path(path: object) -> Path:
    try:
        return path_of(path)
    except OSError as error:
        raise ImportModelError(f"{error.strerror}; files are {_KINDS}") from error


def _builtin(name: str) -> Path:
    try:
        return builtin_path(name)
    except GraphError as error:
        raise ImportModelError(f"{error}; a file's name ends in .json, .pt2 or .onnx") from error


def _check_file(file: Path) -> None:
    try:
        check_readable(file)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not file.is_symlink():
            raise ImportModelError(f"{file} does not exist; give a file that does: {_KINDS}") from error
        raise ImportModelError(f"{file} cannot be read: {error.strerror}; give a file that can: {_KINDS}") from error
    if file.stat().st_size == 0:
        raise ImportModelError(f"{file} is empty; it was probably not written to the end")


def _load_exported(file: Path) -> Graph:
    from fmtprop.capture.torch_export import from_torch

    return from_torch(open_exported(file))


def open_exported(file: Path) -> ExportedProgram:
    """Read an exported program, after a check that it executes no code."""
    import torch

    from fmtprop.archive.pt2_safety import check_archive

    _check_file(file)
    if not zipfile.is_zipfile(file):
        raise ImportModelError(f"{file} is not a .pt2 archive (not a zip file); write it with torch.export.save")
    check_archive(file)
    log: list[LogRecord] = []
    try:
        with held_back() as log:
            if file.suffix == ".pt2":
                return torch.export.load(file)
            with file.open("rb") as opened:  # torch accepts any file, but warns about a name such as m.PT2
                return torch.export.load(opened)
    except Exception as error:  # torch builds objects from the file, and may raise anything
        raise ImportModelError(
            f"{file}: torch {torch.__version__} cannot load this archive: {reason(error, log)}. It may be damaged or "
            "written by another version of torch: export the model again with this one"
        ) from error
