"""Files: only regular files of bounded size are read, and only files that fmtprop wrote are replaced.

A path from the caller may name anything: a directory, a fifo that blocks forever, a link to an endless device, or the
caller's own model. The ``strerror`` of an :class:`OSError` names the problem; the caller of this module adds the rest
of the message.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import filelock

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a fifo"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

#: bytes at the beginning of a file that tell its kind
_HEAD_NBYTES = 4096

#: bytes of the length with which a safetensors file begins
_LENGTH_NBYTES = 8

# non-blocking: a fifo may have replaced the file after it was checked
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def path_of(path: object) -> Path:
    """Return a caller's argument as a path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise OSError(errno.EINVAL, f"a path must be a str or a pathlib.Path, got {path!r}")
    try:
        os.fsencode(text)
        possible = text != "" and "\0" not in text
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise OSError(errno.EINVAL, f"a path must name a file, got {text!r}")
    return Path(text)


def check_readable(path: Path) -> None:
    """Check that another library can read a file.

    Raises OSError if the file is missing, is not regular, or may not be read.
    """
    os.close(_open(path))


def opened(path: Path, most_nbytes: int, *, links: bool = True) -> BinaryIO:
    """Return a file, open for reading; without `links`, the path must not be a link.

    Raises OSError as for :func:`check_readable`; or the file is larger.
    """
    file = os.fdopen(_open(path, links=links), "rb")
    if os.fstat(file.fileno()).st_size > most_nbytes:
        file.close()
        raise _too_large(path, most_nbytes)
    return file


def read(path: Path, most_nbytes: int) -> bytes:
    """Return the bytes of a file."""
    with opened(path, most_nbytes) as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:  # the file may have grown, and some files of the system report no size
        raise _too_large(path, most_nbytes)
    return data


def _too_large(path: Path, most_nbytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_nbytes} bytes", str(path))


def starts_as(path: Path, head: bytes) -> bool:
    """Return whether a path leads to a file that has some bytes at its beginning, behind the length of a header."""
    with suppress(OSError, ValueError), os.fdopen(_open(path), "rb") as file:
        return file.read(_LENGTH_NBYTES + len(head))[_LENGTH_NBYTES:] == head
    return False


def check_regular(path: Path) -> None:
    """Check that a path leads to a regular file, without opening it.

    Raises OSError if the file is missing, or is not regular.
    """
    _check_kind(path, path.stat())


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold a lock on a file among all processes: the lock file next to it.

    Raises OSError if the lock file is not regular, cannot be created, or another holder did not release it.
    """
    lock = Path(f"{path}.lock")
    with suppress(FileNotFoundError):
        _check_kind(lock, lock.lstat())
    try:
        with filelock.FileLock(lock, timeout=timeout):
            yield
    except filelock.Timeout as error:
        raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock", str(path)) from error


def check_replaceable(path: Path, ours: re.Pattern[bytes] | None = None) -> Path:
    """Check that a file can be written, before the time-consuming work for its content is done.

    `ours`: the beginning of a file of this kind. Only such a file or an empty one is replaced: another one could be the
    caller's model.
    """
    file = Path(os.path.realpath(path))  # for a link to itself, Path.resolve raises another error
    if not file.parent.is_dir():
        raise OSError(errno.ENOENT, f"the directory {path.parent} does not exist; create it first", str(path))
    with suppress(FileNotFoundError):
        with os.fdopen(_open(file), "rb") as present:
            head = present.read(_HEAD_NBYTES)
        if ours is not None and head and not ours.match(head):
            raise OSError(
                errno.EEXIST,
                "there is another file of that name, which did not come from here and is not replaced; give another "
                "name, or remove it first",
                str(path),
            )
        _check_permission(file)
    _check_permission(file.parent)
    return file


@contextmanager
def replacing(path: Path, ours: re.Pattern[bytes] | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces `path` at the end, or is removed after a failure.

    Raises OSError as for :func:`check_replaceable`, or the file system refuses.
    """
    file = check_replaceable(path, ours)
    temporary = file.with_name(f".{secrets.token_hex(8)}.part")
    # created here with the process's umask: other libraries choose other permissions
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    try:
        mode = temporary.stat().st_mode
        with suppress(FileNotFoundError):
            mode = file.stat().st_mode
        yield temporary
        temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _open(path: Path, *, links: bool = True) -> int:
    """Return the descriptor of a regular file; check its kind first, as opening a device may have effects."""
    try:
        _check_kind(path, path.stat(follow_symlinks=links))
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ENOENT, "it is a link to nothing", str(path)) from None
        raise
    descriptor = os.open(path, _FLAGS if links else _FLAGS | os.O_NOFOLLOW)
    try:
        _check_kind(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "a link")
    raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def _check_permission(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission; choose another place", str(path))
