"""Running a node by its op's reference: the meaning of the node, post-ops included, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir.node import Node
from fmtprop.ops.evaluate import evaluate_node


def call_reference(node: Node, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the node's results; an error of PyTorch's names the node.

    Raises
    ------
    PlanError
        PyTorch refused.
    """
    if torch.is_autocast_enabled("cpu"):  # the caller's: what runs in which type is decided
        with torch.autocast("cpu", enabled=False):
            return call_reference(node, tensors)
    try:
        with torch.no_grad():
            return evaluate_node(node, tensors)
    except FmtpropError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        where = f" from {node.origin}" if node.origin else ""
        raise PlanError(f"{node.label}{where} failed on the reference target: {error}") from error
