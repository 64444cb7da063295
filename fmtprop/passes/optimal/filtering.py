"""What Winograd's filtering costs: each distinct convolution that it can compute is solved by itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.layout import MemoryDesc
from fmtprop.passes.optimal.assign import OptimalFormats
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.target import Candidate
from fmtprop.passes.winograd import Winograd

__all__ = ["filterings"]

_CHANNELS_LAST = "acdb"

#: channels and rows below which there is nothing to gain: such convolutions are not even asked about
_CHANNELS, _HEIGHT = 16, 4


def filterings(graph: Graph, solver: OptimalFormats) -> dict[str, Candidate]:
    """Return how convolutions of a graph run by Winograd's filtering, by node name.

    Parameters
    ----------
    graph : Graph
        A normal graph.
    solver : OptimalFormats
        Whom to ask. The direct convolutions are put to it too: where costs are measured, both are in the same rounds.
    """
    alike: dict[Hashable, list[Node]] = {}
    for node in Winograd().eligible(graph):
        if not _is_large(graph, node):
            continue
        types = tuple((name, graph.type_of(value)) for name, value in graph.inputs(node.name).items())
        tail = tuple(post_op.attrs for post_op in node.post_ops)
        alike.setdefault((node.attrs, tail, types, node.results), []).append(node)
    if not alike:
        return {}
    trial = Graph(graph.name)
    boundary: dict[str, MemoryDesc] = {}
    operands = [
        _add_twins(trial, boundary, graph, node, number) for number, (node, *_) in enumerate(alike.values())
    ]  # fmt: skip
    rewritten = Winograd([_filtered(number) for number in range(len(alike))]).run(trial)
    formatted, _ = replace(solver, boundary=boundary, pins={}).solve(rewritten)
    found = {}
    for number, nodes in enumerate(alike.values()):
        result = formatted.inputs(f"{_filtered(number)}.out")["src"]
        candidate = Composition(formatted, operands[number], result).candidate("winograd")
        found.update({node.name: candidate for node in nodes})
    return found


def _is_large(graph: Graph, node: Node) -> bool:
    outputs, inputs, *_ = graph.type_of(graph.inputs(node.name)["weights"]).dims
    return min(outputs, inputs) >= _CHANNELS and node.results[0].dims[2] >= _HEIGHT


def _add_twins(
    trial: Graph, boundary: dict[str, MemoryDesc], graph: Graph, node: Node, number: int
) -> dict[str, Value]:
    """Add a convolution twice, once to be rewritten; return its operands."""
    inputs = {}
    for operand, value in graph.inputs(node.name).items():
        type_, name = graph.type_of(value), f"{operand}_{number}"
        if operand == "src":
            inputs[operand] = trial.input(name, type_)
            boundary[name] = MemoryDesc(type_.dims, type_.dtype, tag=_CHANNELS_LAST)
        else:
            inputs[operand] = trial.constant(name, type_, graph.constants[value.node])
    for name in (f"direct_{number}", _filtered(number)):
        (result,) = trial.add(node.with_(name=name), inputs)
        trial.output(result, f"{name}.out")
        boundary[f"{name}.out"] = MemoryDesc(node.results[0].dims, node.results[0].dtype, tag=_CHANNELS_LAST)
    return inputs


def _filtered(number: int) -> str:
    return f"filtered_{number}"
