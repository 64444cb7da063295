"""A model of the costs of PyTorch's operators in seconds, by operations and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod

import torch

from fmtprop.ir import Node, linear_of
from fmtprop.layout import MemoryDesc
from fmtprop.passes.target import Candidate
from fmtprop.targets.mkldnn.formats import is_opaque

#: rough figures of a current core: seconds of a call from Python, operations per second and thread, bytes per second
_CALL_SECONDS, _FLOPS_PER_SECOND, _BYTES_PER_SECOND = 1e-5, 6e10, 1e10

#: share of the operations per second for fused and for plain operators; plain ones pack weights in every call
_FUSED_SHARE, _PLAIN_SHARE = 0.8, 0.4


@dataclass(frozen=True)
class MkldnnCosts:
    """Modelled costs of this target's candidates and reorders."""

    #: from two formats to the seconds of the reorder, 0 for equal formats, None if no reorder exists
    reorder: Callable[[MemoryDesc, MemoryDesc], float | None]

    def prepare(
        self, work: Sequence[tuple[Node, Candidate]], reorders: Sequence[tuple[MemoryDesc, MemoryDesc]]
    ) -> None:
        """Do nothing: a model needs no preparation."""

    def node(self, node: Node, candidate: Candidate) -> float:
        """Return the seconds of a way to run a node."""
        moved = sum(desc.nbytes for desc in (*candidate.operands.values(), *candidate.results)) / _BYTES_PER_SECOND
        share = _FUSED_SHARE if candidate.impl.startswith("mkldnn::") else _PLAIN_SHARE
        arithmetic = _operations(node, candidate) / (_FLOPS_PER_SECOND * torch.get_num_threads() * share)
        return _CALL_SECONDS + max(moved if share == _FUSED_SHARE else 2 * moved, arithmetic)

    def reorder_kind(self, src: MemoryDesc, dst: MemoryDesc) -> str:
        """Return ``"copy"``, or the direction of a conversion: ``"to_mkldnn"``, ``"to_dense"``."""
        return "to_dense" if is_opaque(src) else "to_mkldnn" if is_opaque(dst) else "copy"

    def bounds(self, what: Node | MemoryDesc, how: Candidate | MemoryDesc, expected: float) -> tuple[float, float]:
        """Return no bounds: the figures are rough, and nothing of this machine is in them."""
        return 0.0, inf


def _operations(node: Node, candidate: Candidate) -> float:
    """Return the multiplications and additions of a node; an element-wise op has one per element."""
    operands, dst, linear = candidate.operands, candidate.results[0], linear_of(node)
    if linear is None:
        return float(prod(dst.dims))
    src, weights, result = (operands.get(role, dst).dims for role in linear.roles)
    return 2.0 * linear.products(src, weights, result)
