"""Ops on opaque tensors, by operators with a kernel for PyTorch's mkldnn tensors.

The dispatcher decides whether such a kernel exists: :data:`RULES` has only the operator of each op and its conditions.
Convolution is an exception, see :mod:`fmtprop.targets.mkldnn.fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fmtprop.ir import Attrs, Node, result_names, sources
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Binary, Eltwise, Pooling, Prelu, Softmax, Sum
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.mkldnn.dense import batch_norm
from fmtprop.targets.mkldnn.dispatcher import computes_in, has_kernel
from fmtprop.targets.mkldnn.formats import opaque
from fmtprop.targets.mkldnn.function import TorchFunction

Dims = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Opaque:
    """An operator that computes an op on mkldnn tensors."""

    op: str
    #: the operator to look up in the dispatcher
    operator: str
    #: ``(attributes, dimensions of operands) -> bool``: whether the operator computes the same
    applies: Callable[[Any, Dims], bool]
    #: ``(attributes, names of operands) -> function`` of the operands in this order
    make: Callable[[Any, tuple[str, ...]], Callable[..., torch.Tensor]]
    dense: frozenset[str] = frozenset()

    @property
    def available(self) -> bool:
        """Whether the installed PyTorch has the operator for mkldnn tensors."""
        return has_kernel(self.operator, "MkldnnCPU")


def _eltwise(alg: str) -> Callable[[Attrs, Dims], bool]:
    return lambda attrs, dims: isinstance(attrs, Eltwise) and attrs.alg == alg and (alg != "relu" or not attrs.alpha)


def _same_dims(alg: str) -> Callable[[Attrs, Dims], bool]:
    return lambda attrs, dims: isinstance(attrs, Binary) and attrs.alg == alg and dims["src_0"] == dims["src_1"]


def _pools(alg: str, axes: int) -> Callable[[Attrs, Dims], bool]:
    def applies(attrs: Attrs, dims: Dims) -> bool:
        if not isinstance(attrs, Pooling) or len(attrs.kernel) != axes or attrs.pad_l != attrs.pad_r:
            return False
        return attrs.alg.startswith(alg) and not any(attrs.dilates)

    return applies


def _max_pool(attrs: Pooling, names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    pool = {2: torch.ops.aten.mkldnn_max_pool2d.default, 3: torch.ops.aten.mkldnn_max_pool3d.default}[len(attrs.kernel)]
    kernel, strides, pads = list(attrs.kernel), list(attrs.strides), list(attrs.pad_l)
    return lambda src: pool(src, kernel, strides, pads)


def _avg_pool(attrs: Pooling, names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    pool = {2: torch.ops.aten.avg_pool2d.default, 3: torch.ops.aten.avg_pool3d.default}[len(attrs.kernel)]
    kernel, strides, pads = list(attrs.kernel), list(attrs.strides), list(attrs.pad_l)
    return lambda src: pool(src, kernel, strides, pads, False, attrs.alg == "avg_include_padding")


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], Callable[..., torch.Tensor]]:
    return lambda attrs, names: function


_VECTORS = frozenset({"mean", "variance", "scale", "shift"})

RULES: tuple[Opaque, ...] = (
    Opaque("eltwise", "aten::relu", _eltwise("relu"), _unary(torch.relu)),
    Opaque("eltwise", "aten::sigmoid", _eltwise("logistic"), _unary(torch.sigmoid)),
    Opaque("eltwise", "aten::tanh", _eltwise("tanh"), _unary(torch.tanh)),
    Opaque("eltwise", "aten::gelu", _eltwise("gelu_erf"), _unary(F.gelu)),
    Opaque("binary", "aten::add.Tensor", _same_dims("add"), lambda attrs, names: torch.add),
    Opaque("binary", "aten::mul.Tensor", _same_dims("mul"), lambda attrs, names: torch.mul),
    Opaque(
        "sum", "aten::add.Tensor",
        lambda attrs, dims: isinstance(attrs, Sum) and attrs.scales == (1.0, 1.0),
        lambda attrs, names: torch.add,
    ),
    Opaque("pooling", "aten::mkldnn_max_pool2d", _pools("max", 2), _max_pool),
    Opaque("pooling", "aten::mkldnn_max_pool3d", _pools("max", 3), _max_pool),
    Opaque("pooling", "aten::avg_pool2d", _pools("avg", 2), _avg_pool),
    Opaque("pooling", "aten::avg_pool3d", _pools("avg", 3), _avg_pool),
    Opaque(
        "batch_normalization", "aten::native_batch_norm",
        lambda attrs, dims: set(dims) >= _VECTORS and len(dims["src"]) in (4, 5),
        batch_norm, _VECTORS,
    ),
    Opaque(
        "softmax", "aten::_softmax",
        lambda attrs, dims: isinstance(attrs, Softmax) and attrs.alg == "accurate" and not attrs.dtype,
        lambda attrs, names: lambda src: torch.softmax(src, attrs.axis),
    ),
    Opaque(
        "prelu", "aten::_prelu_kernel",
        lambda attrs, dims: isinstance(attrs, Prelu) and _per_channel(dims["weights"]),
        lambda attrs, names: lambda src, weights: F.prelu(src, weights.reshape(-1)),
        frozenset({"weights"}),
    ),
    # exists only for dense tensors at present; the dispatcher is asked nevertheless
    Opaque("concat", "aten::cat", lambda attrs, dims: True, lambda attrs, names: lambda *t: torch.cat(t, attrs.axis)),
    Opaque("binary", "aten::sub.Tensor", _same_dims("sub"), lambda attrs, names: torch.sub),
    Opaque("binary", "aten::div.Tensor", _same_dims("div"), lambda attrs, names: torch.div),
    Opaque("eltwise", "aten::silu", lambda attrs, dims: _is_silu(attrs), _unary(F.silu)),
    Opaque(
        "eltwise", "aten::hardtanh", _eltwise("clip"),
        lambda attrs, names: lambda src: F.hardtanh(src, attrs.alpha, attrs.beta),
    ),
)  # fmt: skip


def _per_channel(dims: tuple[int, ...]) -> bool:
    return all(size == 1 for axis, size in enumerate(dims) if axis != 1)


def _is_silu(attrs: Attrs) -> bool:
    return isinstance(attrs, Eltwise) and attrs.alg == "swish" and attrs.alpha == 1.0


def opaque_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the way to run a node on opaque tensors, if PyTorch has one."""
    tail, results = _tail(node), result_names(node)
    if tail is None or len(results) != 1:
        return
    dims = {name: desc.dims for name, desc in request.items()}
    read = sources(node, request)
    if len({request[name].dtype for name in (*results, *read)}) != 1 or any(0 in d for d in dims.values()):
        return
    for rule in RULES:
        if rule.op == node.op and rule.available and rule.applies(node.attrs, dims):
            candidate = _candidate(rule, tail, node, request)
            if candidate is not None:
                yield candidate


