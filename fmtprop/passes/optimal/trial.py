"""Costs of expansions: each distinct node that can be replaced by several nodes is solved separately beforehand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from fmtprop.ir import Choice, Graph, Node, Role, TensorType, Value, ports
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.tensors import Constant, torch_dtype
from fmtprop.ir.verify import Stage
from fmtprop.layout import DataType, FormatKind, MemoryDesc
from fmtprop.passes.assignment.formats import channels_last
from fmtprop.passes.base import Pipeline
from fmtprop.passes.optimal.assign import OptimalFormats
from fmtprop.passes.optimal.composition import Composition
from fmtprop.passes.optimal.variants import EXPANSIONS
from fmtprop.passes.target import Candidate, Request, Target, of_name
from fmtprop.passes.variants.expand import ExpandingPass, constant_behind
from fmtprop.passes.variants.winograd import Winograd

#: most distinct nodes to try, those with the most work first: each takes about 30 ms, and most others gain little
MOST_DISTINCT = 96

#: convolutions with fewer channels or rows cannot gain by filtering and are not tried
CHANNELS, HEIGHT = 16, 4


def expansions(
    graph: Graph, solver: OptimalFormats, *, winograd: bool = True, spreads: bool = False, with_originals: bool = True
) -> dict[str, list[Candidate]]:
    """Return the expansions of a graph's nodes by name, in channels-last formats, in which all views are free.

    `spreads`: whether this is so for nodes that must keep NaN and infinities: it makes NaN of an infinity, and of more
    results, but loses none.
    """
    rewrites = [one.rewrite for one in EXPANSIONS if winograd or not isinstance(one.rewrite, Winograd)]
    alike = _alike(graph, rewrites, spreads)
    if not alike:
        return {}
    trial, boundary = Graph(graph.name), dict[str, MemoryDesc]()
    operands = [_add(trial, boundary, graph, one.nodes[0], number, with_originals) for number, one in enumerate(alike)]
    steps = []
    for rewrite in dict.fromkeys(one.rewrite for one in alike):  # each rewrite makes a new graph
        names = tuple(_expanded(number) for number, one in enumerate(alike) if one.rewrite == rewrite)
        steps.append(replace(rewrite, names=names))
    # never run, and thus no normal graph: an original's sum adds to an input
    rewritten = Pipeline(tuple(steps), Stage.IMPORTED).run(trial)
    alone = Graph(graph.name)  # an empty baseline: no comparison with `propagate`
    originals = frozenset(_original(number) for number in range(len(alike))) if with_originals else frozenset()
    setting = replace(solver.setting, target=_Unblocked(solver.setting.target, originals), boundary=boundary)
    solver = replace(solver, setting=setting, pins={})
    formatted, _ = next(solver.solutions(rewritten, {}, baseline=alone))
    found: dict[str, list[Candidate]] = {}
    for number, one in enumerate(alike):
        result = formatted.inputs(f"{_expanded(number)}.out")["src"]
        composition = Composition(formatted, operands[number], result, one.growth)
        candidate = composition.candidate(one.rewrite.name)
        for node in one.nodes:
            found.setdefault(node.name, []).append(candidate)
    return found


class _Unblocked:
    """A target that offers only unblocked activations (views of blocked ones cost copies), except to some nodes."""

    def __init__(self, target: Target, exempt: frozenset[str]) -> None:
        self._target, self._exempt = target, exempt
        self.name, self.reorder_cost = target.name, target.reorder_cost

    def candidates(self, node: Node, request: Request) -> Iterator[Candidate]:
        """Yield the target's candidates that read and write plain formats; weights may have any."""
        if node.op == "reorder" or node.name in self._exempt:
            yield from self._target.candidates(node, request)
            return
        activations = [one.name for one in ports(node, request) if one.role is not Role.PARAMETER]
        if node.op == "convolution" and FormatKind.ANY in (request["src"].kind, request["dst"].kind):
            return  # blocked, or the same answer as to the request for channels-last
        if not all(_is_unblocked(request[name]) for name in activations):
            return
        for candidate in self._target.candidates(node, request):
            read = [candidate.operands[name] for name in activations if name in candidate.operands]
            if all(map(_is_unblocked, (*read, *candidate.results))):
                yield candidate

    def named(self, node: Node, request: Request, choice: Choice) -> Iterator[Candidate]:
        """Yield the candidates with a choice's name."""
        return of_name(self.candidates(node, request), choice)

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> list[MemoryDesc]:
        """Return the formats to try: only channels-last if no node is exempt, since few views of others are free."""
        formats = self._target.formats(dims, dtype)
        if self._exempt:
            return list(formats)
        return [desc for desc in formats if desc == channels_last(desc)] or list(filter(_is_unblocked, formats))


