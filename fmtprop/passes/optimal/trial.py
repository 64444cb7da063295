"""What nodes cost that are replaced by several: each distinct one that can be is solved by itself, beforehand."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.expand import ExpandingPass
from fmtprop.passes.formats import channels_last
from fmtprop.passes.norm_as_convolution import NormAsConvolution
from fmtprop.passes.optimal.assign import OptimalFormats
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.target import Candidate
from fmtprop.passes.winograd import Winograd

__all__ = ["expansions"]

#: op -> how its nodes become several
_REWRITES: Mapping[str, type[ExpandingPass]] = {
    "convolution": Winograd,
    "batch_normalization": NormAsConvolution,
}

#: channels and rows below which filtering has nothing to gain: such convolutions are not even asked about
_CHANNELS, _HEIGHT = 16, 4


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
    alike = _alike(graph, winograd)
    operands = [_add_twins(trial, boundary, graph, node, number) for number, (node, *_) in enumerate(alike)]
    if not alike:
        return {}
    rewritten = trial
    for op, rewrite in _REWRITES.items():
        names = [_expanded(number) for number, (node, *_) in enumerate(alike) if node.op == op]
        rewritten = rewrite(names).run(rewritten)
    formatted, _ = replace(solver, boundary=boundary, pins={}).solve(rewritten)
    found = {}
    for number, nodes in enumerate(alike):
        result = formatted.inputs(f"{_expanded(number)}.out")["src"]
        candidate = Composition(formatted, operands[number], result).candidate(_REWRITES[nodes[0].op].name)
        found.update({node.name: candidate for node in nodes})
    return found


def _alike(graph: Graph, winograd: bool) -> list[list[Node]]:
    """Return the nodes that can run as several, those together that cost the same."""
    convolutions = [node for node in Winograd().eligible(graph) if _is_large(graph, node)] if winograd else []
    alike: dict[Hashable, list[Node]] = {}
    for node in (*convolutions, *NormAsConvolution().eligible(graph)):
        types = tuple((name, graph.type_of(value)) for name, value in graph.inputs(node.name).items())
        tail = tuple(post_op.attrs for post_op in node.post_ops)
        alike.setdefault((node.op, node.attrs, tail, types, node.results), []).append(node)
    return list(alike.values())


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
