"""Version and dependencies of a oneDNN library file, without loading it.

Two oneDNN libraries in one process may share C++ symbols of different shapes, so no library is loaded only to ask for
its version. The version is read from the file: ``dnnl_version`` returns the address of a constant.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_DYNAMIC, _DYNSYM = 6, 11  # types of sections
_LOAD = 1  # type of segment
_NEEDED = 1  # tag of a dynamic entry
_X86_64 = 62
#: `lea rax, [rip + offset]`: the instruction that computes the constant's address
_LOAD_ADDRESS = b"\x48\x8d\x05"
_FULL_NAME = re.compile(r"\.so\.(\d+)\.(\d+)(?:\.(\d+))?$")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Build:
    """Facts read from a library file."""

    #: major, minor and, if the file has it, patch
    version: Version | None = None
    #: file names of the libraries that it is linked to
    needs: frozenset[str] = frozenset()


def read_build(path: str | os.PathLike[str]) -> Build:
    """Read version and dependencies of a oneDNN library from its file.

    Result: facts that the file does not have are absent. A full file name (``libdnnl.so.3.2``) is enough for the
    version.

    >>> read_build("/nowhere/libdnnl.so.3.4")
    Build(version=(3, 4), needs=frozenset())
    """
    full = _FULL_NAME.search(os.path.realpath(path))
    named = tuple(int(part) for part in full.groups() if part is not None) if full else None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            elf = _Elf(data)
            return Build(elf.version() or named, frozenset(elf.needs()))
    except (OSError, ValueError, OverflowError, IndexError, struct.error):  # missing, of another format, or damaged
        return Build(named)


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    nbytes: int
    strings: int  # index of the section with its names


class _Elf:
    """A 64-bit little-endian ELF file; raises `ValueError` or `struct.error` for another file."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self._data = data
        (self._machine,) = struct.unpack_from("<H", data, 18)
        segments, sections = struct.unpack_from("<QQ", data, 32)
        self._segments = [
            struct.unpack_from("<IIQQQQ", data, segments + k * 56) for k in range(struct.unpack_from("<H", data, 56)[0])
        ]
        headers = [
            struct.unpack_from("<IIQQQQI", data, sections + k * 64)
            for k in range(struct.unpack_from("<H", data, 60)[0])
        ]
        self._sections = [_Section(kind, offset, size, link) for _, kind, _, _, offset, size, link in headers]

    def needs(self) -> Iterator[str]:
        """Yield the names of the libraries that it is linked to."""
        section, names = self._of_kind(_DYNAMIC)
        for at in range(section.offset, section.offset + section.nbytes, 16):
            tag, value = struct.unpack_from("<QQ", self._data, at)
            if tag == _NEEDED:
                start = names.offset + value
                yield self._data[start : self._data.find(b"\0", start)].decode("utf-8", "replace")

    def version(self) -> Version | None:
        """Return the three numbers at the address that ``dnnl_version`` returns."""
        function = self._function(b"dnnl_version")
        if function is None or self._machine != _X86_64:
            return None
        start, nbytes = function
        at = self._data.find(_LOAD_ADDRESS, self._offset(start), self._offset(start) + nbytes)
        if at < 0:
            return None
        end = start + at - self._offset(start) + 7
        (distance,) = struct.unpack_from("<i", self._data, at + 3)
        numbers = struct.unpack_from("<3i", self._data, self._offset(end + distance))
        return numbers if all(0 <= number < 1000 for number in numbers) else None  # otherwise it is another function

    def _function(self, name: bytes) -> tuple[int, int] | None:
        """Return address and size of an exported function."""
        section, names = self._of_kind(_DYNSYM)
        table = self._data[names.offset : names.offset + names.nbytes]
        wanted = table.find(b"\0" + name + b"\0") + 1
        if not wanted:
            return None
        symbols = self._data[section.offset : section.offset + section.nbytes]
        for at, _, _, index, address, nbytes in struct.iter_unpack("<IBBHQQ", symbols):
            if at == wanted and index:
                return address, nbytes
        return None

    def _of_kind(self, kind: int) -> tuple[_Section, _Section]:
        section = next((section for section in self._sections if section.kind == kind), None)
        if section is None:
            raise ValueError(f"no section of type {kind}")
        return section, self._sections[section.strings]

    def _offset(self, address: int) -> int:
        """Return the file offset of a load address."""
        for kind, _, offset, start, _, nbytes in self._segments:
            if kind == _LOAD and start <= address < start + nbytes:
                return int(offset + address - start)
        raise ValueError(f"nothing is loaded at {address:#x}")
