"""A plan of PyTorch operators checks itself: each distinct operator runs once and is compared with its reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch

from fmtprop.ir.node import Node
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.runtime.calls import call_reference
from fmtprop.runtime.plan import Step
from fmtprop.runtime.tensor_calls import function_of
from fmtprop.targets.mkldnn.fused import stored
from fmtprop.targets.mkldnn.kernel import Kernel

__all__ = ["check_tensor_steps"]

#: largest error relative to the largest magnitude of the reference
_TOLERANCE = {DataType.F32: 2e-5, DataType.BF16: 2e-2, DataType.F16: 4e-3}


def check_tensor_steps(steps: Iterable[Step]) -> Iterator[str]:
    """Yield a complaint for each distinct operator that computes something else than its reference.

    Parameters
    ----------
    steps : iterable of Step
        Of a plan; those that are their own reference, and reorders, are passed over.
    """
    seen: set[object] = set()
    for step in steps:
        node, choice = step.node, step.node.choice
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
        if error > _TOLERANCE.get(node.results[0].dtype, 0.0):
            yield f"{node.label}: {choice.impl} is off by {error:.1e} relative"


def _error(node: Node, in_place: bool) -> float:
    operands = {} if node.choice is None else node.choice.operands
    plain = {name: _numbers(node, name, desc) for name, desc in operands.items()}
    expected = call_reference(node, plain)
    with torch.no_grad():
        results = function_of(node, in_place=in_place)(*(stored(plain[name], operands[name]) for name in operands))
    worst = 0.0
    for got, want in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        dense = got.to_dense() if got.is_mkldnn else got
        worst = max(worst, _relative(dense.double(), want.double()))
    return worst


def _numbers(node: Node, name: str, desc: MemoryDesc) -> torch.Tensor:
    """Return quarters between -2 and 2, or positive ones where a logarithm or a variance needs them."""
    if not desc.dtype.is_floating:
        return torch.zeros(desc.dims, dtype=torch_dtype(desc.dtype), device="cpu")
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{node.op}/{name}/{desc.dims}".encode()))
    algorithms = {getattr(p.attrs, "alg", "") for p in node.post_ops} | {getattr(node.attrs, "alg", "")}
    positive = name == "variance" or bool(algorithms & {"log", "sqrt", "pow", "div"})
    low, high = (1, 9) if positive else (-8, 9)
    drawn = torch.randint(low, high, desc.dims, generator=generator, device="cpu")
    return (drawn / 4).to(torch_dtype(desc.dtype))


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude, where the reference is a number."""
    finite = torch.isfinite(want)
    if got.shape != want.shape or not finite.any():
        return 0.0 if got.shape == want.shape else float("inf")
    worst = (got - want)[finite].abs().nan_to_num(float("inf")).max().item()
    scale = want[finite].abs().max().item()
    return worst / scale if scale else worst
