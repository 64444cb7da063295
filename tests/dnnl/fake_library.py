"""A file that looks like a oneDNN library from outside: an ELF file that no loader would take."""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER, _SEGMENT, _SECTION = 64, 56, 64


def write_library(path: Path, version: tuple[int, int, int], *needs: str, function: str = "dnnl_version") -> Path:
    """Write a file whose ``dnnl_version`` returns the address of these three numbers.

    Parameters
    ----------
    path : Path
        Its folders are made.
    version : tuple of int
    *needs : str
        Names of the libraries that it is linked to.
    function : str
        Name of the function.
    """
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (function, *needs))
    dynamic = b"".join(struct.pack("<QQ", 1, strings.find(name.encode())) for name in needs) + bytes(16)
    # endbr64; lea rax, [rip + 1]; ret; the numbers
    code = b"\xf3\x0f\x1e\xfa" + b"\x48\x8d\x05" + struct.pack("<i", 1) + b"\xc3" + struct.pack("<3i", *version)
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 4, _HEADER + _SEGMENT, 12)
    parts = (code, strings, dynamic, symbols)
    offsets = [_HEADER + _SEGMENT]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, len(part), 2, 0, 1, 0)
        for kind, offset, part in zip((1, 3, 6, 11), offsets, parts, strict=False)
    )
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, offsets[-1], 0, _HEADER, _SEGMENT, 1, _SECTION, 5, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, offsets[-1], offsets[-1], 4096)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + segment + b"".join(parts) + bytes(_SECTION) + sections)
    return path
