"""Any op with a primitive on dense tensors, by PyTorch's operators, with the strides that these choose.

The strides are found by running the operators on meta tensors, which have strides but no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fmtprop.errors import FmtpropError
from fmtprop.ir import Node, TensorType, result_names
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import MemoryDesc
from fmtprop.ops import BatchNorm, Pooling
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.mkldnn.function import TorchFunction
from fmtprop.targets.mkldnn.tail import finish


def dense_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield PyTorch's way, if every operand is strided and PyTorch writes the requested formats."""
    results = result_names(node)
    operands = {
        name: desc if desc.kind != "any" else plain(desc) for name, desc in request.items() if name not in results
    }
    if not all(desc.is_plain for desc in operands.values()):
        return
    names = tuple(operands)
    call = _operator(node, names) or _reference(node, names)
    written = _written(node, operands, call)
    residual = node.residual
    if written is not None and residual is not None and operands[residual] != written[0]:
        # the terms of a sum have one format (V18)
        if request[residual].kind != "any":
            return
        operands[residual] = written[0]
        written = _written(node, operands, call)
    if written is None or (residual is not None and operands[residual] != written[0]):
        return
    for name, desc in zip(results, written, strict=False):
        if request[name].kind != "any" and request[name] != desc:
            return
    yield Candidate("mkldnn", "aten", operands, written, 0.0, False, TorchFunction(call, may_share=True))


def _reference(node: Node, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the node's meaning as a function of its operands in order."""

    def call(*tensors: torch.Tensor) -> Any:
        results = evaluate_node(node, dict(zip(names, tensors, strict=True)))
        return results[0] if len(results) == 1 else results

    return call


def _written(node: Node, operands: dict[str, MemoryDesc], call: Callable[..., Any]) -> tuple[MemoryDesc, ...] | None:
    """Return the formats that PyTorch writes; None if they cannot be found without numbers."""
    metas = [
        torch.empty_strided(d.dims, d.strides, dtype=torch_dtype(d.dtype), device="meta") for d in operands.values()
    ]
    try:
        with torch.no_grad():
            results = call(*metas)
    except (RuntimeError, NotImplementedError):  # an operator without a meta kernel, or one that reads numbers
        return None
    tensors = results if isinstance(results, tuple) else (results,)
    if any(tuple(t.shape) != type_.dims for t, type_ in zip(tensors, node.results, strict=True)):
        return None
    return tuple(_format(type_, tuple(t.stride())) for t, type_ in zip(tensors, node.results, strict=True))


def _format(type_: TensorType, strides: tuple[int, ...]) -> MemoryDesc:
    """Return the format with these strides if they have no gap, otherwise row-major: then the step copies."""
    rows = MemoryDesc(type_.dims, type_.dtype)
    if 0 in rows.dims:
        return rows
    try:
        desc = MemoryDesc(rows.dims, rows.dtype, strides=strides)
    except FmtpropError:  # an expanded tensor
        return rows
    return desc if desc.is_packed else rows


# ---------------------------------------------------------------- operators faster than the references


def _operator(node: Node, names: tuple[str, ...]) -> Callable[..., Any] | None:
    attrs = node.attrs
    if isinstance(attrs, Pooling):
        head = _pooling(node, attrs)
    elif isinstance(attrs, BatchNorm) and {"mean", "variance"} <= set(names):
        head = batch_norm(attrs, names)
    else:
        return None
    if head is None or not node.post_ops:
        return head
    tail = finish(node.post_ops, names)
    return lambda *tensors: tail(head(*tensors), tensors)


def _pooling(node: Node, attrs: Pooling) -> Callable[..., torch.Tensor] | None:
    """Return PyTorch's pooling; ``ceil_mode`` replaces padding after the last window if this is equivalent."""
    if any(pad > kernel // 2 for pad, kernel in zip(attrs.pad_l, attrs.kernel, strict=True)):
        return None
    ceil = attrs.pad_l != attrs.pad_r
    spatial = len(attrs.kernel) - 1
    dims = node.results[0].dims
    if attrs.alg == "max":
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial]
        dilation = tuple(dilate + 1 for dilate in attrs.dilates)

        def largest(src: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return pool(src, attrs.kernel, attrs.strides, attrs.pad_l, dilation, ceil)

        return largest if not ceil or _same_windows(attrs) else None
    if any(attrs.dilates) or (ceil and (attrs.alg == "avg_include_padding" or not _same_windows(attrs))):
        return None
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[spatial]
    include = attrs.alg == "avg_include_padding"

    def mean(src: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if dims[2:] == (1,) * (spatial + 1) and tuple(src.shape[2:]) == attrs.kernel and not any(attrs.pad_l):
            return src.mean(tuple(range(2, src.ndim)), keepdim=True)
        return average(src, attrs.kernel, attrs.strides, attrs.pad_l, ceil, include)

    return mean


def _same_windows(attrs: Pooling) -> bool:
    """Whether ``ceil_mode`` adds the same padding as ``pad_r``: more than ``pad_l`` by less than a stride."""
    extra = [right - left for left, right in zip(attrs.pad_l, attrs.pad_r, strict=True)]
    return all(0 <= more < step for more, step in zip(extra, attrs.strides, strict=True))


def batch_norm(attrs: BatchNorm, names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """Return PyTorch's batch normalization with given statistics, as a function of operands with these names."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, tensors, strict=True))
        return F.batch_norm(
            named["src"], named["mean"], named["variance"], named.get("scale"), named.get("shift"), False, 0.0,
            attrs.epsilon,
        )  # fmt: skip

    return call
