"""What nodes cost that are replaced by several: each distinct one that can be is solved by itself, beforehand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import replace
from typing import Protocol

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.formats import channels_last
from fmtprop.passes.norm_as_convolution import NormAsConvolution
from fmtprop.passes.optimal.assign import OptimalFormats
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.target import Candidate
from fmtprop.passes.winograd import Winograd

__all__ = ["expansions"]

#: channels and rows below which filtering has nothing to gain: such convolutions are not even asked about
_CHANNELS, _HEIGHT = 16, 4


class _Rewrite(Protocol):
    """A pass that replaces nodes by several, the last of which has the node's name."""

    def run(self, graph: Graph) -> Graph: ...
    def eligible(self, graph: Graph) -> list[Node]: ...


def expansions(graph: Graph, solver: OptimalFormats, *, winograd: bool = True) -> dict[str, Candidate]:
    """Return how nodes of a graph run as several, by node name: in channels-last formats, in which all views are free.

    Parameters
    ----------
    graph : Graph
        A normal graph.
    solver : OptimalFormats
        Whom to ask. The nodes themselves are put to it too: where costs are measured, both are in the same rounds.
    winograd : bool
        Whether convolutions may be filtered.
    """
    trial, boundary = Graph(graph.name), dict[str, MemoryDesc]()
    numbered: list[tuple[str, dict[str, Value], list[Node]]] = []
    expanded: dict[Callable[[Collection[str]], _Rewrite], list[str]] = {}
    for impl, rewrite, nodes in _distinct(graph, winograd):
        expanded.setdefault(rewrite, []).append(_expanded(len(numbered)))
        operands = _add_twins(trial, boundary, graph, nodes[0], len(numbered))
        numbered.append((impl, operands, nodes))
    if not numbered:
        return {}
    rewritten = trial
    for rewrite, names in expanded.items():
        rewritten = rewrite(names).run(rewritten)
    formatted, _ = replace(solver, boundary=boundary, pins={}).solve(rewritten)
    found = {}
    for number, (impl, operands, nodes) in enumerate(numbered):
        result = formatted.inputs(f"{_expanded(number)}.out")["src"]
        candidate = Composition(formatted, operands, result).candidate(impl)
        found.update({node.name: candidate for node in nodes})
    return found


def _distinct(graph: Graph, winograd: bool) -> Iterator[tuple[str, Callable[[Collection[str]], _Rewrite], list[Node]]]:
    """Yield what each distinct node can be replaced by, and all nodes that are like it."""
    alike: dict[Hashable, list[Node]] = {}
    convolutions = [node for node in Winograd().eligible(graph) if _is_large(graph, node)] if winograd else []
    norms = NormAsConvolution().eligible(graph)
    for node in (*convolutions, *norms):
        types = tuple((name, graph.type_of(value)) for name, value in graph.inputs(node.name).items())
        tail = tuple(post_op.attrs for post_op in node.post_ops)
        alike.setdefault((node.op, node.attrs, tail, types, node.results), []).append(node)
    for nodes in alike.values():
        if nodes[0].op == "convolution":
            yield "winograd", Winograd, nodes
        else:
            yield "depthwise", NormAsConvolution, nodes


def _is_large(graph: Graph, node: Node) -> bool:
    outputs, inputs, *_ = graph.type_of(graph.inputs(node.name)["weights"]).dims
    return min(outputs, inputs) >= _CHANNELS and node.results[0].dims[2] >= _HEIGHT


def _add_twins(
    trial: Graph, boundary: dict[str, MemoryDesc], graph: Graph, node: Node, number: int
) -> dict[str, Value]:
    """Add a node twice, once to be replaced; return its operands."""
    inputs = {}
    for operand, value in graph.inputs(node.name).items():
        type_, name = graph.type_of(value), f"{operand}_{number}"
        if operand == "src":
            inputs[operand] = trial.input(name, type_)
            boundary[name] = channels_last(MemoryDesc(type_.dims, type_.dtype))
        else:
            inputs[operand] = trial.constant(name, type_, graph.constants[value.node])
    for name in (f"direct_{number}", _expanded(number)):
        (result,) = trial.add(node.with_(name=name), inputs)
        trial.output(result, f"{name}.out")
        boundary[f"{name}.out"] = channels_last(MemoryDesc(node.results[0].dims, node.results[0].dtype))
    return inputs


def _expanded(number: int) -> str:
    return f"expanded_{number}"
