"""Linear siblings that share a source as one: their weights side by side, their results slices of one.

Owns which siblings may be merged, and the nodes in their place. Must not know whether it pays: that is for whoever
chooses among plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fmtprop.ir.node import Node, Value
from fmtprop.ir.types import TensorType
from fmtprop.ops.building import is_native
from fmtprop.ops.concat import Concat
from fmtprop.ops.convolution import Conv
from fmtprop.ops.view_attrs import Slice

#: op -> the axis of the outputs in the weights, in dst and in the bias; -1 counts from the end
_OUTPUT_AXES = {"convolution": (0, 1, 0), "inner_product": (0, 1, 0), "matmul": (1, -1, -1)}

#: a node and its operands
Member = tuple[Node, Mapping[str, Value]]


@dataclass(frozen=True)
class Merger:
    """What takes the siblings' place.

    Parameters
    ----------
    members : tuple of (Node, mapping of str to Value)
        Nodes to add in this order, once all the siblings' operands exist: concatenations of the weights and biases,
        which are constants and so computed once when a plan is made; the merged node; one slice for each sibling under
        its name, so that its readers stay as they are.
    """

    members: tuple[Member, ...]

    @property
    def node(self) -> Node:
        """The merged node."""
        return next(node for node, _ in self.members if node.op in _OUTPUT_AXES)


def merged(siblings: Sequence[Member], type_of: Callable[[Value], TensorType], name: str) -> Merger | None:
    """Return one node that computes what several do from the same source.

    Parameters
    ----------
    siblings : sequence of (Node, mapping of str to Value)
        Convolutions without groups, inner products, or matrix products with one matrix, and their operands. The caller
        knows that weights and biases are constants.
    type_of : callable
        From a value to its type, such as ``graph.type_of``.
    name : str
        Of the merged node; its weights and bias get this name and a suffix.

    Returns
    -------
    Merger or None
        None where there are fewer than two, or they differ in more than the number of their outputs: in their source,
        attributes, data types, the other dims of their weights, or their post-ops, which must be eltwise.
    """
    if len(siblings) < 2 or not _alike(siblings, type_of):
        return None
    (first, inputs), *_ = siblings
    weights_axis, axis, bias_axis = _OUTPUT_AXES[first.op]
    axis %= first.results[0].ndim
    members: list[Member] = [_joined(f"{name}.weights", siblings, "weights", weights_axis, type_of)]
    given = {"src": inputs["src"], "weights": Value(f"{name}.weights")}
    if "bias" in inputs:
        bias_axis %= type_of(inputs["bias"]).ndim
        members.append(_joined(f"{name}.bias", siblings, "bias", bias_axis, type_of))
        given["bias"] = Value(f"{name}.bias")
    sizes = [node.results[0].dims[axis] for node, _ in siblings]
    whole = _with_size(first.results[0], axis, sum(sizes))
    members.append((first.with_(name=name, results=(whole,)), given))
    start = 0
    for (node, _), size in zip(siblings, sizes, strict=True):
        starts = tuple(start if a == axis else 0 for a in range(whole.ndim))
        cut = Slice(starts, node.results[0].dims, (1,) * whole.ndim)
        members.append((Node(node.name, "slice", cut, node.results, origin=node.origin), {"src": Value(name)}))
        start += size
    return Merger(tuple(members))


def _alike(siblings: Sequence[Member], type_of: Callable[[Value], TensorType]) -> bool:
    """Return whether siblings differ in the number of their outputs alone."""
    node, inputs = siblings[0]
    if node.op not in _OUTPUT_AXES or (isinstance(node.attrs, Conv) and node.attrs.groups > 1):
        return False
    if any(post_op.op != "eltwise" for post_op in node.post_ops):
        return False
    if len({sibling.name for sibling, _ in siblings}) < len(siblings):
        return False
    return all(_kind(sibling, type_of) == _kind(siblings[0], type_of) for sibling in siblings) and is_native(
        *node.results, *(type_of(value) for value in inputs.values())
    )


def _kind(sibling: Member, type_of: Callable[[Value], TensorType]) -> object:
    """Return all that siblings must agree in."""
    node, inputs = sibling
    weights_axis, axis, bias_axis = _OUTPUT_AXES.get(node.op, (0, 0, 0))
    weights = type_of(inputs["weights"]) if "weights" in inputs else None
    if weights is None or (node.op == "matmul" and weights.ndim != 2):
        return node.name  # nothing is like it
    tail = tuple((post_op.op, post_op.attrs) for post_op in node.post_ops)
    kind: list[object] = [node.op, node.attrs, tail, sorted(inputs), inputs["src"]]
    kind += [_with_size(weights, weights_axis, 0), _with_size(node.results[0], axis, 0)]
    if "bias" in inputs:
        bias = type_of(inputs["bias"])
        outputs = weights.dims[weights_axis]
        # a column, or one number for all outputs, says nothing about a single output
        kind += [_with_size(bias, bias_axis, 0), bias.size == outputs == bias.dims[bias_axis] or node.name]
    return kind


def _joined(
    name: str, siblings: Sequence[Member], operand: str, axis: int, type_of: Callable[[Value], TensorType]
) -> Member:
    values = {f"src_{index}": inputs[operand] for index, (_, inputs) in enumerate(siblings)}
    types = [type_of(value) for value in values.values()]
    whole = _with_size(types[0], axis, sum(type_.dims[axis] for type_ in types))
    return Node(name, "concat", Concat(axis), (whole,), origin=siblings[0][0].origin), values


def _with_size(type_: TensorType, axis: int, size: int) -> TensorType:
    dims = list(type_.dims)
    dims[axis] = size
    return type_.with_dims(tuple(dims))
