"""The environment that a figure depends on: CPU, instruction sets, threads, library versions.

Must not know the measured programs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fmtprop.system.machine import cpu_fields, cpu_model

# The instruction sets that decide a runtime's choice of kernels, with Linux's names.
_ISA_FLAGS = (
    *("sse4_1", "sse4_2", "avx", "fma", "f16c", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)


@dataclass(frozen=True)
class Environment:
    """Machine and libraries of a benchmark."""

    cpu: str
    #: instruction sets from SSE4 on; empty if the system does not list them
    isa: tuple[str, ...]
    cpus: int
    threads: int
    versions: Mapping[str, str]

    @classmethod
    def capture(cls, threads: int | None = None, versions: Mapping[str, str] | None = None) -> Environment:
        """Describe this machine and this process.

        `threads`: threads of each callable. Default: torch's setting.

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
