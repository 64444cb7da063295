"""Environment of a measurement, without which figures are meaningless."""

from __future__ import annotations

import platform

import torch

from fmtprop.system.machine import cpu_model
from fmtprop.targets.registry import provider


def machine(target: str = "onednn") -> dict[str, str]:
    """Return CPU model, instruction set, threads and versions."""
    return {
        "cpu": cpu_model(),
        **provider(target)().describe(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
