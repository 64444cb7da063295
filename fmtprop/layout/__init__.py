"""Layout algebra: how a logical tensor lies in memory.

One descriptor type, :class:`MemoryDesc`, for oneDNN's plain and blocked formats. Pure arithmetic on Python integers and
numpy arrays: needs neither torch nor oneDNN, and knows nothing of graphs.
"""

from __future__ import annotations

from fmtprop.layout.buffers import convert, pack, unpack
from fmtprop.layout.desc import FormatKind, MemoryDesc
from fmtprop.layout.dtypes import DataType, cast
from fmtprop.layout.tags import InnerBlock, format_tag, parse_tag

__all__ = [
    "DataType",
    "FormatKind",
    "InnerBlock",
    "MemoryDesc",
    "cast",
    "convert",
    "format_tag",
    "pack",
    "parse_tag",
    "unpack",
]
