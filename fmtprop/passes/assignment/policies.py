"""The policies of format assignment as data: the formats to request at a node, in order.

A policy answers one question and changes nothing: given a node and the formats of its operands, which requests should
be tried? :mod:`fmtprop.passes.assignment.assign` sends them to the target and builds the graph.

===========  ==========================================================================================
``plain``    every tensor stays row-major: the baseline of every report
``naive``    `any` at each compute op, back to plain after it: a program without propagation
``propagate``  the propagation table of the oneDNN specification (SPEC M9), greedily in topological order
===========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from fmtprop.ir import Category, Node, OpDef, Role, port, ports
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import dense, like, plain, unspecified, usual
from fmtprop.passes.target import free_results

#: cost of a reorder in seconds, None if no reorder exists
ReorderCost = Callable[[MemoryDesc, MemoryDesc], "float | None"]


@dataclass(frozen=True)
class Option:
    """One request to try."""

    #: format of each operand and result, concrete or `any`
    request: Mapping[str, MemoryDesc]
    reason: str
    #: seconds of the reorders before the node
    cost: float = 0.0


@dataclass(frozen=True)
class Question:
    """The question to a policy."""

    node: Node
    declaration: OpDef
    given: Mapping[str, MemoryDesc]
    reorder_cost: ReorderCost
    results: Mapping[str, MemoryDesc] = field(init=False)
    roles: Mapping[str, Role] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", free_results(self.node))
        object.__setattr__(self, "roles", {one.name: one.role for one in ports(self.node, self.given)})

    def activations(self) -> list[str]:
        """Return the operands with activations, without post-op operands and parameters."""
        return [name for name, role in self.roles.items() if role is Role.SOURCE]

    def workspaces(self) -> list[str]:
        """Return the operands that the forward pass wrote for this node alone."""
        return [name for name, role in self.roles.items() if role is Role.WORKSPACE]

    def is_parameter(self, name: str) -> bool:
        """Whether an operand is a learned tensor."""
        return self.roles[name] is Role.PARAMETER

    def is_gradient(self, name: str) -> bool:
        """Whether an operand is the gradient of a result."""
        return port(self.node, name).declared.arg.startswith("DIFF_")

    def fill(self, chosen: Mapping[str, MemoryDesc]) -> dict[str, MemoryDesc]:
        """Return a full request: ``chosen``, and defaults for the other operands and results."""
        request = {}
        for name, desc in self.given.items():
            if name in chosen:
                request[name] = chosen[name]
            elif self.is_parameter(name) and desc.ndim < 2:
                request[name] = plain(desc)
            else:
                request[name] = unspecified(desc)
        return {**request, **self.results, **{k: v for k, v in chosen.items() if k in self.results}}

    def price(self, chosen: Mapping[str, MemoryDesc]) -> float | None:
        """Return the cost of converting the operands to these formats; None if one cannot be converted."""
        total = 0.0
        for name, desc in chosen.items():
            if name in self.given:
                cost = self.reorder_cost(self.given[name], desc)
                if cost is None:
                    return None
                total += cost
        return total


Policy = Callable[[Question], Iterator[Option]]


def plain_policy(question: Question) -> Iterator[Option]:
    """Ask for row-major everywhere; weights are packed only if plain ones have no optimized implementation."""
    activations = {name: plain(desc) for name, desc in question.given.items() if not question.is_parameter(name)}
    results = {name: plain(desc) for name, desc in question.results.items()}
    everything = {name: plain(desc) for name, desc in question.given.items()}
    yield Option(question.fill({**everything, **results}), "the policy asks for row-major")
    if len(activations) != len(everything):
        yield Option(
            question.fill({**activations, **results}),
            "the policy asks for row-major; weights are packed: plain ones have no fast implementation",
        )


def naive_policy(question: Question) -> Iterator[Option]:
    """Ask for `any` at compute ops, and for row-major at the others."""
    if question.declaration.category is Category.COMPUTE:
        yield from _compute(question)
    else:
        yield from plain_policy(question)


def propagate_policy(question: Question) -> Iterator[Option]:
    """Ask for the formats of the propagation table; then, to avoid reference code, for those of the least cost."""
    category = question.declaration.category
    if category is Category.COMPUTE:
        yield from _compute(question)
    elif category is Category.BANDWIDTH:
        data = {name: question.given[name] for name in question.activations() if not question.is_gradient(name)}
        if 0 < len(data) < len(question.activations()):
            yield Option(question.fill(data), "bandwidth-limited: data as they are, gradients `any`")
        yield from _from_sources(question, "bandwidth-limited: src as its producer gives it, dst `any`")
    else:
        yield from _from_sources(question, "several sources: the producers' format that costs least, dst `any`")


def _compute(question: Question) -> Iterator[Option]:
    yield Option(question.fill({}), "compute-intensive: asked `any`")
    (src, *others) = question.activations()
    formats = usual(question.given[src])
    for desc in formats:
        yield Option(question.fill({src: desc}), "`any` has only a reference implementation: tried the usual formats")
    for desc in formats:
        chosen = {name: plain(question.given[name]) for name in others}
        result = {name: f for name, r in question.results.items() if (f := like(r, desc)) is not None}
        yield Option(
            question.fill({src: desc, **chosen, **result}), "`any` has no implementation: tried the usual formats"
        )


def _from_sources(question: Question, rule: str) -> Iterator[Option]:
    sources = question.activations()
    full = max((question.given[name].dims for name in sources), key=prod, default=())
    voters = [name for name in sources if question.given[name].dims == full] or sources
    offers = [dense(question.given[name]) for name in voters if question.given[name].kind == "blocked"]
    offers += usual(question.given[voters[0]])
    options: list[tuple[float, int, int, dict[str, MemoryDesc]]] = []
    for rank, offer in enumerate(dict.fromkeys(offers)):
        for chosen in _agreements(question, sources, offer):
            cost = question.price(chosen)
            if cost is not None:
                options.append((cost, rank, len(options), chosen))
    # unchanged, in case the op accepts them although they differ: slices of one format, a broadcast
    as_given = {name: question.given[name] for name in sources}
    agree = len({dense(desc).tag for desc in as_given.values()}) == 1
    if agree or len({desc.dims for desc in as_given.values()}) > 1:
        options.append((0.0, -1, -1, as_given))
    for cost, _, _, chosen in sorted(options, key=lambda option: option[:3]):
        note = "" if cost == 0.0 else f" ({cost * 1e6:.0f} us of reorders, the least of {len(options)} choices)"
        yield Option(question.fill(chosen), rule + note, cost)


def _agreements(question: Question, sources: list[str], offer: MemoryDesc) -> Iterator[dict[str, MemoryDesc]]:
    """Yield the ways to convert all sources to one format; smaller (broadcast) ones to it, or to row-major."""
    chosen = {name: like(question.given[name], offer) for name in sources}
    if all(desc is not None for desc in chosen.values()):
        yield {name: desc for name, desc in chosen.items() if desc is not None}
    if any(question.given[name].dims != offer.dims for name in sources):
        yield {
            name: desc
            if (desc := chosen[name]) is not None and desc.dims == offer.dims
            else plain(question.given[name])
            for name in sources
        }


#: by name; `optimal` is solved over the whole graph, by a separate pass
POLICIES: Mapping[str, Policy] = {
    "plain": plain_policy,
    "naive": naive_policy,
    "propagate": propagate_policy,
}
