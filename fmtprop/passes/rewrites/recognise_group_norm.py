"""Recognition of group normalization, which exporters write as an instance normalization of a reshaped tensor."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.ops import FakeQuantize, GroupNorm, Reshape
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant, insert, new_constant, only_reader


@dataclass(frozen=True)
class RecogniseGroupNorm(NodePass):
    """Normalize groups of channels in the tensor's own shape, where a model makes a channel of each group before.

    The result is reshaped back, perhaps behind a rounding. Vectors are constants, with one number for each group.

    Runs before :class:`~fmtprop.passes.rewrites.delay_reshapes.DelayReshapes`, which lets both reshapes cancel out.

    ``torch.onnx.export``: GroupNorm up to opset 17.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not isinstance(node.attrs, GroupNorm):
            return
        inputs, groups = graph.inputs(node.name), node.attrs.groups
        reshape = graph.node(inputs["src"].node)
        if reshape.op != "reshape" or groups != node.results[0].dims[1]:
            return
        source = graph.inputs(reshape.name)["src"]
        dims = graph.type_of(source).dims
        if not 3 <= len(dims) <= 5 or dims[0] != node.results[0].dims[0] or dims[1] % groups or not dims[1]:
            return
        given = {name: constant(graph, inputs[name]) for name in ("scale", "shift") if name in inputs}
        if None in given.values() or not _goes_back(graph, node, dims):
            return
        vectors = {
            name: new_constant(graph, vector.repeat_interleave(dims[1] // groups), node, node.origin)
            for name, vector in given.items()
            if vector is not None
        }
        made = insert(graph, node, node.attrs, src=source, **vectors)
        bypass(graph, node, [insert(graph, node, Reshape(node.results[0].dims), src=made)])


def _goes_back(graph: Graph, node: Node, dims: tuple[int, ...]) -> bool:
    """Return whether the only reader of a result, behind a rounding, reshapes it to these dims."""
    reader = only_reader(graph, Value(node.name))
    if reader is not None and isinstance(reader.attrs, FakeQuantize):
        reader = only_reader(graph, Value(reader.name))
    return reader is not None and reader.op == "reshape" and reader.results[0].dims == dims
