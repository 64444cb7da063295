"""The nodes and edges of a graph: dictionaries of the form that networkx has inside, without its import of 0.2 s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

#: producer -> reader -> key -> data of the edge
Edges = dict[str, dict[str, dict[str, dict[str, Any]]]]


class Multigraph:
    """A directed graph with data on its nodes, and any number of edges between two of them, each with a key.

    `succ`, `pred`: name -> reader or producer -> key -> data; an edge's data is the same object in both.
    """

    __slots__ = ("nodes", "pred", "succ")

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        self.succ: Edges = {}
        self.pred: Edges = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def add_node(self, name: str, **data: Any) -> None:
        """Add a node."""
        self.nodes[name], self.succ[name], self.pred[name] = data, {}, {}

    def add_edge(self, producer: str, reader: str, key: str, data: dict[str, Any]) -> None:
        """Connect two nodes."""
        between = self.succ[producer].setdefault(reader, {})
        self.pred[reader][producer] = between
        between[key] = data

    def disconnect(self, reader: str) -> None:
        """Remove the edges to a node."""
        for producer in self.pred[reader]:
            del self.succ[producer][reader]
        self.pred[reader] = {}

    def remove_node(self, name: str) -> None:
        """Remove a node without readers."""
        self.disconnect(name)
        del self.nodes[name], self.succ[name], self.pred[name]

    def edges(self) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """Yield producer, reader, key and data of every edge."""
        for producer, readers in self.succ.items():
            for reader, between in readers.items():
                for key, data in between.items():
                    yield producer, reader, key, data

    def cycle(self, names: Iterable[str]) -> list[str]:
        """Return the nodes of a cycle; each of the given nodes must have a producer among them."""
        within = set(names)
        path = [next(iter(within))]
        while path.count(path[-1]) == 1:
            path.append(next(producer for producer in self.pred[path[-1]] if producer in within))
        return path[path.index(path[-1]) : -1][::-1]

    def copy(self) -> Multigraph:
        """Return a copy with the same order of nodes and edges; it shares the data of edges, which never changes."""
        made = Multigraph()
        made.nodes.update((name, dict(data)) for name, data in self.nodes.items())
        for name in self.nodes:
            made.succ[name], made.pred[name] = {}, {}
        for name, readers in self.succ.items():
            for reader, edges in readers.items():
                made.succ[name][reader] = made.pred[reader][name] = dict(edges)
        return made
