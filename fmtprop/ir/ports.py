"""The ports of a node: names and roles of its operands and results.

Owns the only rule that reads a name: whether an operand is learned, belongs to a post-op or is a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.op import Operand, opdef


class Role(Enum):
    """Role of a port."""

    #: an activation that the op itself reads
    SOURCE = "source"
    #: a learned tensor that the op itself reads
    PARAMETER = "parameter"
    #: bytes that the forward primitive of a gradient wrote, in a format of its own
    WORKSPACE = "workspace"
    #: a tensor that a post-op reads
    POST_OP = "post-op"
    #: a tensor that the node writes
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Port:
    """One operand or result of one node."""

    #: the name in the graph's edges, in a choice's formats and in pins
    name: str
    role: Role
    #: declaration in the op; for a post-op's operand, in the post-op's op
    declared: Operand
    #: index among the inputs of a variadic operand, among the node's post-ops, or among the results
    index: int = 0
    post_op: PostOp | None = None


def port(node: Node, name: str) -> Port:
    """Return the port of a node with a name.

    Raises GraphError if the node has no such port.
    """
    for index, post_op in enumerate(node.post_ops):
        if name in post_op.operands:
            first, *others = opdef(post_op.op).operands  # the first operand is the result of the op before it
            place = post_op.operands.index(name)
            return Port(name, Role.POST_OP, others[place] if place < len(others) else first, index, post_op)
    declaration = opdef(node.op)
    results = result_names(node)
    if name in results:
        index = results.index(name)
        declared = declaration.results[index] if index < len(declaration.results) else Operand(name, "DST")
        return Port(name, Role.RESULT, declared, index)
    operand = declaration.operand(name)
    return Port(name, _role(operand), operand, operand.index_of(name) or 0)


def _role(operand: Operand) -> Role:
    if operand.is_workspace:
        return Role.WORKSPACE
    return Role.PARAMETER if operand.parameter else Role.SOURCE


def ports(node: Node, names: Iterable[str]) -> list[Port]:
    """Return the ports of these names, in this order; see :func:`port`."""
    return [port(node, name) for name in names]


def sources(node: Node, names: Iterable[str]) -> list[str]:
    """Return the names that are activations read by the op itself."""
    return [found.name for found in ports(node, names) if found.role is Role.SOURCE]


def result_names(node: Node) -> tuple[str, ...]:
    """Return the names of a node's results: as its op declares them, or ``dst_1``, ``dst_2``… by their index.

    >>> import fmtprop.ops
    >>> from fmtprop.ir import TensorType
    >>> node = Node("split_0", "aten", fmtprop.ops.HostCall("aten.split.Tensor", "{}"), (TensorType((2,)),) * 3)
    >>> result_names(node)
    ('dst', 'dst_1', 'dst_2')
    """
    declared, count = opdef(node.op).result_names, len(node.results)
    if len(declared) == count:
        return declared
    more = range(len(declared), count)
    return (*declared, *(f"dst_{index}" for index in more))[:count]
