"""Numbers that a program reads from tensors: a graph has no numbers that depend on data, so it cannot make them.

Owns which calls belong to checks of such numbers alone, and their removal; and positions that stay tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import fx

from fmtprop.capture.fx_import import origin_of
from fmtprop.capture.pytorch import to_number
from fmtprop.capture.torch_call import UNCHECKED
from fmtprop.ops.pytorch import OperatorBase, OpOverload

#: where a view begins in memory: PyTorch checks it of its own accord, and an indexing checks its positions
_START = torch.ops.aten.sym_storage_offset.default


def drop_checks(graph: fx.Graph) -> None:
    """Remove the numbers that are read from tensors for run-time checks alone, and these checks.

    Warns UserWarning if a check was removed: once for each module.

    A number that nothing reads is removed, too. A number that anything else reads stays, so the program is refused.
    """
    found: dict[str, None] = {}
    for node in [node for node in graph.nodes if reads_a_number(node)]:
        readers = list(_readers(node))
        if all(_is_check(reader) or not _makes_tensors(reader) for reader in readers):
            if readers and node.target is not _START and _reads_inputs(node):
                found[origin_of(node) or "the model"] = None
            for reader in reversed(list(graph.nodes)):
                if reader is node or reader in readers:
                    graph.erase_node(reader)
    for place in found:
        message = f"{place}: run-time check of a number is left out of the graph: {UNCHECKED}"
        warnings.warn(message, UserWarning, stacklevel=2)


def index_by_tensors(graph: fx.Graph) -> None:
    """Replace each selection at a number that was read from a tensor by an indexing with the tensor."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target not in (aten.select.int, aten.select_scatter.default):
            continue
        source, *written, axis, number = node.args
        if not isinstance(number, fx.Node) or not reads_a_number(number):
            continue
        (position,) = number.args
        places = [None] * (axis % source.meta["val"].ndim) + [position]
        made = aten.index_put.default if written else aten.index.Tensor
        with graph.inserting_before(node):
            indexed = graph.call_function(made, (source, places, *written))
        indexed.meta = {**node.meta}
        node.replace_all_uses_with(indexed)
        graph.erase_node(node)


def reads_a_number(node: fx.Node) -> bool:
    """Return whether a call makes a Python number of a tensor."""
    return node.target in (torch.ops.aten.item.default, to_number, _START)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls that depend on a value."""
    waiting, seen = list(node.users), set()
    while waiting:
        if (reader := waiting.pop()) not in seen:
            seen.add(reader)
            yield reader
            waiting += reader.users


def _reads_inputs(node: fx.Node) -> bool:
    """Return whether a call depends on inputs, parameters or constants."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder":
            return True
        waiting += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False


def _is_check(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def _makes_tensors(node: fx.Node) -> bool:
    """Return whether a node is an output, or a call of an operator: other calls compute with numbers."""
    return node.op != "call_function" or isinstance(node.target, OperatorBase)
