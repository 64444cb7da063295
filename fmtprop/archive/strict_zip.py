"""Strict reader of zip files: the container of a ``.pt2`` and of every ``torch.save`` file in it.

Zip readers disagree about irregular archives: bytes before the first member, two members with one name, two
directories, names that differ only in case. Then PyTorch could open other data than a check saw. So this reader
accepts only the form that PyTorch writes: uncompressed members, one after another from the first byte, and one
directory at the end. Nothing is decompressed, so no archive can grow in memory.

Must not know the meaning of members; :mod:`fmtprop.archive.pt2_safety` does.

References
----------
PKWARE, "APPNOTE.TXT: .ZIP File Format Specification", sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from fmtprop.errors import ImportModelError

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")

# PyTorch sets bit 3 (sizes follow the data) and bit 11 (names are UTF-8). Bit 0 would mean encryption.
_KNOWN_FLAGS = 0x0808
# A data descriptor: signature, checksum and two sizes of 8 bytes.
_LONGEST_DESCRIPTOR_NBYTES = 24
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_NAME = re.compile(rb"[ -\[\]-~]+")


class _Entry(NamedTuple):
    name: str
    flags: int
    offset: int
    size: int


def read_members(archive: memoryview, where: str) -> Mapping[str, memoryview]:
    """Return the members of a zip file in PyTorch's form.

    `archive`: the whole file, in bytes.
    """
    if not archive:
        raise ImportModelError(f"{where} is empty; export the model again with torch.export.save")
    if bytes(archive[:4]) != b"PK\x03\x04":
        raise ImportModelError(f"{where} is not a zip file, so it is not a torch.export archive")
    start, end, count = _directory(archive, where)
    entries = _entries(archive[start:end], count, where)
    spans = _spans(archive, entries, start, where)
    return {entry.name: archive[begin:stop] for entry, (begin, stop) in zip(entries, spans, strict=True)}


def _directory(archive: memoryview, where: str) -> tuple[int, int, int]:
    """Find the central directory: its first byte, the byte after it, and its number of entries."""
    at = len(archive) - _END.size
    if at < 0 or bytes(archive[at : at + 4]) != b"PK\x05\x06":
        raise ImportModelError(
            f"{where} is truncated, or has bytes after its end: no zip directory ends at byte {len(archive)}; "
            "copy or download it again"
        )
    _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(archive, at)
    end = at
    locator = at - _END64_LOCATOR.size
    if locator >= 0 and bytes(archive[locator : locator + 4]) == b"PK\x06\x07":
        end = locator - _END64.size
        wide = _end64(archive, locator, end, where)
        for small, large, full in zip((count, size, start), wide, (_FULL16, _FULL32, _FULL32), strict=True):
            if small not in (large, full):
                raise ImportModelError(f"{where} has two directories that disagree: {small} against {large}")
        count, size, start = wide
        here = min(here, count) if here == _FULL16 else here
    if disk or first_disk or (here != count and count < _FULL16) or start + size != end:
        raise ImportModelError(
            f"{where} has a zip directory at another place than it declares; PyTorch never does this"
        )
    return start, end, count


def _end64(archive: memoryview, locator: int, at: int, where: str) -> tuple[int, int, int]:
    _, _, position, _ = _END64_LOCATOR.unpack_from(archive, locator)
    if at < 0 or position != at or bytes(archive[at : at + 4]) != b"PK\x06\x06":
        raise ImportModelError(f"{where} has a zip64 directory at another place than it declares")
    _, _, _, _, disk, first_disk, here, count, size, start = _END64.unpack_from(archive, at)
    if disk or first_disk or here != count:
        raise ImportModelError(f"{where} is one part of a zip file in several parts")
    return count, size, start


def _entries(directory: memoryview, count: int, where: str) -> list[_Entry]:
    entries: list[_Entry] = []
    seen: dict[str, str] = {}
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory) or bytes(directory[at : at + 4]) != b"PK\x01\x02":
            raise ImportModelError(f"{where} has a damaged zip directory at entry {len(entries)}")
        fields = _ENTRY.unpack_from(directory, at)
        name_length, extra_length, comment_length = fields[10:13]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        if at > len(directory):
            raise ImportModelError(f"{where} has a damaged zip directory at entry {len(entries)}")
        name = _check_name(bytes(directory[name_at:extra_at]), where)
        entry = _check_entry(name, fields, bytes(directory[extra_at : extra_at + extra_length]), where)
        # PyTorch ignores the case of names.
        if (other := seen.setdefault(name.lower(), name)) != name or len(seen) == len(entries):
            raise ImportModelError(f"{where} has two members of one name: {other!r} and {name!r}")
        entries.append(entry)
    if at != len(directory):
        raise ImportModelError(f"{where} has {len(directory) - at} bytes in its zip directory that are not an entry")
    return entries


def _check_name(raw: bytes, where: str) -> str:
    if not _NAME.fullmatch(raw):
        raise ImportModelError(f"{where} has a member with an unprintable name {raw!r}")
    name = raw.decode("ascii")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ImportModelError(f"{where} has member {name!r}; this name would lead out of the archive")
    return name


def _check_entry(name: str, fields: tuple[int, ...], extra: bytes, where: str) -> _Entry:
    _, _, _, flags, method, _, _, _, packed, size, _, _, _, disk, _, _, offset = fields
    if method:
        raise ImportModelError(
            f"{where}: member {name!r} is compressed (zip method {method}); PyTorch stores members as they are. "
            "Export the model again with torch.export.save instead of packing the file anew"
        )
    if flags & ~_KNOWN_FLAGS:
        raise ImportModelError(f"{where}: member {name!r} is encrypted or of an unknown kind (zip flags {flags:#06x})")
    wide = _zip64_values(extra, name, where)
    values = []
    for value in (size, packed, offset):
        if value == _FULL32:
            if not wide:
                raise ImportModelError(f"{where}: member {name!r} has no size")
            value = wide.pop(0)
        values.append(value)
    size, packed, offset = values
    if size != packed:
        raise ImportModelError(f"{where}: member {name!r} is stored as it is, yet declares {packed} and {size} bytes")
    if disk:
        raise ImportModelError(f"{where} is one part of a zip file in several parts")
    return _Entry(name, flags, offset, size)


def _zip64_values(extra: bytes, name: str, where: str) -> list[int]:
    """Return the 8-byte sizes and offset of a directory entry, as many as it has."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if kind == 1:
            return list(struct.unpack_from(f"<{min(len(body) // 8, 3)}Q", body))
        at += 4 + length
    if at != len(extra):
        raise ImportModelError(f"{where}: member {name!r} has a damaged zip entry")
    return []


