"""Files: only regular ones are read, as far as a bound, and only files of ours are replaced.

A path of the caller's may name anything: a directory, a fifo, for whose other end one would wait forever, a link to a
device that never ends, or the caller's own model. What stands in the way is told by an :class:`OSError`, whose
``strerror`` says what it is; who asked tells the rest.
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

import filelock

__all__ = ["check_readable", "check_regular", "check_replaceable", "locked", "path_of", "read", "replacing"]

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a fifo"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

#: bytes in which a file says what it is
_HEAD_NBYTES = 4096

# a fifo that has taken a file's place since it was looked at keeps nobody waiting
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def path_of(path: object) -> Path:
    """Return what a caller gave as a path.

    Raises
    ------
    OSError
        It is none, or no file can have that name.
    """
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
    """Check that somebody else's function can be given a file to read.

    Raises
    ------
    OSError
        Nothing is there, it is no regular file, or it may not be read.
    """
    os.close(_open(path))


def read(path: Path, most_nbytes: int) -> bytes:
    """Return what a file holds.

    Parameters
    ----------
    path : Path
        A regular file, or a link to one.
    most_nbytes : int
        Bytes that it may have.

    Raises
    ------
    OSError
        As :func:`check_readable`; or it is larger.
    """
    with os.fdopen(_open(path), "rb") as file:
        fits = os.fstat(file.fileno()).st_size <= most_nbytes
        data = file.read(most_nbytes + 1) if fits else b""
    if not fits or len(data) > most_nbytes:  # it may have grown, and some of the system's own have no size
        raise OSError(errno.EFBIG, f"it is larger than {most_nbytes} bytes", str(path))
    return data


def check_regular(path: Path) -> None:
    """Check that a path leads to a regular file, without opening it.

    Raises
    ------
    OSError
        Nothing is there, or it is no regular file.
    """
    _check_kind(path, path.stat())


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock beside a file, among all processes.

    Parameters
    ----------
    path : Path
        The file that is to be changed.
    timeout : float
        Seconds to wait for another holder.

    Raises
    ------
    OSError
        The lock is no regular file, cannot be made, or another holder did not let go.
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
    """Check that a file can be written, before the work whose result it holds is done.

    Parameters
    ----------
    path : Path
        Where to; a link leads to the file that is meant.
    ours : re.Pattern, optional
        How a file of the same kind begins. Nothing else is replaced but an empty file: it would be the caller's model.

    Returns
    -------
    Path
        Without links.

    Raises
    ------
    OSError
        It is no regular file, none of ours, there is no directory to hold it, or it may not be written.
    """
    file = Path(os.path.realpath(path))  # Path.resolve has another error for a link to itself
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
    """Yield a path to write to, which takes the place of another once it is whole; nothing is left of a failure.

    Parameters
    ----------
    path, ours
        As :func:`check_replaceable`.

    Raises
    ------
    OSError
        As :func:`check_replaceable`, or the file system refused.
    """
    file = check_replaceable(path, ours)
    temporary = file.with_name(f".{secrets.token_hex(8)}.part")
    # made here, as the process's mask says: other makers have ideas of their own about who may read it
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


def _open(path: Path) -> int:
    """Return the descriptor of a regular file. It is looked at first: opening a device may do things."""
    try:
        check_regular(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ENOENT, "it is a link to nothing", str(path)) from None
        raise
    descriptor = os.open(path, _FLAGS)
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
