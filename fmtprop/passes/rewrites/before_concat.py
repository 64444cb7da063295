"""Normalizations, activations and roundings of joined tensors move to what made the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch

from fmtprop.ir import Category, Graph, Node, Value, opdef
from fmtprop.ops import BatchNorm, Concat, Eltwise, FakeQuantize
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import is_constant, only_reader, viewed_constant
from fmtprop.passes.precision.mark_grids import is_rounded

#: tensors that are rounded one by one: more of them are a dense block, whose parts are read by many concats
_MOST_ROUNDED = 4


@dataclass(frozen=True)
class BeforeConcat(Pass):
    """Exchange a concat of products with the batch normalization or the function behind it.

    Each part then has a normalization, which is folded into its product, and a function, which the product absorbs.
    Networks that mix kernels of several sizes join them before they normalise. A rounding behind a concat of a few
    rounded tensors is exchanged with it, too: then the concat has one grid, and moves bytes.

    Requires recognised functions; before batch normalizations are folded. Ensures that no concat of compute-intensive
    results alone, which nothing else reads, is only read by a function; or, if it joins channels, by a batch
    normalization with constant parameters.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        #: nodes that moved, behind products
        moved: set[str] = set()
        for node in graph.nodes():
            if node.is_boundary or node.post_ops or not isinstance(node.attrs, Eltwise | BatchNorm | FakeQuantize):
                continue
            concat = graph.node(graph.inputs(node.name)["src"].node)
            if isinstance(node.attrs, FakeQuantize):
                if _is_of_roundings(graph, concat, node):
                    _exchange(graph, concat, node)
            elif _is_of_products(graph, concat, node, moved) and _fits(graph, concat, node):
                moved.update(_exchange(graph, concat, node))
        return graph


def _is_of_products(graph: Graph, concat: Node, reader: Node, moved: set[str]) -> bool:
    """Return whether a node is a concat that only one node reads, of products that only the concat reads."""
    if not isinstance(concat.attrs, Concat) or only_reader(graph, Value(concat.name)) != reader:
        return False
    for value in graph.inputs(concat.name).values():
        source = graph.node(value.node)
        if source.is_boundary or only_reader(graph, value) is None:
            return False
        declaration = opdef(source.op)
        if source.name not in moved and not (declaration.category is Category.COMPUTE and declaration.absorbs.wanted):
            return False
    return True


def _is_of_roundings(graph: Graph, concat: Node, reader: Node) -> bool:
    """Return whether a node is a concat that only one node reads, of a few tensors on grids."""
    if not isinstance(concat.attrs, Concat) or only_reader(graph, Value(concat.name)) != reader:
        return False
    sources = graph.inputs(concat.name).values()
    return len(sources) <= _MOST_ROUNDED and all(is_rounded(graph, value) for value in sources)


def _fits(graph: Graph, concat: Node, node: Node) -> bool:
    if concat.results[0].dtype is not node.results[0].dtype or node.exact:
        return False
    parameters = {name: value for name, value in graph.inputs(node.name).items() if name != "src"}
    along_channels = isinstance(concat.attrs, Concat) and concat.attrs.axis == 1
    return not parameters or (along_channels and all(is_constant(graph, value) for value in parameters.values()))


def _exchange(graph: Graph, concat: Node, node: Node) -> list[str]:
    """Add a node for each part; the concat of these takes the node's place. Return their names."""
    sources, inputs = graph.inputs(concat.name), graph.inputs(node.name)
    axis = concat.attrs.axis if isinstance(concat.attrs, Concat) else 0
    ends = list(accumulate(graph.type_of(value).dims[axis] for value in sources.values()))
    joined: dict[str, Value] = {}
    for (name, value), end in zip(sources.items(), ends, strict=True):
        type_ = graph.type_of(value)
        if isinstance(node.attrs, FakeQuantize) and graph.node(value.node).attrs == node.attrs:
            joined[name] = value
            continue
        operands = _sliced(graph, node, inputs, end - type_.dims[axis], end)
        part = node.with_(name=graph.fresh_name(f"{node.name}.part"), results=(type_,))
        (joined[name],) = graph.insert(part, {**operands, "src": value}, before=concat.name)
    graph.set_inputs(concat.name, joined)
    graph.replace_uses(Value(node.name), Value(concat.name))
    graph.remove(node.name)
    return [value.node for value in joined.values()]


def _sliced(graph: Graph, node: Node, inputs: Mapping[str, Value], start: int, end: int) -> dict[str, Value]:
    """Return the parameters of some channels."""

    def of_channels(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[start:end]

    learned = {name: value for name, value in inputs.items() if name != "src"}
    return {name: viewed_constant(graph, value, of_channels, node, node.origin) for name, value in learned.items()}
