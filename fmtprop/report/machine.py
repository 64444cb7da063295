"""Environment of a measurement, without which figures are meaningless."""

from __future__ import annotations

import platform
import re

import torch

from fmtprop import dnnl
from fmtprop.system.machine import cpu_model


def machine(target: str = "onednn") -> dict[str, str]:
    """Return CPU model, instruction set, threads and versions.

    Parameters
    ----------
    target : {"onednn", "mkldnn"}
        The oneDNN to describe: the library, or the one inside PyTorch.

    Returns
    -------
    dict of str to str
        ``cpu``, ``isa`` (of oneDNN), ``threads``, ``onednn``, ``torch``, ``python``.
    """
    if target == "mkldnn":
        isa, onednn = torch.backends.cpu.get_cpu_capability().lower(), f"{_inside_torch()} (inside PyTorch)"
    else:
        library = dnnl.lib()
        isa = str(library.isa)
        onednn = f"{'.'.join(map(str, library.version))} ({library.hash[:8]}, {library.runtime})"
    return {
        "cpu": cpu_model(),
        "isa": isa,
        "threads": str(torch.get_num_threads()),
        "onednn": onednn,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _inside_torch() -> str:
    """Return the version of PyTorch's own oneDNN, as its build configuration names it."""
    match = re.search(r"(?:MKL-DNN|oneDNN)\D*v?(\d+\.\d+\.\d+)", torch.__config__.show())
    return match.group(1) if match else "of unknown version"
