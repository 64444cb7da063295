"""Costs of PyTorch's operators in seconds: from a model, or from running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from time import perf_counter
from typing import Any

import torch

from fmtprop.ir.node import Node
from fmtprop.ir.op import linear_of
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.passes.target import Candidate
from fmtprop.targets.mkldnn.fused import stored
from fmtprop.targets.mkldnn.kernel import Kernel
from fmtprop.targets.mkldnn.target import MkldnnTarget

__all__ = ["MkldnnCosts"]

#: rough figures of a current core: seconds of a call from Python, operations per second and thread, bytes per second
_CALL_SECONDS, _FLOPS_PER_SECOND, _BYTES_PER_SECOND = 1e-5, 6e10, 1e10

#: share of the operations per second for fused and for plain operators; plain ones pack weights in every call
_FUSED_SHARE, _PLAIN_SHARE = 0.8, 0.4

#: timed runs, of which the fastest counts; one untimed run comes before
_RUNS = 3

Key = tuple[object, ...]


class MkldnnCosts:
    """Costs of this target's candidates and reorders.

    Parameters
    ----------
    measure : bool
        Whether :meth:`prepare` runs each distinct candidate and reorder on random numbers. Default: a model by
        operations and bytes.
    budget : float, optional
        Seconds for measuring; the rest keeps the model's figures.
    progress : callable, optional
        Called with (done, total); the last call has equal numbers.
    """

    def __init__(
        self, *, measure: bool = False, budget: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.measure, self.budget, self.progress = measure, budget, progress
        self._target = MkldnnTarget()
        self._known: dict[Key, float] = {}

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Measure each distinct problem once, if measuring is requested."""
        if not self.measure:
            return
        jobs: dict[Key, Callable[[], float]] = {}
        for node, candidate in work:
            jobs.setdefault(_key(node, candidate), lambda n=node, c=candidate: _timed(n, c))  # type: ignore[misc]
        for src, dst in reorders:
            found = self._reorder_candidate(src, dst)
            if found is not None:
                jobs.setdefault(("reorder", src, dst), lambda pair=found: _timed(*pair))  # type: ignore[misc]
        tell = self.progress or _silent
        end = None if self.budget is None else perf_counter() + self.budget
        for done, (key, job) in enumerate(jobs.items()):
            if end is not None and perf_counter() > end:
                break
            tell(done, len(jobs))
            if key not in self._known:
                self._known[key] = job()
        tell(len(jobs), len(jobs))

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds of a way to run a node."""
        known = self._known.get(_key(node, candidate))
        if known is not None:
            return known
        moved = sum(desc.nbytes for desc in (*candidate.operands.values(), *candidate.results)) / _BYTES_PER_SECOND
        share = _FUSED_SHARE if candidate.impl.startswith("mkldnn::") else _PLAIN_SHARE
        arithmetic = _operations(node, candidate) / (_FLOPS_PER_SECOND * torch.get_num_threads() * share)
        return _CALL_SECONDS + max(moved if share == _FUSED_SHARE else 2 * moved, arithmetic)

    def reorder(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return the seconds of a reorder, 0 for equal formats, None if no reorder exists."""
        known = self._known.get(("reorder", src, dst))
        return known if known is not None else self._target.reorder_cost(src, dst)

    def _reorder_candidate(self, src: MemoryDesc, dst: MemoryDesc) -> tuple[Node, Candidate] | None:
        from fmtprop.ir.types import TensorType
        from fmtprop.ops.reorder import Reorder

        node = Node("reorder", "reorder", Reorder(), (TensorType(dst.dims, dst.dtype),))
        for candidate in self._target.candidates(node, {"src": src, "dst": dst}):
            return node, candidate
        return None


def _silent(done: int, total: int) -> None:
    """Ignore the report."""


def _key(node: Node, candidate: Candidate) -> Key:
    formats = (tuple(candidate.operands.items()), candidate.results)
    return (node.op, node.attrs, node.post_ops, candidate.target, candidate.impl, formats)


def _operations(node: Node, candidate: Candidate) -> float:
    """Return the multiplications and additions of a node; an element-wise op has one per element."""
    operands, dst, linear = candidate.operands, candidate.results[0], linear_of(node)
    if linear is None:
        return float(prod(dst.dims))
    return 2.0 * linear.products(operands["src"].dims, operands["weights"].dims, dst.dims)


def _timed(node: Node, candidate: Candidate) -> float:
    names = tuple(candidate.operands)
    tensors = [_tensor(candidate.operands[name]) for name in names]
    kernel = candidate.handle
    call: Callable[..., Any] = (
        kernel.call
        if isinstance(kernel, Kernel)
        else lambda *given: evaluate_node(node, dict(zip(names, given, strict=True)))
    )
    best = float("inf")
    with torch.no_grad():
        call(*tensors)
        for _ in range(_RUNS):
            start = perf_counter()
            call(*tensors)
            best = min(best, perf_counter() - start)
    return best


def _tensor(desc: MemoryDesc) -> torch.Tensor:
    """Return random numbers in a format; integers are zeros, which are valid as any index."""
    dtype = torch_dtype(desc.dtype)
    tensor = torch.zeros(desc.dims, dtype=dtype, device="cpu")
    if desc.dtype.is_floating:
        generator = torch.Generator("cpu").manual_seed(0)
        tensor = torch.rand(desc.dims, generator=generator, device="cpu").to(dtype)
    return stored(tensor, desc)