def _is_unblocked(desc: MemoryDesc) -> bool:
    return desc.kind is FormatKind.ANY or desc.is_plain


class _Alike(NamedTuple):
    """A rewrite of equal nodes, with equal costs."""

    rewrite: ExpandingPass
    growth: float
    nodes: list[Node]


def _alike(graph: Graph, rewrites: Sequence[ExpandingPass], spreads: bool) -> list[_Alike]:
    """Return the nodes that can be expanded, those with the most work."""
    alike: dict[Hashable, _Alike] = {}
    for rewrite in rewrites:
        for node in rewrite.eligible(graph):
            # in an expansion, infinities become NaN and spread to more elements
            if node.exact and not (spreads and isinstance(rewrite, Winograd)):
                continue
            growth = rewrite.growth(graph, node)
            if isinstance(rewrite, Winograd) and not _is_large(graph, node):
                continue
            inputs = graph.inputs(node.name)
            types = [(key, graph.type_of(one), constant_behind(graph, one) is not None) for key, one in inputs.items()]
            tail = tuple((post_op.op, post_op.attrs, post_op.operand) for post_op in node.post_ops)
            kind = (rewrite, node.op, node.attrs, tail, tuple(types), node.results)
            alike.setdefault(kind, _Alike(rewrite, growth, [])).nodes.append(node)
    work = {kind: len(one.nodes) * _work(graph, one.nodes[0]) for kind, one in alike.items()}
    heaviest = set(sorted(work, key=lambda kind: -work[kind])[:MOST_DISTINCT])
    return [one for kind, one in alike.items() if kind in heaviest]


def _work(graph: Graph, node: Node) -> int:
    """Return the number of products of a convolution, or of elements of another node's result."""
    weights = graph.inputs(node.name).get("weights")
    # summed channels and the window: the axes after groups, if any, and the result's channels
    summed = graph.type_of(weights).dims[1 - node.results[0].ndim :] if weights is not None else ()
    return node.results[0].size * prod(summed)


def _is_large(graph: Graph, node: Node) -> bool:
    outputs, inputs, *_ = graph.type_of(graph.inputs(node.name)["weights"]).dims
    return min(outputs, inputs) >= CHANNELS and node.results[0].dims[2] >= HEIGHT


def _add(
    trial: Graph, boundary: dict[str, MemoryDesc], graph: Graph, node: Node, number: int, with_originals: bool
) -> dict[str, Value]:
    """Add a node that is to be replaced, and maybe an equal one that is not; return their operands."""
    inputs = {}
    learned = {one.name for one in ports(node, graph.inputs(node.name)) if one.role is Role.PARAMETER}
    for operand, value in graph.inputs(node.name).items():
        type_, name = graph.type_of(value), f"{operand}_{number}"
        constant = constant_behind(graph, value)
        if constant is not None:
            inputs[operand] = trial.constant(name, type_, _converted(graph.constants[constant.name], type_))
        else:
            inputs[operand] = trial.input(name, type_)
            desc = MemoryDesc(type_.dims, type_.dtype)
            boundary[name] = desc if operand in learned else channels_last(desc)
    for name in (_original(number), _expanded(number)) if with_originals else (_expanded(number),):
        (result,) = trial.add(node.with_(name=name), inputs)
        trial.output(result, f"{name}.out")
        boundary[f"{name}.out"] = channels_last(MemoryDesc(node.results[0].dims, node.results[0].dtype))
    return inputs


def _converted(data: Constant, type_: TensorType) -> Constant:
    """Return a constant's numbers in a data type; a seed gives them in any."""
    dtype = torch_dtype(type_.dtype)
    if isinstance(data, Initialiser):
        return data
    if isinstance(data, Deferred):
        return data if data.type_ == type_ else data.viewed(lambda tensor: tensor.to(dtype), type_, data.strides)
    return data.to(dtype)


def _original(number: int) -> str:
    return f"direct_{number}"


def _expanded(number: int) -> str:
    return f"expanded_{number}"
