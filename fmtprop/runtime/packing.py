"""Packing of a plan's constants: parameters are read, nodes on constants run once, and the originals are dropped.

Owns the order: a weight is dropped before the next one is read. Places nothing in a plan and compiles no step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from fmtprop import dnnl
from fmtprop.ir import Graph, Node, Value
from fmtprop.passes.assignment.identities import Identities
from fmtprop.runtime.constants import ConstantStore, any_numbers_do
from fmtprop.runtime.plan import Access
from fmtprop.runtime.weights import origin_of
from fmtprop.targets.memory import nbytes_of, view

#: bytes of weights that are packed between two returns of the originals' memory to the system
_TRIM_NBYTES = 16 << 20


@dataclass(frozen=True)
class Once:
    """A constant of the graph, or a node that runs once, on constants."""

    node: Node
    #: the tensors that it reads, in buffers that others fill
    operands: Mapping[str, Access]
    results: tuple[int, ...]
    #: numbers of the results that no node reads: they may hold any numbers
    unread: frozenset[int]


class Packing:
    """One packing of a formatted graph's constants.

    `work`: constants and nodes that depend on no input, without views: sources come before their readers. `store`:
    makes the bytes. `consume`: whether to remove constants from the graph when they are read.
    """

    def __init__(
        self,
        graph: Graph,
        work: Sequence[Once],
        wanted: Collection[int],
        threads: int,
        store: ConstantStore,
        consume: bool = False,
    ) -> None:
        self._graph, self._work, self._wanted = graph, work, frozenset(wanted)
        self._threads, self._store, self._consume = threads, store, consume
        self.packed: list[Node] = []
        self._values = {buffer: Value(one.node.name, i) for one in work for i, buffer in enumerate(one.results)}
        #: buffer -> its bytes
        self._flats: dict[int, torch.Tensor] = {}
        self._numbers = Identities(graph, store.forms.numbers, store.forms.computed)
        self._freed = 0

    def run(self) -> dict[int, torch.Tensor]:
        """Return the bytes of each wanted buffer: flat, or a tensor that PyTorch made; equal bytes are one tensor."""
        work = self._needed()
        last = {access.buffer: turn for turn, one in enumerate(work) for access in one.operands.values()}
        in_place: list[tuple[int, int]] = []
        for turn, one in enumerate(work):
            lent = one.node.op == "constant" and self._store.lends(self._graph.constants[one.node.name])
            made = [self._constant(one)] if one.node.op == "constant" else self._computed(one)
            for buffer, flat in zip(one.results, made, strict=True):
                self._flats[buffer] = self._store.keep(flat) if buffer in self._wanted and not lent else flat
                if buffer in self._wanted and lent:
                    in_place.append((flat.data_ptr(), flat.nbytes))
            for buffer in {access.buffer for access in one.operands.values()} - self._wanted:
                if last[buffer] == turn:
                    self._drop(buffer)
        dnnl.use_huge_pages(in_place)
        for buffer in sorted(self._wanted):
            value = self._values[buffer]
            origin, desc = origin_of(self._graph, value), self._graph.desc_of(value)
            self._store.forms.note(origin, desc, self._flats[buffer], self._numbers.of(value))
        return {buffer: self._flats[buffer] for buffer in sorted(self._wanted)}

    def _needed(self) -> list[Once]:
        """Return the work to do, sources first; another plan's copy of a value in the same format is shared."""
        needed, found = set(self._wanted), []
        for one in reversed(self._work):
            if needed.isdisjoint(one.results):
                continue
            values = [self._values[buffer] for buffer in one.results]
            known = [
                self._store.forms.find(
                    origin_of(self._graph, value), self._graph.desc_of(value), self._numbers.of(value)
                )
                for value in values
            ]
            flats = {buffer: flat for buffer, flat in zip(one.results, known, strict=True) if flat is not None}
            if len(flats) == len(values):
                self._flats |= flats
            else:
                found.append(one)
                needed |= {access.buffer for access in one.operands.values()}
        return found[::-1]

    def _constant(self, one: Once) -> torch.Tensor:
        node, constants = one.node, self._graph.constants
        data = constants.pop(node.name) if self._consume else constants[node.name]
        packed, native = self._wanted.isdisjoint(one.results), any_numbers_do(self._graph, node.name)
        return self._store.add(data, node.results[0], node.descs[0], packed=packed, native=native)

    def _computed(self, one: Once) -> list[torch.Tensor]:
        """Execute a node of constants now: weights are packed once."""
        operands = {name: (self._flats[access.buffer], access.desc) for name, access in one.operands.items()}
        self.packed.append(one.node)
        results = self._store.compute(one.node, operands, self._threads, one.unread)
        if one.node.op == "reorder" and not one.node.descs[0].takes_any_bytes:
            self._keep_source(one, results[0])
        return results

    def _keep_source(self, one: Once, packed: torch.Tensor) -> None:
        """Keep the source of a format that nobody can read back: other plans and files need its numbers."""
        value, access = self._graph.inputs(one.node.name)["src"], one.operands["src"]
        flat, desc = self._flats[access.buffer], self._graph.desc_of(value)
        if packed.is_mkldnn and desc.is_plain:
            numbers, read = view(flat, access.desc), packed.to_dense()
            if numbers.shape == read.shape and torch.equal(numbers, read):
                return
        self._store.forms.keep(origin_of(self._graph, value), desc, flat.clone())  # it may be the caller's memory

    def _drop(self, buffer: int) -> None:
        """Drop bytes that nothing reads any more."""
        flat = self._flats.pop(buffer)
        self._freed += nbytes_of(flat)
        del flat
        if self._freed > _TRIM_NBYTES:
            self._freed = 0
            dnnl.trim_heap()
