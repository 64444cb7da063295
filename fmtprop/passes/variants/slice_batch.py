"""Early layers of a large batch run in slices of a few images, so that their activations stay in cache.

Early layers have large activations and small weights: image by image, each layer finds its source in cache. Late
layers have small activations and large weights: there the whole batch shares each read of the weights. Slices of the
batch are views, and their results are concatenated in place, so slices cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmtprop.ir import Attrs, Graph, Node, Role, Value, opdef, ports
from fmtprop.ops import Concat, Slice, emit
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import unused_name
from fmtprop.system.machine import last_level_cache_nbytes


@dataclass(frozen=True)
class SliceBatch(Pass):
    """Run the first layers of a network in slices of its batch.

    Requires and returns a normal graph. A graph without a batch, or with activations that fit, is returned unchanged.

    Issue "exact assignment", item 1: a batch cut into slices of N over a stretch of layers.
    """

    images: int = 1
    #: the sliced part ends after the last layer with larger activations, for the whole batch. Default: half of the
    #: last-level cache.
    cache_nbytes: int | None = None

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object if there is nothing to slice."""
        batch = batch_of(graph)
        if batch is None or batch <= self.images or batch % self.images:
            return graph
        stretch = self._stretch(graph, batch)
        return _Rewrite(graph, stretch, batch, self.images).run() if stretch else graph

    def _stretch(self, graph: Graph, batch: int) -> set[str]:
        """Return the nodes to run in slices: a closed beginning of the graph."""
        cache_nbytes = last_level_cache_nbytes() // 2 if self.cache_nbytes is None else self.cache_nbytes
        order: list[str] = []
        inside: set[str] = set()
        computed = graph.dependents()
        last = 0
        for node in graph.nodes():
            sources = [v for v in graph.inputs(node.name).values() if v.node in computed]
            if not sources:
                continue
            entered = all(v.node in inside or graph.node(v.node).op == "input" for v in sources)
            if not (entered and self._is_divisible(graph, node, sources, batch)):
                continue
            order.append(node.name)
            inside.add(node.name)
            largest = max(graph.type_of(v).nbytes for v in (*sources, Value(node.name)))
            if largest > cache_nbytes:
                last = len(order)
        return set(order[:last])

    def _is_divisible(self, graph: Graph, node: Node, sources: list[Value], batch: int) -> bool:
        """Whether each image of a node's result depends only on the same image of its sources."""
        if len(node.results) != 1 or _sliced(node, batch, self.images) is None:
            return False
        types = [*(graph.type_of(value) for value in sources), node.results[0]]
        if any(type_.ndim == 0 or type_.dims[0] != batch for type_ in types):
            return False
        inputs = graph.inputs(node.name)
        learned = {one.name for one in ports(node, inputs) if one.role is Role.PARAMETER}
        if any(inputs[name] in sources for name in learned):
            return False  # computed weights: their first axis is not a batch, even if it has the same size
        # a constant that is added to each image would have to be sliced too
        constants = [
            graph.type_of(value) for name, value in inputs.items() if name not in learned and value not in sources
        ]
        return all(type_.ndim == 0 or type_.dims[0] == 1 for type_ in constants)


class _Rewrite:
    """A new graph with the sliced nodes repeated for each slice."""

    def __init__(self, graph: Graph, stretch: set[str], batch: int, images: int) -> None:
        self.graph, self.stretch, self.batch, self.images = graph, stretch, batch, images
        self.out = Graph(graph.name, graph.structure)
        self.done = False

    def run(self) -> Graph:
        for node in self._ordered():
            if node.name in self.stretch:
                if not self.done:
                    self._slices()
                    self.done = True
                continue
            self.out.add(node, self.graph.inputs(node.name))
            if node.op == "constant":
                self.out.constants[node.name] = self.graph.constants[node.name]
        return self.out

    def _ordered(self) -> list[Node]:
        """Return boundary, constants and nodes on constants first, then the sliced nodes, then the rest."""
        nodes = self.graph.nodes()
        before = {node.name for node in nodes if node.op in ("input", "constant")}
        for node in nodes:
            inputs = [value.node for value in self.graph.inputs(node.name).values()]
            # made only of constants: maybe an operand of a sliced node
            constant = inputs and all(name in before and self.graph.node(name).op != "input" for name in inputs)
            if constant and node.op != "output":
                before.add(node.name)
        first = [node for node in nodes if node.name in before]
        return [*first, *(n for n in nodes if n.name in self.stretch), *self._rest(nodes, before)]

    def _rest(self, nodes: list[Node], before: set[str]) -> list[Node]:
        return [node for node in nodes if node.name not in before and node.name not in self.stretch]

    def _slices(self) -> None:
        members = [node for node in self.graph.nodes() if node.name in self.stretch]
        parts = [self._slice(members, start) for start in range(0, self.batch, self.images)]
        for node in members:
            value = Value(node.name)
            if any(reader not in self.stretch for reader, _ in self.graph.readers(value)):
                # under the old name, so that the readers find it
                sources = {f"src_{i}": part[value] for i, part in enumerate(parts)}
                emit(self.out, "concat", sources, Concat(0), name=node.name, origin=node.origin)

    def _slice(self, members: list[Node], start: int) -> dict[Value, Value]:
        """Add the sliced nodes for the images from ``start`` on; return the replacement of each of their values."""
        places: dict[Value, Value] = {}
        for node in members:
            inputs = {}
            for name, value in self.graph.inputs(node.name).items():
                if value not in places and self.graph.node(value.node).op == "input":
                    places[value] = self._cut(value, start)
                inputs[name] = places.get(value, value)
            attrs = _sliced(node, self.batch, self.images) or node.attrs
            results = tuple(type_.with_dims((self.images, *type_.dims[1:])) for type_ in node.results)
            name = unused_name(f"{node.name}_n{start}", self.out, self.graph)
            clone = replace(node, name=name, attrs=attrs, results=results)
            places[Value(node.name)] = self.out.add(clone, inputs)[0]
        return places

    def _cut(self, value: Value, start: int) -> Value:
        attrs = Slice.along(self.graph.type_of(value).dims, 0, start, self.images)
        name = unused_name(f"{value.node}_n{start}", self.out, self.graph)
        return emit(self.out, "slice", {"src": value}, attrs, name=name)


# ---------------------------------------------------------------- nodes that can be sliced


def batch_of(graph: Graph) -> int | None:
    """Return the size of axis 0 that all inputs share, or None."""
    sizes = {node.results[0].dims[0] if node.results[0].ndim else 0 for node in graph.input_nodes}
    return sizes.pop() if len(sizes) == 1 else None


def _sliced(node: Node, batch: int, images: int) -> Attrs | None:
    """Return a node's attributes for a slice of the batch; None if an image depends on others."""
    rule = opdef(node.op).sliced
    return None if rule is None else rule(node.attrs, batch, images)
