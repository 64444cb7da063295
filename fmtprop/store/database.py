"""The store's file: a SQLite database of one table, opened for a moment at a time.

SQLite promises that a killed process loses no committed record, that many processes may write at once, and that old
records survive a failed write. It does not notice a changed byte on disk, so each record has a checksum. The next
write replaces a damaged or foreign file by the records that can still be read.

Three rules are kept here:

- No connection crosses a fork: the call that opens a connection closes it, and a fork waits for that.
- Only SQLite opens the file: closing any other descriptor of it releases the process's locks.
- The journal is a rollback journal: it works in a read-only directory and on a network file system. A write-ahead log
  would need shared memory, and a checkpoint whenever it is closed.
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import TypeVar

from fmtprop.system.files import check_regular, locked
from fmtprop.system.locks import ProcessLock

#: a record's kind and key, and its value
Records = dict[tuple[str, str], float | str]

_State = tuple[int, ...]

_T = TypeVar("_T")

# a file with another table is of another version, thus foreign
_TABLE = "CREATE TABLE record (kind TEXT, key TEXT, value, checksum INTEGER, UNIQUE (kind, key))"

#: the largest possible number of records takes a third of this, so a larger file is foreign
_MAX_NBYTES = 1 << 28

#: records that are kept: the newest ones
MOST_RECORDS = 250_000

#: pause between two attempts while another process has locked the file
_PAUSE_SECONDS = 0.005

#: a file that changed so long ago, at least, has another time of change when it changes again
_TICK_SECONDS = 0.02

#: path, state and sound records of the file that was read last: a process that compiles many models reads it once
_known: tuple[Path, _State, Records] | None = None

_connected = ProcessLock()


def _before_fork() -> None:
    """Wait until no thread has a connection: a child would inherit SQLite's locks and could never release them."""
    _connected.current.acquire()


def _after_fork() -> None:
    _connected.current.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)  # a child's ProcessLock is new


def read(path: Path, timeout: float) -> tuple[Records, str]:
    """Return the sound records of a file, and a description of its damage.

    Raises OSError if the file is not regular, is too large, or cannot be read now.
    """
    global _known
    known, state, records = _known, _state(path), Records()
    if known is not None and known[:2] == (path, state) and _is_settled(state):
        return known[2], ""
    try:
        damage = _with(path, "rw", timeout, lambda connection: _load(connection, records))
    except FileNotFoundError:
        return {}, ""
    except sqlite3.DatabaseError as error:
        damage = f"damaged ({error}); unreadable records are ignored"
    _known = None if damage else (path, state, records)
    return records, damage


def write(path: Path, records: Records, *, sync: bool, damaged: bool, timeout: float) -> None:
    """Add records to a file; create or replace the file if necessary."""
    global _known
    path.parent.mkdir(parents=True, exist_ok=True)
    if not damaged:
        known, before = _known, _state(path)
        with suppress(sqlite3.DatabaseError):
            _with(path, "rwc", timeout, lambda connection: _insert(connection, records, sync))
            if known is not None and known[:2] == (path, before):
                known[2].update(records)
                _known = path, _state(path), known[2]
            return
    with locked(path, timeout):
        sound, damage = read(path, timeout)  # another process may have replaced the file by now
        if damage:
            # the journal first: SQLite would apply it to the next file of this name
            for file in (_journal(path), path):
                file.unlink(missing_ok=True)
        try:
            _with(path, "rwc", timeout, lambda connection: _insert(connection, {**sound, **records}, sync))
        except sqlite3.DatabaseError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error


def _state(path: Path) -> _State:
    """Return what changes with a file; empty without a file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev


def _is_settled(state: _State) -> bool:
    return bool(state) and state[0] < (time() - _TICK_SECONDS) * 1e9


def _load(connection: sqlite3.Connection, records: Records) -> str:
    """Add the sound records to `records`; return a description of the damage."""
    tables = _tables(connection)
    if not tables:
        return ""
    if tables != [_TABLE]:
        return "not written by this version of fmtprop; it is ignored"
    records.clear()
    damaged = 0
    for kind, key, value, checksum in connection.execute("SELECT * FROM record ORDER BY rowid"):
        if checksum == _checksum(kind, key, value) and _is_sound(value):
            records[kind, key] = value
        else:
            damaged += 1
    return f"damaged in {damaged} records; they are ignored" if damaged else ""


def _insert(connection: sqlite3.Connection, records: Records, sync: bool) -> None:
    connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
    connection.execute("BEGIN IMMEDIATE")
    tables = _tables(connection)
    if not tables:
        connection.execute(_TABLE)
    elif tables != [_TABLE]:
        raise sqlite3.DatabaseError("another table")
    rows = [(*name, value, _checksum(*name, value)) for name, value in records.items()]
    connection.executemany("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", rows)
    connection.execute("DELETE FROM record WHERE rowid <= (SELECT max(rowid) FROM record) - ?", (MOST_RECORDS,))
    connection.execute("COMMIT")


def _tables(connection: sqlite3.Connection) -> list[str]:
    return [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]


def _is_sound(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, float) and 0 < value < math.inf)


def _checksum(kind: str, key: str, value: float | str) -> int:
    return zlib.crc32(f"{kind} {key} {value!r}".encode())


def _with(path: Path, mode: str, timeout: float, work: Callable[[sqlite3.Connection], _T]) -> _T:
    """Call `work` with a connection and return its result; retry while another process has locked the file.

    Raises sqlite3.DatabaseError if the file is damaged or foreign.
    """
    deadline = monotonic() + timeout
    while True:
        try:
            with _connected.current, closing(_connect(path, mode)) as connection:
                return work(connection)
        except sqlite3.OperationalError as error:
            if "decode" in str(error):  # Python's message about damaged text
                raise sqlite3.DatabaseError(str(error)) from error
            if "locked" not in str(error) or monotonic() >= deadline:
                raise OSError(errno.EIO, str(error), str(path)) from error
        sleep(_PAUSE_SECONDS)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    for file in (_journal(path), path):
        with suppress(FileNotFoundError):
            check_regular(file)
    try:
        if path.stat().st_size > _MAX_NBYTES:
            raise OSError(errno.EFBIG, f"it is larger than {_MAX_NBYTES} bytes", str(path))
    except FileNotFoundError:
        if mode == "rw":
            raise
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=0.0, isolation_level=None)


def _journal(path: Path) -> Path:
    return Path(f"{path}-journal")
