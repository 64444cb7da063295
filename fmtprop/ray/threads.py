"""Threads of an actor: those of the CPUs that Ray assigned to it."""

from __future__ import annotations

import sys

import torch

from fmtprop.errors import InputError
from fmtprop.system.limits import MAX_THREADS


def set_threads(threads: int | None) -> int:
    """Set this process's threads, before a plan is loaded, and return their number.

    `threads`: their number; by default the CPUs that Ray assigned to the actor, rounded down, at least one. Unchanged
    outside of Ray. (Ray sets ``OMP_NUM_THREADS`` to 1 where an actor has no number of CPUs.)
    """
    count = _assigned() if threads is None else threads
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_THREADS:
            raise InputError(f"threads must be a whole number from 1 to {MAX_THREADS}, got {threads!r}")
        torch.set_num_threads(count)
    return torch.get_num_threads()


def _assigned() -> int | None:
    """Return the CPUs that Ray assigned to this worker; None outside of one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:  # the program that starts the workers
        return None
    assigned = context.get_assigned_resources().get("CPU")
    return None if assigned is None else max(1, int(assigned))
