"""Layout algebra: how a logical tensor lies in memory.

One descriptor type, :class:`MemoryDesc`, for oneDNN's plain and blocked formats; ``directml`` and ``xla`` are
dialects that convert to and from it. Pure arithmetic on Python integers and numpy arrays: needs neither torch
nor oneDNN, and knows nothing of graphs.
"""

from __future__ import annotations

from fmtprop.layout import directml, xla
from fmtprop.layout.buffers import convert, pack, unpack
from fmtprop.layout.desc import FormatKind, MemoryDesc
from fmtprop.layout.dtypes import DataType, cast
from fmtprop.layout.picture_svg import draw_svg
from fmtprop.layout.picture_text import draw_text
from fmtprop.layout.tags import FormatTag, InnerBlock, format_tag, parse_tag

__all__ = [
    "DataType",
    "FormatKind",
    "FormatTag",
    "InnerBlock",
    "MemoryDesc",
    "cast",
    "convert",
    "directml",
    "draw_svg",
    "draw_text",
    "format_tag",
    "pack",
    "parse_tag",
    "unpack",
    "xla",
]
