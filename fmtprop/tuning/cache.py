"""The tuning cache: numbers that were measured on this machine, shared by all processes of a user.

A file is replaced as a whole: under a lock a writer merges its records with what is there, writes a temporary file
and renames it. So a reader never sees half a file and needs no lock, a killed writer leaves the old file, and a full
disk costs the new records only. (Appending would be cheaper, but leaves torn lines that somebody has to clean up.)
Each record carries its checksum: what was damaged later is left out, the rest is used.

Must not know what the numbers mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fmtprop import dnnl
from fmtprop.system.files import locked, read, replacing
from fmtprop.system.locks import ProcessLock
from fmtprop.system.machine import cpu_model
from fmtprop.tuning.directory import cache_directory

_HEADER = "fmtprop tuning 1"

#: bytes; a million records are a third of this: whatever is larger is not ours
_MAX_NBYTES = 1 << 28


class TuningCache:
    """Numbers by key, on disk.

    Parameters
    ----------
    path : Path, optional
        The file; by default one for this library and instruction set in the user's cache directory
        (``FMTPROP_CACHE_DIR`` overrides it).
    timeout : float, optional
        Seconds to wait for another writer.

    Warns
    -----
    RuntimeWarning
        At most once: the file cannot be read, is damaged, or cannot be written. Nothing else comes of it.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory) / "tuning.txt"
    ...     TuningCache(path).add({"problem": 1e-3})
    ...     TuningCache(path).get("problem"), TuningCache(path).get("another")
    (0.001, None)
    """

    def __init__(self, path: Path | None = None, timeout: float = 10.0) -> None:
        self.path = path if path is not None else default_path()
        self._timeout = timeout
        self._warned = False
        self._lock = ProcessLock()
        self._records = self._read()
        #: what could not be written yet
        self._unsaved: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> float | None:
        """Return the number of a key, or None."""
        return self._records.get(key)

    def add(self, records: Mapping[str, float], *, sync: bool = False) -> None:
        """Remember records here and on disk.

        Parameters
        ----------
        records : mapping of str to float
            Keys without spaces; positive finite numbers, others are dropped.
        sync : bool
            Whether to wait until the disk has them, as long as a tenth of a compilation: for what took longer than that
            to measure. Without it, they and what was there before may be lost to a failure of the machine, not to one
            of the process.
        """
        good = {key: value for key, value in records.items() if _sound(key, value)}
        if not good:
            return
        with self._lock.current:
            self._records.update(good)
            self._unsaved.update(good)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with locked(self.path, self._timeout):
                    # others may have replaced what was read at the start; what they could not read is kept
                    self._records = {**self._records, **self._read(), **self._unsaved}
                    self._write(sync)
                self._unsaved.clear()
            except OSError as error:
                self._warn(
                    f"cannot write the tuning cache {self.path} ({error.strerror}); what was measured is kept in memory"
                )

    def _read(self) -> dict[str, float]:
        """Return the sound records of the file."""
        try:
            data = read(self.path, _MAX_NBYTES)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"cannot read the tuning cache {self.path} ({error.strerror}); it is ignored")
            return {}
        header, *lines = data.decode("ascii", errors="replace").split("\n")
        if header != _HEADER:
            self._warn(f"the tuning cache {self.path} is not a file of this version of fmtprop; it is ignored")
            return {}
        records: dict[str, float] = {}
        damaged = int(lines[-1:] != [""])
        for line in lines[:-1]:
            record = _parse(line)
            if record is None:
                damaged += 1
            else:
                records[record[0]] = record[1]
        if damaged:
            self._warn(f"the tuning cache {self.path} is damaged in {damaged} lines; they are ignored")
        return records

    def _write(self, sync: bool) -> None:
        """Replace the file; the caller holds the lock."""
        lines = [_HEADER, *(_line(key, value) for key, value in sorted(self._records.items()))]
        with replacing(self.path) as temporary, temporary.open("w", encoding="ascii", newline="\n") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            if sync:  # a rename may reach the disk before the data that it names
                os.fsync(file.fileno())

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def default_path() -> Path:
    """Return the file for the loaded library, its instruction set and this CPU."""
    library = dnnl.lib()
    return cache_directory() / f"tuning-{library.hash[:12]}-{library.isa}.txt"


def key_of(problem: Mapping[str, object]) -> str:
    """Return the key of a problem on this machine as it is now: library, instruction set, CPU and threads are in it.

    Parameters
    ----------
    problem : mapping of str to object
        Plain JSON data: everything else that the number depends on.

    Examples
    --------
    >>> key_of({"op": "a"}) == key_of({"op": "a"}), key_of({"op": "a"}) == key_of({"op": "b"})
    (True, False)
    """
    library = dnnl.lib()
    where = [*library.version, library.hash, library.runtime, library.isa, _cpu(), library.threads]
    text = json.dumps([where, problem], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return the processor's model name and the processors that this machine has."""
    return f"{cpu_model()} x{os.cpu_count()}"


def _line(key: str, value: float) -> str:
    text = f"{key} {value!r}"
    return f"{zlib.crc32(text.encode('ascii')):08x} {text}"


def _parse(line: str) -> tuple[str, float] | None:
    fields = line.split(" ")
    if len(fields) != 3:
        return None
    try:
        value = float(fields[2])
    except ValueError:
        return None
    # the line as it would be written: the checksum, and no second way to write the same number
    return (fields[1], value) if _sound(fields[1], value) and _line(fields[1], value) == line else None


def _sound(key: str, value: float) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and key != "" and math.isfinite(value) and value > 0
