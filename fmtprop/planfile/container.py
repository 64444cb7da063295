"""The bytes of a plan file: a safetensors file with a document of JSON and aligned blocks, each with a checksum.

::

    8 bytes          length of the header
    header           {"__metadata__": {"format": "fmtprop-plan", "version": "2", "sha256": "..."},
                      "document": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}, "block_0": ...}
    document         JSON, filled up with spaces to a whole page
    block_0 ...      filled up with zeros to 64 bytes

The header has the digest of the document, the document the checksums of the blocks; both tell damage only. Owns the
layout and its checks; knows neither graphs nor plans.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir.json_text import parse_json
from fmtprop.system.files import opened, replacing
from fmtprop.targets.memory import ALIGNMENT_NBYTES, align

FORMAT = "fmtprop-plan"
#: grows with each change of the document after which a file means something else, or an older fmtprop could not read
#: it; :mod:`~fmtprop.planfile.versions` reads the versions before
VERSION = 3

#: most bytes of a header (a hundred a block), and of a document (as of a graph file)
_MOST_HEADER_NBYTES, _MOST_DOCUMENT_NBYTES = 1 << 24, 1 << 27
#: most bytes of a file: more than any machine's memory
_MOST_NBYTES = 1 << 46
#: the document ends on a page, so blocks begin on one
_PAGE_NBYTES = 4096
#: the beginning of a plan file
OURS = re.compile(rb'.{8}\{"__metadata__":\{"format":"fmtprop-plan"', re.DOTALL)


class Container:
    """A plan file in memory, checked but for the blocks' checksums.

    `data`: all bytes. `owner`: keeps them in memory. `blocks`: flat bytes, aligned; slices of the file where that is
    aligned.
    """

    def __init__(self, data: memoryview, owner: object) -> None:
        header, start = _header(data)
        self.version, digest, spans = _entries(header, len(data) - start)
        first, last = spans[0]
        text = data[start + first : start + last]
        if last > _MOST_DOCUMENT_NBYTES:
            raise PlanError(f"its document has {last} bytes, a plan file's may have {_MOST_DOCUMENT_NBYTES}")
        if hashlib.sha256(text).hexdigest() != digest:
            raise PlanError("is damaged: its document does not have the digest that its header names")
        try:
            self.document = parse_json(bytes(text).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise PlanError(f"is damaged: byte {error.start} of its document is not UTF-8 text") from error
        whole = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        self._owner = owner
        self.blocks = [_aligned(whole[start + a : start + b]) for a, b in spans[1:]]


def mapped(path: Path) -> tuple[memoryview, object]:
    """Return the bytes of a file, mapped: processes that read it share its pages.

    Raises OSError if it cannot be read, or is no regular file.
    """
    with opened(path, _MOST_NBYTES) as file:
        if not os.fstat(file.fileno()).st_size:
            raise PlanError("is empty; a plan file comes from net.save(path)")
        # private pages are the file's until they are written, which nobody does; PyTorch wants memory to be writable
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return memoryview(pages), pages


def checksum_of(block: torch.Tensor) -> int:
    """Return the checksum of flat bytes: it tells damage, in a third of the time of a digest."""
    return zlib.crc32(block.numpy().data)


def padded(block: torch.Tensor) -> torch.Tensor:
    """Return flat bytes, filled up with zeros to the alignment."""
    rest = align(block.numel()) - block.numel()
    return block if not rest else torch.cat((block, torch.zeros(rest, dtype=torch.uint8)))


def write(path: Path, document: dict[str, Any], blocks: Sequence[torch.Tensor]) -> None:
    """Write a plan file; a reader never sees an incomplete one.

    Raises OSError if the file system refuses, or another program's file has that name.
    """
    with replacing(path, OURS) as temporary, temporary.open("wb") as file:
        for part in parts(document, blocks):
            file.write(part)


def parts(document: dict[str, Any], blocks: Sequence[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a plan file one part after the other; blocks have whole alignments (:func:`padded`)."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > _MOST_DOCUMENT_NBYTES:
        raise PlanError(f"a plan file's document may have {_MOST_DOCUMENT_NBYTES} bytes, this one needs {len(text)}")
    text = text.ljust(-(-len(text) // _PAGE_NBYTES) * _PAGE_NBYTES)
    meta = {"format": FORMAT, "version": str(VERSION), "sha256": hashlib.sha256(text).hexdigest()}
    head: dict[str, Any] = {"__metadata__": meta}
    end = 0
    sizes = [len(text), *(block.numel() for block in blocks)]
    for index, size in enumerate(sizes):
        head[_name(index)] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(head, separators=(",", ":")).encode()
    header = header.ljust(-(-(8 + len(header)) // _PAGE_NBYTES) * _PAGE_NBYTES - 8)
    yield len(header).to_bytes(8, "little") + header
    yield text
    for block in blocks:
        yield block.numpy().data


def _name(index: int) -> str:
    return f"block_{index - 1}" if index else "document"


def _header(data: memoryview) -> tuple[Any, int]:
    """Return the header, and the byte after it."""
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not OURS.match(data[:_PAGE_NBYTES]):
        raise PlanError("is not a plan file; one comes from net.save(path) or `fmtprop compile MODEL -o FILE`")
    if length > min(_MOST_HEADER_NBYTES, len(data) - 8):
        raise PlanError(f"is cut off or damaged: its header should have {length} bytes")
    try:
        header = parse_json(bytes(data[8 : 8 + length]).decode("utf-8"))
    except (FmtpropError, UnicodeDecodeError) as error:
        raise PlanError(f"is damaged: its header is not JSON: {error}") from error
    return header, 8 + length


def _entries(header: Any, nbytes: int) -> tuple[int, str, list[tuple[int, int]]]:
    """Return the document's version and digest, and where each entry begins and ends behind the header."""
    meta = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not isinstance(meta.get("sha256"), str):
        raise PlanError("is damaged: its header lacks what a plan file's says")
    known = {str(version): version for version in range(1, VERSION + 1)}
    if meta.get("version") not in known:
        raise PlanError(
            f"has version {str(meta.get('version'))[:20]!r}, this fmtprop reads versions 1 to {VERSION}: it needs a "
            "newer fmtprop, or compile the model and save the plan again"
        )
    end, spans = 0, []
    for index, (name, entry) in enumerate(header.items()):
        size = entry.get("shape", [None])[0] if isinstance(entry, dict) and _is_flat(entry.get("shape")) else None
        expected = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + (size or 0)]}
        if name != _name(index) or size is None or entry != expected or size % ALIGNMENT_NBYTES:
            raise PlanError(f"is damaged: its header's entry {index} is not what a plan file has there")
        spans.append((end, end + size))
        end += size
    if not spans or end != nbytes:
        raise PlanError(f"is cut off or damaged: its header describes {end} bytes, {nbytes} follow")
    return known[meta["version"]], meta["sha256"], spans


def _is_flat(shape: object) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) == 1
        and isinstance(shape[0], int)
        and not isinstance(shape[0], bool)
        and shape[0] >= 0
    )


def _aligned(block: torch.Tensor) -> torch.Tensor:
    """Return flat bytes at an aligned address: themselves in a mapped file, a copy in bytes of an unpickled one."""
    if not block.numel() or block.data_ptr() % ALIGNMENT_NBYTES == 0:
        return block
    from fmtprop.targets.memory import aligned_bytes

    return aligned_bytes(block.numel()).copy_(block)
