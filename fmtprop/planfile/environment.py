"""What a plan was made for: libraries, instruction set, threads, caches. A plan fits where all of them are the same."""

from __future__ import annotations

import torch

from fmtprop import __version__
from fmtprop.planfile.container import VERSION
from fmtprop.system.machine import cache_sizes
from fmtprop.targets.executable import threads_here
from fmtprop.targets.registry import provider


def environment(target: str) -> dict[str, str]:
    """Return what choices and packed weights of a plan depend on, here and now."""
    said = provider(target)().describe()
    return {
        "plan file": f"version {VERSION}",
        "fmtprop": __version__,
        "torch": torch.__version__,
        "oneDNN": said["onednn"],
        "instruction set": said["isa"],
        "threads": str(threads_here()),
        "CPU caches": cache_sizes() or "unknown",
    }


def differences(made: dict[str, str], here: dict[str, str]) -> list[str]:
    """Return what differs, in words: ``threads 4 there, 2 here``.

    >>> differences({"threads": "4", "torch": "2"}, {"threads": "2", "torch": "2"})
    ['threads: 4 in the file, 2 here']
    """
    keys = [*here, *(made.keys() - here.keys())]
    return [
        f"{key}: {made.get(key, 'unknown')} in the file, {here.get(key, 'unknown')} here"
        for key in keys
        if made.get(key) != here.get(key)
    ]
