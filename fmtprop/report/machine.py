"""Where a measurement was made: figures mean nothing without it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from fmtprop import dnnl


def machine() -> dict[str, str]:
    """Return CPU model, instruction set, threads and versions.

    Returns
    -------
    dict of str to str
        ``cpu``, ``isa`` (as oneDNN uses it), ``threads``, ``onednn``, ``torch``, ``python``.
    """
    library = dnnl.lib()
    version = ".".join(map(str, library.version))
    return {
        "cpu": _cpu_model(),
        "isa": str(library.isa),
        "threads": str(torch.get_num_threads()),
        "onednn": f"{version} ({library.hash[:8]}, {library.runtime})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
