"""The operating system's data about this machine."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

#: Linux's files; other systems have none
CPUINFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")

#: files with a container's limit of memory, for versions 2 and 1 of control groups
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

#: bytes of the last-level cache if the system does not report them
_USUAL_CACHE_NBYTES = 16 << 20

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_model() -> str:
    """Return the model name of the processor, or its architecture if the system does not report it."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def cpu_fields() -> dict[str, str]:
    """Return Linux's description of the first processor, such as its ``flags``; empty on other systems."""
    try:
        first, _, _ = CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@lru_cache
def last_level_cache_nbytes(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache that the first CPU uses, in bytes.

    >>> last_level_cache_nbytes(Path("/nowhere")) == 16 << 20
    True
    """
    sizes = []
    for file in caches.glob("index*/size"):
        try:
            text = file.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1))
        except (OSError, ValueError):
            continue  # a size that cannot be read is ignored
    return max(sizes, default=_USUAL_CACHE_NBYTES)


@lru_cache
def cache_sizes(caches: Path = _CACHES) -> str:
    """Return the sizes of the first CPU's caches as the system writes them, such as ``48K 32K 2048K 266240K``.

    >>> cache_sizes(Path("/nowhere"))
    ''
    """
    sizes = []
    for file in sorted(caches.glob("index*/size")):
        with suppress(OSError):
            sizes.append(file.read_text(encoding="ascii", errors="replace").strip())
    return " ".join(sizes)


def memory_nbytes(limits: Sequence[Path] = _MEMORY_LIMITS) -> int:
    """Return the bytes of memory that this process may use: the minimum of machine, container and ``ulimit -v``.

    `limits`: files that hold a number of bytes; a file without a number, or a missing file, sets no limit.
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in limits:
        try:
            sizes.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):  # "max"
            continue
    if has_address_limit():
        sizes.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    return min(sizes)


def has_address_limit() -> bool:
    """Return whether addresses without memory count for this process, too (``ulimit -v``)."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
