"""Checks of numbers in a program: a graph has no numbers that depend on data, so it cannot make them.

Owns which calls belong to such checks alone, and their removal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import fx
from torch._ops import OpOverload

from fmtprop.frontends.fx_import import origin_of


def drop_checks(graph: fx.Graph) -> None:
    """Remove the numbers that are read from tensors for run-time checks alone, and these checks.

    Parameters
    ----------
    graph : torch.fx.Graph
        A functional program. It is changed.

    Warns
    -----
    UserWarning
        A check was removed: once for each module.

    Notes
    -----
    A number that nothing reads is removed, too. A number that anything else reads stays, so the program is refused.
    """
    found: dict[str, None] = {}
    for node in [node for node in graph.nodes if _reads_a_number(node)]:
        readers = list(_readers(node))
        if all(_is_check(reader) or not _makes_tensors(reader) for reader in readers):
            if readers:
                found[origin_of(node) or "the model"] = None
            for reader in reversed(list(graph.nodes)):
                if reader is node or reader in readers:
                    graph.erase_node(reader)
    for place in found:
        warnings.warn(f"{place}: run-time check of a number is left out of the graph", UserWarning, stacklevel=2)


def _reads_a_number(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls that depend on a value."""
    waiting, seen = list(node.users), set()
    while waiting:
        if (reader := waiting.pop()) not in seen:
            seen.add(reader)
            yield reader
            waiting += reader.users


def _is_check(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def _makes_tensors(node: fx.Node) -> bool:
    """Return whether a node is an output, or a call of an operator: other calls compute with numbers."""
    return node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase)
