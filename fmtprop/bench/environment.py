"""What a figure depends on besides the program: CPU, instruction sets, threads, library versions.

Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Environment"]

# The instruction sets that decide which kernels a runtime picks, as Linux names them.
_ISA_FLAGS = (
    *("sse4_1", "sse4_2", "avx", "fma", "f16c", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Environment:
    """The machine and the libraries that a benchmark ran with.

    Parameters
    ----------
    cpu : str
        Model name of the processor.
    isa : tuple of str
        Instruction sets from SSE4 on; empty where the system does not list them.
    cpus : int
        Logical processors that this process may use.
    threads : int
        Threads that the callables were given.
    versions : mapping of str to str
        Library name to version.
    """

    cpu: str
    isa: tuple[str, ...]
    cpus: int
    threads: int
    versions: Mapping[str, str]

    @classmethod
    def capture(cls, threads: int | None = None, versions: Mapping[str, str] | None = None) -> Environment:
        """Describe the machine and process that this is called in.

        Parameters
        ----------
        threads : int, optional
            Threads of the callables; torch's setting if not given.
        versions : mapping of str to str, optional
            Versions of further libraries, beside Python's and torch's.

        Returns
        -------
        Environment

        Examples
        --------
        >>> Environment.capture(threads=2).threads
        2
        """
        fields = _cpuinfo()
        flags = set(fields.get("flags", "").split())
        affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
        return cls(
            cpu=fields.get("model name") or platform.processor() or platform.machine(),
            isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
            cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
            threads=torch.get_num_threads() if threads is None else threads,
            versions={"python": platform.python_version(), "torch": torch.__version__, **(versions or {})},
        )


def _cpuinfo() -> dict[str, str]:
    """Read the first processor's fields, or nothing where there is no such file."""
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
