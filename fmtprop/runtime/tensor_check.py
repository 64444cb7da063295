"""A plan of PyTorch operators checks itself: each distinct operator runs once and is compared with its reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fmtprop.ir.node import Node
from fmtprop.runtime.agreement import TOLERANCE, error_of_numbers, small_numbers
from fmtprop.runtime.plan import Step
from fmtprop.runtime.selfcheck import check_node
from fmtprop.runtime.tensor_calls import function_of
from fmtprop.targets.mkldnn.fused import stored
from fmtprop.targets.mkldnn.kernel import Kernel
from fmtprop.targets.pytorch import call_reference
from fmtprop.targets.reference import reads_strides

__all__ = ["check_tensor_steps"]


def check_tensor_steps(steps: Iterable[Step]) -> Iterator[str]:
    """Yield a complaint for each distinct operator that computes something else than its reference.

    Parameters
    ----------
    steps : iterable of Step
        Of a plan; those that are their own reference, on row-major tensors, and reorders, are passed over.
    """
    seen: set[object] = set()
    for step in steps:
        node, choice = step.node, step.node.choice
        if choice is not None and not isinstance(choice.handle, Kernel) and reads_strides(node):
            error = check_node(node)
            if error:
                yield f"{node.label}: PyTorch's operator is off by {error:.1e} relative in these memory formats"
        if choice is None or not isinstance(choice.handle, Kernel) or node.op == "reorder":
            continue
        key = (node.op, node.attrs, node.post_ops, choice.impl, tuple(choice.operands.items()), node.descs)
        if key in seen or not all(type_.dtype.is_floating for type_ in node.results):
            continue
        seen.add(key)
        in_place = any(a.buffer == result.buffer for a in step.operands.values() for result in step.results)
        try:
            error = _error(node, in_place)
        except RuntimeError as reason:
            yield f"{node.label}: {choice.impl} failed: {reason}"
            continue
        if error > TOLERANCE.get(node.results[0].dtype, 0.0):
            yield f"{node.label}: {choice.impl} is off by {error:.1e} relative"


def _error(node: Node, in_place: bool) -> float:
    operands = {} if node.choice is None else node.choice.operands
    plain = {name: small_numbers(node, name, desc) for name, desc in operands.items()}
    expected = call_reference(node, plain)
    with torch.no_grad():
        results = function_of(node, in_place=in_place)(*(stored(plain[name], operands[name]) for name in operands))
    worst = 0.0
    for got, want in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        dense = got.to_dense() if got.is_mkldnn else got
        worst = max(worst, error_of_numbers(dense, want))
    return worst