def _spans(archive: memoryview, entries: list[_Entry], limit: int, where: str) -> list[tuple[int, int]]:
    """Check that members follow each other without gap or overlap; return the range of each member's bytes."""
    spans: dict[str, tuple[int, int]] = {}
    free = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if not free <= entry.offset <= free + (_LONGEST_DESCRIPTOR_NBYTES if spans else 0):
            raise ImportModelError(f"{where}: member {entry.name!r} does not begin where the one before it ends")
        if entry.offset + _LOCAL.size > limit:
            raise ImportModelError(f"{where} is truncated in member {entry.name!r}")
        magic, _, flags, method, _, _, _, packed, size, name_length, extra_length = _LOCAL.unpack_from(
            archive, entry.offset
        )
        name_at = entry.offset + _LOCAL.size
        begin = name_at + name_length + extra_length
        free = begin + entry.size
        if free > limit:
            raise ImportModelError(f"{where} is truncated: member {entry.name!r} declares {entry.size} bytes")
        agrees = (
            magic == b"PK\x03\x04"
            and bytes(archive[name_at : name_at + name_length]) == entry.name.encode("ascii")
            and flags == entry.flags
            and method == 0
            and {packed, size} <= {entry.size, 0 if flags & 8 else entry.size, _FULL32}
        )
        if not agrees:
            raise ImportModelError(f"{where}: member {entry.name!r} is described in two ways that disagree")
        spans[entry.name] = (begin, free)
    if limit - free > _LONGEST_DESCRIPTOR_NBYTES:
        raise ImportModelError(f"{where} has {limit - free} bytes that belong to no member")
    return [spans[entry.name] for entry in entries]
