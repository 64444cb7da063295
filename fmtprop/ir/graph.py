"""The op graph: a typed facade over one directed graph, which networkx gets as a ``MultiDiGraph`` on request.

Owns structure (nodes, edges, order) and nothing else: :mod:`fmtprop.ops` owns the meaning of ops,
:mod:`fmtprop.passes` the choice of formats.

Every node is named by a string and has the attribute ``node`` (:class:`~fmtprop.ir.node.Node`). Every edge
goes from producer to reader; its key is the reader's operand, its attribute ``result`` the index of the producer's
result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fmtprop.errors import GraphError
from fmtprop.ir.multigraph import Multigraph
from fmtprop.ir.node import Attrs, Into, Node, Value
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc

if TYPE_CHECKING:
    import networkx as nx


class Graph:
    """A directed acyclic graph of ops; mutable while it is built, copied by every pass.

    Parameters
    ----------
    name : str
        Name of the model.
    structure : str
        Nesting of the caller's arguments and results, as JSON (:mod:`fmtprop.ir.structure`); empty for flat tensors.

    Examples
    --------
    >>> from fmtprop.ops import emit, Eltwise
    >>> g = Graph("tiny")
    >>> x = g.input("x", TensorType((1, 8), "f32"))
    >>> y = emit(g, "eltwise", {"src": x}, Eltwise("relu"))
    >>> g.output(y)
    >>> [node.op for node in g.nodes()]
    ['input', 'eltwise', 'output']
    """

    def __init__(self, name: str = "graph", structure: str = "") -> None:
        self.name, self.structure = name, structure
        self._graph = Multigraph()
        #: whether another graph has the same nodes and edges, in the same object: the next edit copies them
        self._is_shared = False
        #: constant name -> torch tensor, Initialiser, or Deferred (during compilation, or if loaded so); a constant
        #: that was released after packing has no entry
        self.constants: dict[str, Any] = {}
        self._order = 0
        #: whether each node stands behind its operands' producers in the order of adding, outputs last: then this is
        #: the topological order
        self._is_in_order = True
        # cached answers until the next edit: passes ask for the same order and operands again and again
        self._ranks: dict[str, int] | None = None
        self._inputs: dict[str, dict[str, Value]] = {}
        self._counters: dict[str, int] = {}

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._graph)

    def __contains__(self, name: object) -> bool:
        return name in self._graph.nodes

    def node(self, name: str) -> Node:
        """Return the node with a name.

        Raises
        ------
        GraphError
            There is none.
        """
        try:
            node: Node = self._graph.nodes[name]["node"]
        except KeyError:
            raise GraphError(f"graph {self.name} has no node {name!r}") from None
        return node

    def nodes(self, names: Collection[str] | None = None) -> list[Node]:
        """Return all nodes in topological order; among ready nodes, the first added goes first.

        Outputs come last, in the order of results, so a graph that is rebuilt node by node keeps this order.

        Parameters
        ----------
        names : collection of str, optional
            Names of the wanted nodes; default: all. A few nodes cost less time than the whole graph.

        Raises
        ------
        GraphError
            The graph has a cycle; the message names it.
        """
        data = self._graph.nodes
        ranks = self._ranked()
        return [data[name]["node"] for name in (ranks if names is None else sorted(names, key=ranks.__getitem__))]

    def _ranked(self) -> dict[str, int]:
        """Return the names in topological order, each with its rank."""
        if self._ranks is None:
            self._ranks = {name: rank for rank, name in enumerate(self._sorted())}
        return self._ranks

    def _sorted(self) -> list[str]:
        """Return the names in topological order; networkx's function takes six times as long."""
        if self._is_in_order:
            places = {name: (entry["node"].op == "output", entry["order"]) for name, entry in self._graph.nodes.items()}
            return sorted(places, key=places.__getitem__)
        data, missing = self._graph.nodes, {name: len(before) for name, before in self._graph.pred.items()}
        keys = {
            name: (entry["node"].op == "output", entry["order"], place, name)
            for place, (name, entry) in enumerate(data.items())
        }
        order: list[str] = []
        heap = [keys[name] for name, count in missing.items() if not count]
        heapify(heap)
        while heap:
            *_, name = heappop(heap)
            order.append(name)
            for reader in self._graph.succ[name]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(heap, keys[reader])
        if len(order) < len(data):
            cycle = " -> ".join(self._graph.cycle(data.keys() - set(order)))
            raise GraphError(f"graph {self.name} has a cycle: {cycle}")
        return order

    def entries(self) -> Iterator[tuple[str, Node]]:
        """Yield (name, node) in the order of adding, also for a graph with a cycle."""
        for name, data in self._graph.nodes.items():
            yield name, data["node"]

    def inputs(self, name: str) -> dict[str, Value]:
        """Return the operands of a node: operand name -> value, in the order of connection."""
        known = self._inputs.get(name)
        if known is None:
            edges = [
                (data["position"], key, Value(producer, data["result"]))
                for producer, between in self._graph.pred[name].items()
                for key, data in between.items()
            ]
            known = {key: value for _, key, value in sorted(edges, key=itemgetter(0))}
            self._inputs[name] = known
        return dict(known)

    def readers(self, value: Value) -> list[tuple[str, str]]:
        """Return the readers of a value as (node name, operand name), in topological order."""
        found = self.reading(value)
        if len(found) > 1:
            ranks = self._ranked()
            found.sort(key=lambda pair: (ranks[pair[0]], pair[1]))
        return found

    def reader_count(self, value: Value) -> int:
        """Return the number of operands that read a value; faster than :meth:`readers` while a graph is edited."""
        return len(self.reading(value))

    def reading(self, value: Value) -> list[tuple[str, str]]:
        """Return :meth:`readers` in the order of connection, which takes less time while a graph is edited."""
        edges = self._graph.succ[value.node].items()
        return [(to, key) for to, between in edges for key, data in between.items() if data["result"] == value.index]

    def ancestors(self, *names: str) -> set[str]:
        """Return the names of all nodes that some nodes depend on; themselves only where another of them needs them."""
        found: set[str] = set()
        waiting = [self.node(name).name for name in names]
        while waiting:
            fresh = self._graph.pred[waiting.pop()].keys() - found
            found |= fresh
            waiting += fresh
        return found

    def missing_before(self, name: str, wanted: Iterable[str]) -> set[str]:
        """Return those of some nodes that a node does not depend on; near ones are found without a walk to inputs."""
        left, seen, front = set(wanted), {name}, [name]
        while front and left:
            fresh = {source for node in front for source in self._graph.pred[node]} - seen
            seen |= fresh
            left -= fresh
            front = list(fresh)
        return left

    def dependents(self, names: Iterable[str] | None = None) -> set[str]:
        """Return the names of some nodes and of all nodes that depend on them.

        Parameters
        ----------
        names : iterable of str, optional
            Default: the graph's inputs, and nodes that take part in each run; then all others run once.
        """
        if names is None:
            found = {name for name, node in self.entries() if node.op == "input" or node.attrs.each_run}
        else:
            found = set(names)
        waiting = [name for name in found if name in self._graph.nodes]
        while waiting:
            fresh = self._graph.succ[waiting.pop()].keys() - found
            found |= fresh
            waiting += fresh
        return found

    def type_of(self, value: Value) -> TensorType:
        """Return the logical type of a value."""
        try:
            if value.index >= 0:
                return self._graph.nodes[value.node]["node"].results[value.index]  # type: ignore[no-any-return]
        except (KeyError, IndexError):
            pass
        node = self.node(value.node)
        raise GraphError(f"{node.label} has {len(node.results)} results, no result {value.index}")

    def desc_of(self, value: Value) -> MemoryDesc:
        """Return the memory descriptor of a value after format assignment."""
        node = self.node(value.node)
        if not node.descs:
            raise GraphError(f"{node.label} has no format yet: assign formats first")
        return node.descs[value.index]

    @property
    def input_nodes(self) -> list[Node]:
        """Input nodes in the order of the model's arguments."""
        return self._of_op("input")

    @property
    def output_nodes(self) -> list[Node]:
        """Output nodes in the order of the model's results."""
        return self._of_op("output")

    def _of_op(self, op: str) -> list[Node]:
        pairs = [(d["order"], d["node"]) for d in self._graph.nodes.values() if d["node"].op == op]
        return [node for _, node in sorted(pairs, key=lambda pair: pair[0])]

    def count(self, op: str) -> int:
        """Return the number of nodes with this op."""
        return len(self._of_op(op))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes())

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self)} nodes, {sum(1 for _ in self._graph.edges())} edges>"

    def _repr_html_(self) -> str:
        """Return the nodes as a table for a notebook."""
        from fmtprop.ir.notebook import notebook

        return notebook(self)

    # ------------------------------------------------------------------ building

    def fresh_name(self, stem: str) -> str:
        """Return an unused name: ``stem_1``, ``stem_2``, …."""
        while True:
            self._counters[stem] = self._counters.get(stem, 0) + 1
            name = f"{stem}_{self._counters[stem]}"
            if name not in self._graph.nodes:
                return name

    def add(self, node: Node, inputs: Mapping[str, Value]) -> tuple[Value, ...]:
        """Add a node and connect its operands; return its results.

        Raises
        ------
        GraphError
            The name is taken, or an operand does not exist.
        """
        if node.name in self._graph.nodes:
            raise GraphError(f"graph {self.name} already has a node {node.name!r}")
        known = self._graph.nodes
        for operand, value in inputs.items():
            producer = known.get(value.node)
            if producer is None or not 0 <= value.index < len(producer["node"].results):
                self._check_value(node, operand, value)  # says so
        self._own()
        self._graph.add_node(node.name, node=node, order=self._order)
        self._order += 1
        self._ranks = None
        self._connect(node.name, inputs)
        return tuple([Value(node.name, i) for i in range(len(node.results))])

    def input(self, name: str, type_: TensorType, phase: str = "") -> Value:
        """Add a graph input; in phase ``"backward"``, one of the second entry point."""
        return self.add(Node(name, "input", Attrs(), (type_,), phase=phase), {})[0]

    def constant(self, name: str, type_: TensorType, data: Any, origin: str = "") -> Value:
        """Add a constant; ``data`` is a torch tensor or an :class:`~fmtprop.ir.initialiser.Initialiser`."""
        value = self.add(Node(name, "constant", Attrs(), (type_,), origin=origin), {})[0]
        self.constants[name] = data
        return value

    def output(self, value: Value, name: str | None = None, phase: str = "", into: Value | None = None) -> None:
        """Mark a value as the next graph output; in phase ``"backward"``, one of the second entry point.

        `into`: an input whose tensor the caller wants to have the value after the run.
        """
        attrs = Attrs() if into is None else Into(into.node)
        self.add(Node(name or self.fresh_name("output"), "output", attrs, (), phase=phase), {"src": value})

    def _latest(self, inputs: Mapping[str, Value]) -> float:
        """Return the greatest place of some operands' producers in the order of adding."""
        return max((self._graph.nodes[value.node]["order"] for value in inputs.values()), default=-1)

    def _check_value(self, node: Node, operand: str, value: Value) -> None:
        producer = self._graph.nodes.get(value.node)
        if producer is None:
            raise GraphError(f"{node.label}: operand {operand} reads {value}, which is not in graph {self.name}")
        if not 0 <= value.index < len(producer["node"].results):
            self.type_of(value)  # says so

    def _connect(self, name: str, inputs: Mapping[str, Value]) -> None:
        self._inputs[name] = dict(inputs)
        for position, (operand, value) in enumerate(inputs.items()):
            self._graph.add_edge(value.node, name, operand, {"result": value.index, "position": position})

    # ------------------------------------------------------------------ editing

    def _own(self) -> None:
        """Copy nodes and edges that another graph has, too, before they are edited."""
        if self._is_shared:
            self._graph, self._is_shared = self._graph.copy(), False

    def replace(self, node: Node) -> None:
        """Replace the node with the same name; its edges stay."""
        self.node(node.name)
        self._own()
        self._graph.nodes[node.name]["node"] = node

    def set_inputs(self, name: str, inputs: Mapping[str, Value]) -> None:
        """Reconnect all operands of a node."""
        node = self.node(name)
        for operand, value in inputs.items():
            self._check_value(node, operand, value)
        self._own()
        self._graph.disconnect(name)
        is_behind = node.op == "output" or self._latest(inputs) < self._graph.nodes[name]["order"]
        if not (self._is_in_order and is_behind):
            self._is_in_order, self._ranks = False, None
        self._connect(name, inputs)

    def set_input(self, name: str, operand: str, value: Value) -> None:
        """Reconnect one operand of a node."""
        inputs = self.inputs(name)
        if operand not in inputs:
            raise GraphError(f"{self.node(name).label} has no operand {operand!r}; it has {list(inputs)}")
        self.set_inputs(name, {**inputs, operand: value})

    def replace_uses(self, old: Value, new: Value) -> None:
        """Make every reader of ``old`` read ``new``."""
        for reader, operand in self.reading(old):
            self.set_input(reader, operand, new)

    def insert(self, node: Node, inputs: Mapping[str, Value], before: str) -> tuple[Value, ...]:
        """Add a node in the place of ``before`` in the order of ready nodes."""
        values = self.add(node, inputs)
        order = self._graph.nodes[before]["order"] - 0.5
        self._graph.nodes[node.name]["order"] = order
        # of two nodes in one place, the one that was added first goes first
        self._is_in_order = self._is_in_order and self._latest(inputs) <= order
        return values

    def remove(self, name: str) -> None:
        """Remove a node without readers.

        Raises
        ------
        GraphError
            Someone still reads it.
        """
        node = self.node(name)
        readers = list(self._graph.succ[name])
        if readers:
            raise GraphError(f"{node.label} cannot be removed: {readers[0]} reads it")
        self._own()
        self._graph.remove_node(name)
        self.constants.pop(name, None)
        self._inputs.pop(name, None)
        if self._ranks is not None:  # the node had no readers: the others keep their order
            del self._ranks[name]

    def remove_dead(self) -> int:
        """Remove every node that no output depends on, except inputs; return their number."""
        unread = [name for name, readers in self._graph.succ.items() if not readers]
        dead = 0
        while unread:
            name = unread.pop()
            if self._graph.nodes[name]["node"].op in ("input", "output"):
                continue
            sources = list(self._graph.pred[name])
            self.remove(name)
            unread += [source for source in sources if not self._graph.succ[source]]
            dead += 1
        return dead

    def forward_names(self) -> set[str]:
        """Return the names of the nodes of the first entry point: its inputs, and those that its outputs need.

        Without a second entry point, these are all nodes. A node that only the second one needs runs there, even if it
        depends only on inputs of the first: its operands are in memory until then, and its results need not be.
        """
        outputs = [node.name for node in self.output_nodes if not node.phase]
        names = {*outputs, *self.ancestors(*outputs), *(node.name for node in self.input_nodes if not node.phase)}
        has_backward = any(node.phase for node in (*self.input_nodes, *self.output_nodes))
        return names if has_backward else set(self._graph.nodes)

    def copy(self) -> Graph:
        """Return an independent copy; it shares nodes and constant data, which are immutable."""
        other = Graph(self.name, self.structure)
        other._graph, other._is_shared, self._is_shared = self._graph, True, True
        other.constants = dict(self.constants)
        other._order, other._is_in_order = self._order, self._is_in_order
        other._ranks = None if self._ranks is None else dict(self._ranks)
        other._inputs = dict(self._inputs)
        other._counters = dict(self._counters)
        return other

    def is_copy_of(self, other: Graph) -> bool:
        """Return whether the graph has the nodes, edges, order and constants of another, and none of its own."""
        if self.constants.keys() != other.constants.keys():
            return False
        same = all(data is other.constants[name] for name, data in self.constants.items())
        if self._graph is other._graph:
            return same
        return same and self._graph.nodes == other._graph.nodes and self._graph.succ == other._graph.succ

    def map_nodes(self, change: Callable[[Node], Node]) -> Graph:
        """Return a copy in which every node is replaced by ``change(node)``."""
        other = self.copy()
        for node in self.nodes():
            changed = change(node)
            if changed is not node:
                other.replace(changed)
        return other

    # ------------------------------------------------------------------ networkx

    def to_networkx(self) -> nx.MultiDiGraph[str]:
        """Return the graph as plain networkx data; see :mod:`fmtprop.ir.networkx_form`."""
        from fmtprop.ir.networkx_form import to_networkx

        return to_networkx(self)

    @classmethod
    def from_networkx(cls, nxg: nx.MultiDiGraph[str]) -> Graph:
        """Build a graph from plain networkx data; see :mod:`fmtprop.ir.networkx_form`.

        Raises
        ------
        GraphError
            The data is not a graph; the message names node and attribute.
        """
        from fmtprop.ir.networkx_form import from_networkx

        return from_networkx(nxg, cls)
