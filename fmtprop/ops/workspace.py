"""Workspaces: the bytes that a primitive of training keeps for its gradient.

In a graph, a workspace is one byte. Its format is opaque: it has the real size, and the name of the implementation that
wrote it. No reorder leads to another one, so both passes run by the same implementation, or both in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fmtprop.errors import FormatError
from fmtprop.ir import Lowering, Operand, TensorType

if TYPE_CHECKING:
    from fmtprop.dnnl import PrimitiveDesc
    from fmtprop.layout import MemoryDesc

WORKSPACE = Operand("workspace", "WORKSPACE")
WORKSPACE_TYPE = TensorType((1,), "u8")


def lowering_with_workspace(
    pd: PrimitiveDesc, names: Iterable[str], writer: PrimitiveDesc, *, is_writer: bool = False
) -> Lowering:
    """Return a lowering with the workspace of a forward descriptor."""
    wanted = tuple(name for name in names if name != WORKSPACE.name)

    def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
        own = candidate.query_md("workspace")
        is_other = is_writer and candidate.impl != writer.impl
        if is_other or own is None or own != writer.query_md("workspace"):
            raise FormatError(f"{candidate.impl} has another workspace than {writer.impl}")
        found = {name: candidate.query_md(name) for name in wanted}
        formats = {name: native.desc for name, native in found.items() if native is not None}
        return {**formats, WORKSPACE.name: own.as_workspace(writer.impl)}

    return Lowering(pd, resolve)
