"""What a figure depends on besides the program: CPU, instruction sets, threads, library versions.

Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fmtprop.system.machine import cpu_fields, cpu_model

__all__ = ["Environment"]

# The instruction sets that decide which kernels a runtime picks, as Linux names them.
_ISA_FLAGS = (
    *("sse4_1", "sse4_2", "avx", "fma", "f16c", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)


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
        flags = set(cpu_fields().get("flags", "").split())
        affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
        return cls(
            cpu=cpu_model(),
            isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
            cpus=len(affinity(0)) if affinity else os.cpu_count() or 1,
            threads=torch.get_num_threads() if threads is None else threads,
            versions={"python": platform.python_version(), "torch": torch.__version__, **(versions or {})},
        )
