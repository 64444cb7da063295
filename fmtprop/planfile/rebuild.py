"""The implementations that the choices of a plan file name: each target is asked again, in the same formats.

Owns the search for the same implementation. Decides nothing: where a target offers no such one, the plan does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from fmtprop.errors import PlanError
from fmtprop.ir import Choice, Graph, Node, result_names
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.formats import unspecified
from fmtprop.passes.target import Candidate
from fmtprop.planfile.descs import is_asked
from fmtprop.targets.executable import Implementation, Provider


class NotOfferedError(PlanError):
    """A target does not offer what a node of a plan runs by."""


def is_built(node: Node) -> bool:
    """Return whether a node needs no implementation, or has one."""
    handle = node.choice.handle if node.choice is not None else None
    return handle is None or isinstance(handle, Implementation)


def rebuild(graph: Graph, target: Provider, fallback: Provider, names: Collection[str]) -> Graph:
    """Return a graph of a plan file in which some nodes have their implementations.

    Raises NotOfferedError if a target has no such implementation here.
    """
    return _Rebuilding(target, fallback).run(graph, names)


class _Rebuilding:
    def __init__(self, target: Provider, fallback: Provider) -> None:
        self._target, self._fallback = target, fallback
        #: node without its name, and its choice -> the answer to equal nodes
        self._known: dict[object, Candidate] = {}
        #: what stands for an opaque format -> the format
        self._formats: dict[MemoryDesc, MemoryDesc] = {}

    def run(self, graph: Graph, names: Collection[str]) -> Graph:
        out = graph.copy()
        wanted = [node for node in graph.nodes() if node.name in names and not is_built(node)]
        # a node that packs an operand is asked for the format that the operand's reader told
        packing = {node.name for node in wanted if any(map(is_asked, node.descs))}
        for node in wanted:
            if node.name not in packing:
                out.replace(self._with_handle(node))
        if packing:
            for node in out.nodes():
                known = self._in_formats(node)
                out.replace(self._with_handle(known) if node.name in packing else known)
        return out

    def _with_handle(self, node: Node) -> Node:
        choice = node.choice
        if choice is None:
            return node
        tail = tuple((one.op, one.attrs, one.operands, one.bias) for one in node.post_ops)
        formats = tuple(choice.operands.items()), node.descs
        identity, grids = tuple(choice.handle.items()), tuple(node.grids.items())
        key = node.op, node.attrs, tail, node.exact, grids, node.results, formats, choice.target, choice.impl, identity
        if key not in self._known:
            self._known[key] = self._asked(node, choice)
        return node.with_(choice=replace(choice, handle=self._known[key].handle))

    def _asked(self, node: Node, choice: Choice) -> Candidate:
        target = self._fallback if choice.target == self._fallback.name else self._target
        for request in _requests(node, choice):
            for candidate in target.named(node, request, choice):
                if _is_same(node, choice, candidate):
                    self._learn(node, choice, candidate)
                    return candidate
            target.forget()  # implementations that differ in strides without effect alone: it keeps the first
        raise NotOfferedError(f"{node.label}: {choice.target} offers no {choice.impl} here that works in its formats")

    def _learn(self, node: Node, choice: Choice, candidate: Candidate) -> None:
        """Note the opaque formats of an answer."""
        pairs = [(desc, candidate.operands[name]) for name, desc in choice.operands.items()]
        for asked, found in (*pairs, *zip(node.descs, candidate.results, strict=True)):
            if is_asked(asked) and self._formats.setdefault(asked, found) != found:
                raise NotOfferedError(f"{node.label}: two nodes take an opaque operand in two formats")

    def _in_formats(self, node: Node) -> Node:
        known, choice = self._formats, node.choice
        descs = tuple(known.get(desc, desc) for desc in node.descs)
        if choice is not None:
            choice = replace(choice, operands={name: known.get(d, d) for name, d in choice.operands.items()})
        return node.with_(descs=descs, choice=choice)


def _requests(node: Node, choice: Choice) -> Iterator[Mapping[str, MemoryDesc]]:
    """Yield requests to which the answer may be the choice: some implementations take only formats of their own."""
    names = result_names(node)
    # choices are made by formats that begin at 0: oneDNN takes no post-op whose operand begins elsewhere, such as
    # x[:, 1:]; where it begins is added to the address
    given = {name: _any(desc) if is_asked(desc) else desc.at_start() for name, desc in choice.operands.items()}
    results = {name: _any(d) if is_asked(d) else d for name, d in zip(names, node.descs, strict=True)}
    free = {name: unspecified(desc) for name, desc in results.items()}
    wide = {name: _any(desc) if desc.ndim > 1 and name not in node.tail else desc for name, desc in given.items()}
    others = {name: desc if name in _sources(choice) else wide[name] for name, desc in given.items()}
    yield {**given, **results}
    yield {**given, **free}
    yield {**others, **results}
    yield {**others, **free}
    yield {**wide, **free}


def _sources(choice: Choice) -> set[str]:
    """Return the names of operands that are activations for most ops: the first one."""
    return set(list(choice.operands)[:1])


def _any(desc: MemoryDesc) -> MemoryDesc:
    return MemoryDesc.any(desc.dims, desc.dtype)


def _is_same(node: Node, choice: Choice, candidate: Candidate) -> bool:
    if (candidate.target, candidate.impl) != (choice.target, choice.impl) or candidate.handle is None:
        return False
    if dict(candidate.handle.identity) != dict(choice.handle) or candidate.operands.keys() != choice.operands.keys():
        return False
    pairs = [(desc, candidate.operands[name]) for name, desc in choice.operands.items()]
    return all(_fits(*pair) for pair in (*pairs, *zip(node.descs, candidate.results, strict=True)))


def _fits(asked: MemoryDesc, found: MemoryDesc) -> bool:
    """Return whether a format is the one of the file; of an opaque one, the file has only its size."""
    if is_asked(asked):
        return found.kind == "opaque" and (found.dims, found.dtype, found.nbytes) == (
            asked.dims,
            asked.dtype,
            asked.nbytes,
        )
    # a target's format never includes the beginning of a slice
    return found in (asked, asked.at_start())
