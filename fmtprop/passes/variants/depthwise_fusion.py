"""Fusion of a depthwise convolution into the 1x1 convolution before it, as one node.

Owns the pairs that may be fused, and the fused node. Must not know whether the fusion pays: the choice among plans
decides.

References
----------
oneDNN developer guide, "Primitive Attributes: Post-ops", depthwise post-op.
"""

from __future__ import annotations

from typing import NamedTuple

from fmtprop.ir import Graph, Node, PostOp, TensorType, Value, post_op_operand
from fmtprop.ops import Conv, Eltwise
from fmtprop.ops.building import is_native

#: kernel, padding and strides of oneDNN's fused code
_KERNEL, _PADDING, _STRIDES = 3, 1, (1, 2)


class Fused(NamedTuple):
    """A node that replaces several neighbours."""

    #: it has the name of the last neighbour, so readers do not change
    node: Node
    inputs: dict[str, Value]
    #: the nodes that it computes, in order
    covers: tuple[str, ...]


def fused(graph: Graph, depthwise: Node) -> Fused | None:
    """Return one node that computes a 1x1 convolution and the 3x3 depthwise convolution that reads it.

    Result: None if the two are no such pair. The pattern: no other node reads the first; both have two spatial axes;
    the first has a 1x1 kernel, stride 1 and no padding; the second has one 3x3 kernel for each channel, padding 1 and
    stride 1 or 2; all post-ops are eltwise.
    """
    if depthwise.op != "convolution":
        return None
    depthwise_inputs, type_of = graph.inputs(depthwise.name), graph.type_of
    source = depthwise_inputs["src"]
    conv, conv_inputs = graph.node(source.node), graph.inputs(source.node)
    if graph.reader_count(source) > 1 or not _pointwise(graph, conv):
        return None
    if not _depthwise(depthwise, type_of(depthwise_inputs["weights"]), conv.results[0]):
        return None
    types = [*conv.results, *depthwise.results, *(type_of(value) for value in conv_inputs.values())]
    if not is_native(*types) or len({conv.results[0].dtype, depthwise.results[0].dtype}) > 1:
        return None
    place = len(conv.post_ops)
    name = post_op_operand(place)
    bias = post_op_operand(place, "bias") if "bias" in depthwise_inputs else None
    post_op = PostOp("convolution", depthwise.attrs, name, depthwise.origin, bias)
    tail = (*conv.post_ops, post_op, *depthwise.post_ops)
    inputs = {**conv_inputs, name: depthwise_inputs["weights"]}
    if bias is not None:
        inputs[bias] = depthwise_inputs["bias"]
    both = conv.with_(name=depthwise.name, results=depthwise.results, post_ops=tail)
    return Fused(both, inputs, (conv.name, depthwise.name))


def _pointwise(graph: Graph, node: Node) -> bool:
    if not _tails_are_eltwise(node) or node.attrs != Conv.make(2):
        return False
    return graph.type_of(graph.inputs(node.name)["weights"]).dims[2:] == (1, 1)


def _depthwise(node: Node, weights: TensorType, src: TensorType) -> bool:
    attrs, channels = node.attrs, src.dims[1] if src.ndim > 1 else 0
    return (
        _tails_are_eltwise(node)
        and isinstance(attrs, Conv)
        and any(attrs == Conv.make(2, stride, pad_l=_PADDING, groups=channels) for stride in _STRIDES)
        and weights.dims == (channels, 1, 1, _KERNEL, _KERNEL)
    )


def _tails_are_eltwise(node: Node) -> bool:
    return node.op == "convolution" and all(isinstance(post_op.attrs, Eltwise) for post_op in node.post_ops)
