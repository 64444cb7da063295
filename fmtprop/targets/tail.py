"""What runs behind a primitive: a kernel that applies the node's last post-op to the result, in place."""

from __future__ import annotations

from fmtprop.ir.node import Node
from fmtprop.jit import Kernel, Work

__all__ = ["start_of_result", "tail_of"]


def tail_of(node: Node, buffer: int | None = None) -> Work | None:
    """Return the work of a formatted node's kernel, None where it has none.

    Parameters
    ----------
    node : Node
        Formatted.
    buffer : int, optional
        Address of the buffer that its result lies in; without it, the work must be pointed at ``buffer +
        start_of_result(node)`` before it runs.
    """
    kernel: Kernel | None = node.choice.after if node.choice is not None else None
    if kernel is None:
        return None
    pointer = None if buffer is None else buffer + start_of_result(node)
    return Work(kernel, node.descs[0].at_start().nbytes, pointer)


def start_of_result(node: Node) -> int:
    """Return the bytes from the start of its buffer to a node's result."""
    return node.descs[0].offset0 * node.descs[0].dtype.nbytes
