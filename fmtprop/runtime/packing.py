"""Packing of a plan's constants: parameters are read, nodes on constants run once, and the originals are dropped.

Owns the order: a weight is dropped before the next one is read. Places nothing and compiles no step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fmtprop import dnnl
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.runtime.constants import ConstantStore, is_indifferent, readers_behind_views
from fmtprop.runtime.plan import Access
from fmtprop.runtime.weights import Numbers

__all__ = ["Packing"]

#: after packing so many bytes of weights, the originals' memory is returned to the system
_TRIM_NBYTES = 16 << 20


@dataclass(eq=False)
class Packing:
    """One packing of a formatted graph's constants.

    Parameters
    ----------
    graph : Graph
        The formatted graph.
    nodes : mapping of str to Node
        Constants and nodes that depend on no input, without views, by name: sources come before their readers.
    places : mapping of Value to Access
        Position of each value, of views too.
    owners : mapping of int to Value
        The value in each buffer.
    unread : collection of Value
        Values that no node reads: they may have any numbers.
    threads : int
        Number of threads.
    store : ConstantStore
        Gets the bytes.
    consume : bool
        Whether to remove constants from the graph when they are packed.

    Attributes
    ----------
    packed : dict of str to Node
        The nodes that ran.
    """

    graph: Graph
    nodes: Mapping[str, Node]
    places: Mapping[Value, Access]
    owners: Mapping[int, Value]
    unread: Collection[Value]
    threads: int
    store: ConstantStore
    consume: bool
    packed: dict[str, Node] = field(default_factory=dict)
    #: value -> its number in the store
    _stored: dict[Value, int] = field(default_factory=dict)
    #: by constant
    _numbers: dict[str, Numbers | None] = field(default_factory=dict)
    #: value -> the nodes that read it or a view of it
    _behind: dict[Value, set[str]] = field(default_factory=dict)
    _forgotten: set[Value] = field(default_factory=set)
    _freed: int = 0

    def run(self, wanted: Mapping[int, Value]) -> dict[int, int]:
        """Pack values, by buffer; return their numbers in the store, by buffer."""
        for name in self._needed(wanted.values()):
            node = self.nodes[name]
            if node.op == "constant":
                self._stored[Value(name)] = self._add_constant(node)
            else:
                self._run_once(node)
        for value in wanted.values():
            origin, desc = self._origin(value), self.graph.desc_of(value)
            self.store.forms.note(origin, desc, self.store[self._stored[value]], self._numbers_of(value))
        return {buffer: self._stored[value] for buffer, value in wanted.items()}

    def _needed(self, wanted: Collection[Value]) -> list[str]:
        """Return the nodes to run, sources first; another plan's copy of a value in the same format is shared."""
        needed, to_run = {value.node for value in wanted}, []
        for name in reversed(list(self.nodes)):
            if name not in needed:
                continue
            node = self.nodes[name]
            values = [Value(name, index) for index in range(len(node.results))]
            known = [
                self.store.forms.find(self._origin(value), self.graph.desc_of(value), self._numbers_of(value))
                for value in values
            ]
            flats = [flat for flat in known if flat is not None]
            if len(flats) == len(values):
                self._stored.update(zip(values, map(self.store.keep, flats), strict=True))
            else:
                to_run.append(name)
                needed |= {self._owner(value).node for value in self.graph.inputs(name).values()}
        return to_run[::-1]

    def _owner(self, value: Value) -> Value:
        """Return the value of which this is a view, or itself."""
        return self.owners[self.places[value].buffer]

    def _origin(self, value: Value) -> Value:
        """Return the constant of which a value is another format."""
        node = self.graph.node(value.node)
        while node.op == "reorder":
            source = self.graph.inputs(node.name)["src"]
            if self.graph.desc_of(source).dtype is not node.descs[0].dtype:
                break
            value, node = source, self.graph.node(source.node)
        return value

    def _numbers_of(self, value: Value) -> Numbers | None:
        """Return an identity of a constant value's numbers, in any format and data type."""
        node = self.graph.node(value.node)
        while node.op == "reorder":
            node = self.graph.node(self.graph.inputs(node.name)["src"].node)
        if node.op != "constant":
            return None
        if node.name not in self._numbers:
            self._numbers[node.name] = self.store.forms.numbers(self.graph.constants[node.name])
        return self._numbers[node.name]

    def _readers(self, value: Value) -> set[str]:
        """Return the nodes that read a value or a view of it."""
        if value not in self._behind:
            self._behind[value] = readers_behind_views(self.graph, value)
        return self._behind[value]

    def _add_constant(self, node: Node) -> int:
        readers = self._readers(Value(node.name))
        native = node.descs[0].takes_any_bytes and all(is_indifferent(self.graph.node(one)) for one in readers)
        # only nodes that run once read it
        packed = readers <= self.nodes.keys()
        data = self.graph.constants[node.name]
        return self.store.add(data, node.results[0], node.descs[0], packed=packed, native=native)

    def _run_once(self, node: Node) -> None:
        """Execute a node of constants now: weights are packed once."""
        inputs = self.graph.inputs(node.name)
        flats = {name: self.store[self._stored[self._owner(value)]] for name, value in inputs.items()}
        operands = {name: (flats[name], self.places[value].desc) for name, value in inputs.items()}
        unread = {index for index in range(len(node.results)) if Value(node.name, index) in self.unread}
        for index, tensor in enumerate(self.store.compute(node, operands, self.threads, unread)):
            self._stored[Value(node.name, index)] = self.store.keep(tensor)
        self.packed[node.name] = node
        for value in inputs.values():
            self._forget(self._owner(value))

    def _forget(self, value: Value) -> None:
        """Drop a constant, or a value computed from constants, after all its readers were computed."""
        if value in self._forgotten or not self._readers(value) <= self.packed.keys():
            return
        self._forgotten.add(value)
        number = self._stored[value]
        self._freed += self.store.nbytes(number)
        self.store.drop(number)
        if self.consume:
            self.graph.constants.pop(value.node, None)
        if self._freed > _TRIM_NBYTES:
            self._freed = 0
            dnnl.trim_heap()
