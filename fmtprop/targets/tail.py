"""Kernels of our own in a choice: one that applies the last post-op behind a primitive, or one instead of it."""

from __future__ import annotations

from fmtprop.ir.node import Choice, Node
from fmtprop.jit import Kernel, StandaloneKernel, Work
from fmtprop.passes.target import Candidate

__all__ = ["own_code", "tail_of"]


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
        Address of the buffer that its result lies in, as the node's own format says; without it, the work must be
        pointed at the result's first element before it runs.
    """
    kernel: Kernel | None = node.choice.after if node.choice is not None else None
    if kernel is None:
        return None
    desc = node.descs[0]
    pointer = None if buffer is None else buffer + desc.offset0 * desc.dtype.nbytes
    return Work(kernel, desc.at_start().nbytes, pointer)
