"""A depthwise convolution absorbed by the 1x1 convolution before it, as one node.

Owns which pairs may be fused, and the fused node. Must not know whether it pays: that is for
whoever chooses among plans.

References
----------
oneDNN developer guide, "Primitive Attributes: Post-ops", depthwise post-op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fmtprop.ir.node import Node, PostOp, Value, post_op_operand
from fmtprop.ir.types import TensorType
from fmtprop.ops.building import is_native
from fmtprop.ops.convolution import Conv

#: kernel and padding that oneDNN has fused code for, and its strides
_KERNEL, _PADDING, _STRIDES = 3, 1, (1, 2)


def fused(
    conv: Node,
    conv_inputs: Mapping[str, Value],
    depthwise: Node,
    depthwise_inputs: Mapping[str, Value],
    type_of: Callable[[Value], TensorType],
) -> tuple[Node, dict[str, Value]] | None:
    """Return one node that computes a 1x1 convolution and the 3x3 depthwise convolution that reads it.

    Parameters
    ----------
    conv, depthwise : Node
        The pair; the caller knows that nobody else reads `conv`.
    conv_inputs, depthwise_inputs : mapping of str to Value
        Their operands.
    type_of : callable
        From a value to its type, such as ``graph.type_of``.

    Returns
    -------
    (Node, dict of str to Value) or None
        The fused node under the name of `depthwise`, so that its readers stay as they are, and its operands; None where
        the two are no such pair: both two-dimensional in space, the first with a 1x1 kernel, stride 1 and no padding,
        the second with one 3x3 kernel for each channel, padding 1 and stride 1 or 2; their post-ops eltwise only.
    """
    if depthwise_inputs.get("src") != Value(conv.name) or not _pointwise(conv, type_of(conv_inputs["weights"])):
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
    return conv.with_(name=depthwise.name, results=depthwise.results, post_ops=tail), inputs


def _pointwise(node: Node, weights: TensorType) -> bool:
    attrs = node.attrs
    return _tails_are_eltwise(node) and isinstance(attrs, Conv) and attrs == Conv.make(2) and weights.dims[2:] == (1, 1)


def _depthwise(node: Node, weights: TensorType, src: TensorType) -> bool:
    attrs, channels = node.attrs, src.dims[1] if src.ndim > 1 else 0
    return (
        _tails_are_eltwise(node)
        and isinstance(attrs, Conv)
        and any(attrs == Conv.make(2, stride, pad_l=_PADDING, groups=channels) for stride in _STRIDES)
        and weights.dims == (channels, 1, 1, _KERNEL, _KERNEL)
    )


def _tails_are_eltwise(node: Node) -> bool:
    return node.op == "convolution" and all(post_op.op == "eltwise" for post_op in node.post_ops)
