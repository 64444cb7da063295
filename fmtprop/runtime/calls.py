"""Running a node by its op's reference: the meaning of the node, post-ops included, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fmtprop.errors import FmtpropError, PlanError
from fmtprop.ir.node import Node
from fmtprop.ir.op import Reference
from fmtprop.ops.evaluate import evaluate_node


def call_reference(
    node: Node, tensors: Mapping[str, torch.Tensor], instead: Mapping[str, Reference] | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the node's results; an error of PyTorch's names the node.

    `instead` has what evaluates an op, by its name, instead of its own reference.

    Raises
    ------
    PlanError
        PyTorch refused.
    """
    if torch.is_autocast_enabled("cpu"):  # the caller's: what runs in which type is decided
        with torch.autocast("cpu", enabled=False):
            return call_reference(node, tensors, instead)
    try:
        with torch.no_grad():
            return evaluate_node(node, tensors, instead)
    except FmtpropError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        where = f" from {node.origin}" if node.origin else ""
        raise PlanError(f"{node.label}{where} failed on the reference target: {error}") from error


def write_results(node: Node, places: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]) -> None:
    """Write a node's results to where they are to lie.

    Parameters
    ----------
    node : Node
        What gave them.
    places : sequence of torch.Tensor or None
        None for a result that nobody reads: such need not be what the exporter says (``aten._embedding_bag``).
    values : sequence of torch.Tensor
        The results.

    Raises
    ------
    PlanError
        One that is read has another shape than the plan has room for.
    """
    for index, (place, value) in enumerate(zip(places, values, strict=True)):
        if place is None:
            continue
        if place.shape != value.shape:
            raise PlanError(
                f"{node.label}: result {index} has shape {tuple(value.shape)} on the reference target, but the model "
                f"was exported with {tuple(place.shape)}; report it with the model"
            )
        place.copy_(value)