def _tail(node: Node) -> list[Opaque] | None:
    """Return the operators of the post-ops; None if one has no operator on mkldnn tensors."""
    found = []
    for post_op in node.post_ops:
        rules = [r for r in RULES if r.op == post_op.op == "eltwise" and r.available and r.applies(post_op.attrs, {})]
        if not rules:
            return None
        found.append(rules[0])
    return found


def _chain(functions: list[Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    first, *then = functions

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        dst = first(*tensors)
        for function in then:
            dst = function(dst)
        return dst

    return call


def _candidate(rule: Opaque, tail: list[Opaque], node: Node, request: Request) -> Candidate | None:
    formats = {name: plain(desc) if name in rule.dense else opaque(desc) for name, desc in request.items()}
    if not computes_in(request["dst"].dtype):
        return None
    if any(desc.kind != "any" and desc != formats[name] for name, desc in request.items()):
        return None
    operands: dict[str, MemoryDesc] = {name: desc for name, desc in formats.items() if name != "dst"}
    functions = [rule.make(node.attrs, tuple(operands))]
    functions += [then.make(p.attrs, ("src",)) for then, p in zip(tail, node.post_ops, strict=True)]
    impl = ", ".join((rule.operator, *(then.operator for then in tail)))
    kernel = TorchFunction(_chain(functions) if tail else functions[0])
    return Candidate("mkldnn", impl, operands, (formats["dst"],), 0.0, False, kernel)
