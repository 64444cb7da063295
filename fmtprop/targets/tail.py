"""Kernels of our own in a choice: one that applies the last post-op behind a primitive, or one instead of it."""

from __future__ import annotations

from fmtprop.ir.node import Choice, Node
from fmtprop.jit import Kernel, StandaloneKernel, Work
from fmtprop.passes.target import Candidate

__all__ = ["own_code", "start_of_result", "tail_of"]


def own_code(way: Candidate | Choice) -> dict[str, str]:
    """Return what is to be part of a key under which something about a way to run a node is remembered."""
    if isinstance(way.handle, StandaloneKernel):
        return {"kernel": way.handle.fingerprint}
    return {} if way.after is None else {"after": way.after.fingerprint}


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
