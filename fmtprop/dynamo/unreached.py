"""A warning where a model trains without one graph that reached the backend.

TorchDynamo leaves some modules to eager PyTorch without a word: those of PyTorch's own classes within
``DistributedDataParallel``. It tells a backend of nothing but graphs; so the steps of optimisers are counted until the
first one.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook

#: steps of optimisers, after the first frame that TorchDynamo looked at, before the warning
STEPS = 3


class StepCounter:
    """Counts steps of all optimisers, until a graph arrives or the warning was given."""

    def __init__(self) -> None:
        self._steps = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def end(self) -> None:
        """Stop counting: a graph has arrived."""
        self._hook.remove()

    def _count(self, *_: Any) -> None:
        if "fmtprop" not in registry._COMPILER_FNS or not counters["frames"]["total"]:
            return  # torch.compile was not asked for the backend, or its result was not called
        if counters["stats"]["unique_graphs"]:
            return  # another backend's
        self._steps += 1
        if self._steps < STEPS:
            return
        self.end()
        warnings.warn(
            f"torch.compile was asked for backend 'fmtprop', and optimisers made {STEPS} steps since, but no graph has "
            "reached fmtprop: the model trains in eager PyTorch. TorchDynamo skips modules of PyTorch's own classes, "
            "such as nn.Sequential, within DistributedDataParallel: compile the module first and wrap the result, "
            "DistributedDataParallel(torch.compile(module, backend='fmtprop'))",
            RuntimeWarning,
            stacklevel=2,
        )
