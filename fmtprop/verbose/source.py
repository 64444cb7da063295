"""The lines of a log, from a file or standard input, compressed or not; long lines come in pieces."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

from fmtprop.errors import FmtpropError

#: characters that are read at once, and characters of a piece: longer lines come in several pieces
_BLOCK_CHARACTERS, PIECE_CHARACTERS = 1 << 20, 1 << 16

#: the beginnings of compressed files
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
#: the beginnings of files that something else has to unpack, their form, and a command
_FOREIGN = {b"\x28\xb5\x2f\xfd": ("Zstandard", "zstdcat"), b"PK\x03\x04": ("zip", "unzip -p")}


def pieces(name: str) -> Generator[str, None, None]:
    """Yield the lines of a log, long ones in pieces.

    `name`: a path, ``-`` for standard input. Files of gzip, bzip2 and xz are unpacked.
    """
    try:
        with open(0 if name == "-" else Path(name), "rb", closefd=name != "-") as file, _text(file, name) as text:
            yield from _lines(text)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise FmtpropError(f"{name} is compressed and damaged: {error}") from error
    except OSError as error:
        raise FmtpropError(f"{name} cannot be read: {error.strerror or error}") from error


def _lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines of a text, long ones in pieces."""
    rest = ""
    while block := file.read(_BLOCK_CHARACTERS):
        *lines, rest = (rest + block).split("\n")
        yield from lines
        if len(rest) > PIECE_CHARACTERS:
            yield rest
            rest = ""
    yield rest


def _text(file: io.BufferedReader, name: str) -> IO[str]:
    head = file.peek(8)
    for magic, (form, command) in _FOREIGN.items():
        if head.startswith(magic):
            raise FmtpropError(f"{name} is compressed by {form}: unpack it, {command} FILE | fmtprop verbose -")
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    source = file if opener is None else opener(file)
    return io.TextIOWrapper(source, encoding=_encoding(source.peek(8)[:8]), errors="replace")


def _encoding(head: bytes) -> str:
    """Return the encoding of a text by its first bytes: PowerShell's ``>`` writes two bytes per character."""
    for encoding in ("utf-16-le", "utf-16-be"):
        low, high = (head[::2], head[1::2]) if encoding == "utf-16-le" else (head[1::2], head[::2])
        without_mark = len(head) > 1 and not any(high) and all(low)  # the first characters are ASCII
        if head.startswith("\ufeff".encode(encoding)) or without_mark:
            return encoding
    return "utf-8"
