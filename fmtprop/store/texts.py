"""Texts found on this machine, by key: a file each, since they are long and few processes read more than one."""

from __future__ import annotations

import errno
import logging
import re
import zlib
from contextlib import suppress
from pathlib import Path

from fmtprop.store.directory import cache_directory
from fmtprop.system import files

_LOG = logging.getLogger(__name__)

#: most bytes of a text, and of its file
_MOST_NBYTES, _MOST_PACKED_NBYTES = 1 << 26, 1 << 24

#: name of their folder beside the store
FOLDER = "choices"

#: texts that are kept: the newest ones
MOST_TEXTS = 200

#: zlib's first bytes for its quickest compression
_OURS = re.compile(rb"\x78\x01")


def text_of(key: str) -> str | None:
    """Return the text of a key; None if there is none or its file is damaged."""
    try:
        packed = files.read(_path(key), _MOST_PACKED_NBYTES)
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, _MOST_NBYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zlib.error) as error:
        _LOG.warning("%s is not read: %s", _path(key), error)
        return None
    return text if unpacking.eof else None  # the checksum stands at the end


def keep_text(key: str, text: str) -> None:
    """Keep a text for later processes; the oldest ones go."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path, _OURS) as temporary:
            temporary.write_bytes(zlib.compress(text.encode(), 1))
        for _, old in sorted(_dated(path.parent))[:-MOST_TEXTS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        # the store tells of a folder that nobody may write
        level = logging.INFO if error.errno in (errno.EROFS, errno.EACCES) else logging.WARNING
        _LOG.log(level, "%s is not written, so a later process plans again: %s", path, error.strerror or error)


def _path(key: str) -> Path:
    return cache_directory() / FOLDER / f"{key}.z"


def _dated(directory: Path) -> list[tuple[float, Path]]:
    found = []
    for path in directory.glob("*.z"):
        with suppress(FileNotFoundError):  # another process removed it
            found.append((path.stat().st_mtime, path))
    return found
