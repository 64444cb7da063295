"""Check that example inputs fit a model with known shapes.

This module owns the check for graphs; the importer checks exported programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fmtprop.errors import ImportModelError, InputError
from fmtprop.ir.graph import Graph
from fmtprop.ir.structure import flatten_arguments
from fmtprop.ir.tensors import torch_dtype
from fmtprop.system.printable import counted


def check_examples(graph: Graph, example_inputs: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse example inputs that do not fit a graph.

    `example_inputs`: a tensor or the positional arguments; None is always fine.

    >>> from fmtprop.ir import TensorType
    >>> g = Graph("tiny")
    >>> g.output(g.input("x", TensorType((1, 8))))
    >>> check_examples(g, torch.ones(1, 8))
    """
    if example_inputs is None and not kwargs:
        return
    args = () if example_inputs is None else example_inputs
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    try:
        given = flatten_arguments(graph.structure, args, kwargs or {})
    except InputError as error:
        raise ImportModelError(f"example_inputs do not fit {graph.name}: {error}; or leave them out") from error
    if len(given) != len(graph.input_nodes):
        names = ", ".join(node.name for node in graph.input_nodes)
        raise ImportModelError(
            f"{graph.name} takes {counted(len(graph.input_nodes), 'input')} ({names}), example_inputs has "
            f"{len(given)}; leave it out, a graph already has its shapes"
        )
    for node, example in zip(graph.input_nodes, given, strict=True):
        type_ = node.results[0]
        expected = (type_.dims, torch_dtype(type_.dtype))
        if _looks(example) != expected:
            shown = _looks(example) or f"a {type(example).__name__}"
            raise ImportModelError(
                f"input {node.name}: {graph.name} was imported for {_words(expected)}, the example is {_words(shown)}; "
                "import the model again with this shape, or leave example_inputs out"
            )


def _looks(example: object) -> tuple[tuple[int, ...], torch.dtype] | None:
    # nested tensors have no shape
    if not isinstance(example, torch.Tensor) or example.is_nested:
        return None
    return tuple(example.shape), example.dtype


def _words(looks: tuple[tuple[int, ...], torch.dtype] | str) -> str:
    return looks if isinstance(looks, str) else f"{looks[1]} {looks[0]}"
