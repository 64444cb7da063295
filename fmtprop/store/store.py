"""The store: results found on this machine, by key.

Four kinds of records: figures (measured seconds, and rates of the machine), what runs taught (their seconds, and how
these differ from costs), verdicts (the name of the fastest plan), and passed checks. A key is a hash of
everything that a record depends on. Must not know their meaning.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from fmtprop import dnnl
from fmtprop.errors import LoadError
from fmtprop.store import database
from fmtprop.store.directory import cache_directory
from fmtprop.system.locks import ProcessLock
from fmtprop.system.machine import cpu_model


def key_of(problem: Mapping[str, object]) -> str:
    """Return the key of a problem on this machine; it includes library, instruction set, CPU and number of threads.

    >>> key_of({"op": "a"}) == key_of({"op": "a"}), key_of({"op": "a"}) == key_of({"op": "b"})
    (True, False)
    """
    try:
        library = dnnl.lib()
        where = [*library.version, library.hash, library.runtime, library.isa, _cpu(), library.threads]
    except LoadError:  # only PyTorch's operators run here
        import torch  # imported only here: fmtprop.dnnl works without torch

        where = [torch.__version__, torch.backends.cpu.get_cpu_capability(), _cpu(), torch.get_num_threads()]
    text = json.dumps([where, problem], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _cpu() -> str:
    """Return the processor's model name and the processors that this machine has."""
    return f"{cpu_model()} x{os.cpu_count()}"


Kind = Literal["figure", "learned", "verdict", "check"]


class Store:
    """Figures, verdicts and passed checks by key, on disk.

    `path`: the file; by default one for this library and instruction set in the user's cache directory
    (``FMTPROP_CACHE_DIR`` overrides it). `timeout`: seconds to wait for another process. `warns`: whether to warn
    RuntimeWarning, at most once, if the file cannot be read, is damaged, or cannot be written. There is no other
    consequence.

    Records are read once, when the store is opened; records that other processes add later are not seen. Stores of one
    file share their records while only this process changes it.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory) / "store.sqlite"
    ...     store = Store(path)
    ...     store.add_figures({"problem": 1e-3})
    ...     store.remember("model", "optimal")
    ...     store.add_passed(["primitive"])
    ...     again = Store(path)
    ...     again.figure("problem"), again.figure("another"), again.verdict("model"), again.has_passed("primitive")
    (0.001, None, 'optimal', True)
    """

    def __init__(self, path: Path | None = None, timeout: float = 10.0, *, warns: bool = True) -> None:
        self.path = path if path is not None else default_path()
        self._timeout = timeout
        self._warned = not warns
        self._lock = ProcessLock()
        #: records that could not be written yet
        self._unsaved: database.Records = {}
        self._records: database.Records = {}
        self._damage = ""
        try:
            self._records, self._damage = database.read(self.path, timeout)
        except OSError as error:
            self._warn(f"cannot read the cache {self.path} ({error.strerror}); it is ignored")
        if self._damage:
            self._warn(f"the cache {self.path} is {self._damage}")

    def __len__(self) -> int:
        return len(self._records)

    def figure(self, key: str) -> float | None:
        """Return the figure of a key, or None."""
        found = self._records.get(("figure", key))
        return found if isinstance(found, float) else None

    def has_figures(self, besides: Collection[str] = ()) -> bool:
        """Return whether there is a figure with another key than these."""
        return any(kind == "figure" and key not in besides for kind, key in self._records)

    def digest_of_figures(self) -> str:
        """Return a hash of all figures."""
        found = sorted((key, value) for (kind, key), value in self._records.items() if kind == "figure")
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def learned(self, key: str) -> float | None:
        """Return what a run taught about a key, or None."""
        found = self._records.get(("learned", key))
        return found if isinstance(found, float) else None

    def verdict(self, key: str) -> str | None:
        """Return the name recorded for a key, or None."""
        found = self._records.get(("verdict", key))
        return found if isinstance(found, str) else None

    def has_passed(self, key: str) -> bool:
        """Return whether the check of this key is recorded as passed."""
        return ("check", key) in self._records

    def add_figures(self, figures: Mapping[str, float], *, sync: bool = False) -> None:
        """Record figures in memory and on disk.

        `sync`: whether to wait until the figures are on the disk. The wait can take a tenth of a compilation, so it is
        for figures that took longer to measure. Otherwise a failure of the machine (not of the process) may lose them
        and all records written before.
        """
        self._add("figure", {key: float(value) for key, value in figures.items() if 0 < value < math.inf}, sync)

    def learn(self, values: Mapping[str, float]) -> None:
        """Record what a run taught, positive finite numbers, in memory and on disk."""
        self._add("learned", {key: float(value) for key, value in values.items() if 0 < value < math.inf})

    def remember(self, key: str, name: str) -> None:
        """Record a verdict in memory and on disk."""
        self._add("verdict", {key: name})

    def add_passed(self, keys: Iterable[str]) -> None:
        """Record passed checks in memory and on disk."""
        self._add("check", {key: "" for key in keys if not self.has_passed(key)})

    def _add(self, kind: Kind, values: Mapping[str, float | str], sync: bool = False) -> None:
        if not values:
            return
        with self._lock.current:
            new: database.Records = {(kind, key): value for key, value in values.items()}
            self._unsaved.update(new)
            try:
                damaged = self._damage != ""
                database.write(self.path, self._unsaved, sync=sync, damaged=damaged, timeout=self._timeout)
                self._damage = ""
                self._unsaved.clear()
                self._records.update(new)
            except OSError as error:
                self._records = {**self._records, **new}  # other stores share the old ones, which are in the file
                self._warn(f"cannot write the cache {self.path} ({error.strerror}); its records are kept in memory")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def default_path() -> Path:
    """Return the file for the loaded library and its instruction set."""
    try:
        library = dnnl.lib()
    except LoadError:
        return cache_directory() / "store.sqlite"
    return cache_directory() / f"store-{library.hash[:12]}-{library.isa}.sqlite"
