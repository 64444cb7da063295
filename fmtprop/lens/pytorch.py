"""PyTorch's names without a public path that following a model's operators takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: the operator of a backward pass that runs now
current_node: Callable[[], Any] = torch._C._current_autograd_node

#: the number of the next differentiable operator of this thread
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
