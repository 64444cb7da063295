"""A model for another batch: axis 0 of all inputs has another size, and so has all that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fmtprop.errors import ShapeError
from fmtprop.ir import Graph, Node, opdef
from fmtprop.ir.post_ops import types_along
from fmtprop.passes.base import Pass
from fmtprop.passes.variants.slice_batch import batch_of


@dataclass(frozen=True)
class ChangeBatch(Pass):
    """Change the size of the batch.

    Requires a graph without formats. Ensures the same nodes, names and weights. There is no other batch, and a
    :class:`~fmtprop.errors.ShapeError`, where the inputs have several, a node mixes images, or an attribute or a
    constant has the batch elsewhere than in axis 0.
    """

    #: the new size of axis 0 of each input
    images: int

    def run(self, graph: Graph) -> Graph:
        """Return the graph for the other batch."""
        batch = batch_of(graph)
        if batch is None:
            raise ShapeError("the batch cannot be changed: the inputs have no common size of axis 0")
        out = graph.copy()
        for node in graph.nodes():
            if node.op == "input":
                (type_,) = node.results
                out.replace(replace(node, results=(type_.with_dims((self.images, *type_.dims[1:])),)))
            elif not node.is_boundary:
                self._change(graph, out, node, batch)
        return out

    def _change(self, graph: Graph, out: Graph, node: Node, batch: int) -> None:
        inputs = graph.inputs(node.name)
        types = {operand: out.type_of(value) for operand, value in inputs.items()}
        if all(types[operand] == graph.type_of(value) for operand, value in inputs.items()):
            return  # made of constants
        rule = opdef(node.op).sliced
        attrs = node.attrs if rule is None else rule(node.attrs, batch, self.images)
        if attrs is None:
            raise ShapeError(f"node {node.name} ({node.op}): the batch cannot be changed: an image depends on others")
        changed = replace(node, attrs=attrs)
        try:
            results = types_along(changed, types)[1]
        except ShapeError as error:
            raise ShapeError(f"node {node.name} ({node.op}): the batch cannot be changed: {error}") from error
        out.replace(replace(changed, results=results))
