"""Convolution, deconvolution and inner products by PyTorch's fused operators: the fast ops of this target.

Only with ``mkldnn::_convolution_pointwise`` on channels-last tensors does PyTorch never pack weights again: it runs
forward inference, for which :func:`ConvPacking.pack` packs them with the size of the input. (An mkldnn tensor as
source needs ``aten::mkldnn_convolution``, which runs forward *training* and reorders packed weights in every call, so
it is not offered.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fmtprop.ir import Attrs, Node, Role, port
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Conv, Deconv, InnerProduct, MatMul
from fmtprop.ops.pytorch import packed_for_convolution, packed_for_deconvolution, packed_for_linear
from fmtprop.passes.assignment.formats import channels_last, plain
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.memory import copied
from fmtprop.targets.mkldnn.dispatcher import computes_in, has_kernel
from fmtprop.targets.mkldnn.formats import packed, packing_of
from fmtprop.targets.mkldnn.function import TorchFunction
from fmtprop.targets.mkldnn.tail import Division, finish, split

_NAME = "mkldnn"
_LINEAR = "mkldnn::_linear_pointwise"


# ---------------------------------------------------------------- packing


@dataclass(frozen=True)
class ConvPacking:
    """Packing of a convolution's weights."""

    attrs: Conv
    #: dimensions of its source, which decide oneDNN's preferred format
    src: tuple[int, ...]

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Return an mkldnn tensor of weights [O, I, k…] or [G, O/G, I/G, k…]."""
        attrs = self.attrs
        if attrs.groups > 1:
            weights = weights.flatten(0, 1)
        return packed_for_convolution(
            weights.contiguous(), list(attrs.pad_l), list(attrs.strides), _dilation(attrs), attrs.groups, list(self.src)
        )


@dataclass(frozen=True)
class DeconvPacking:
    """Packing of a deconvolution's weights; parameters as for :class:`ConvPacking`."""

    attrs: Deconv
    src: tuple[int, ...]

    @property
    def output_padding(self) -> list[int]:
        """PyTorch's extra size at the end of the result: the amount that oneDNN removes less there."""
        return [left - right for left, right in zip(self.attrs.pad_l, self.attrs.pad_r, strict=True)]

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Return an mkldnn tensor of weights [O, I, k…] or [G, O/G, I/G, k…]."""
        attrs = self.attrs
        # PyTorch's order is [I, O/G, k…]
        weights = weights.transpose(1, 2).flatten(0, 1) if attrs.groups > 1 else weights.transpose(0, 1)
        return packed_for_deconvolution(
            weights.contiguous(), list(attrs.pad_l), self.output_padding, list(attrs.strides), _dilation(attrs),
            attrs.groups, list(self.src),
        )  # fmt: skip


@dataclass(frozen=True)
class LinearPacking:
    """Packing of an inner product's weights."""

    rows: int
    #: order of the weights' axes, outputs first, that matches the source's features in memory
    order: tuple[int, ...]

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Return an mkldnn tensor of [outputs, features]."""
        rows = weights.permute(self.order).flatten(1).contiguous()
        return packed_for_linear(rows, self.rows)


def stored(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return numbers as a tensor in a format (packed weights, mkldnn or dense), without broadcast memory."""
    recipe = packing_of(desc)
    if isinstance(recipe, ConvPacking | DeconvPacking | LinearPacking):
        return recipe.pack(tensor)
    if desc.kind == "opaque":
        return tensor.to_mkldnn()
    if 0 in desc.strides:  # broadcast memory cannot be written
        return tensor.clone()
    return copied(tensor, desc)


def _dilation(attrs: Conv | Deconv) -> list[int]:
    return [dilate + 1 for dilate in attrs.dilates]


# ---------------------------------------------------------------- candidates


def fused_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield the ways to run a node by a fused operator, the faster first."""
    types = {request[name].dtype for name in request if name != "bias"}
    if len(types) != 1 or not computes_in(*types) or any(0 in desc.dims for desc in request.values()):
        return
    if type(node.attrs) in FUSED:
        operator, candidates = FUSED[type(node.attrs)]
        yield from candidates(operator, node, request)


def _convolution(operator: str, node: Node, request: Request) -> Iterator[Candidate]:
    attrs = node.attrs
    if not isinstance(attrs, Conv) or len(attrs.strides) not in (2, 3) or attrs.pad_l != attrs.pad_r:
        return
    recipe = ConvPacking(attrs, request["src"].dims)
    window = (list(attrs.pad_l), list(attrs.strides), _dilation(attrs), attrs.groups)
    tail = _tail(node, request, then_unary=True)
    operands = {name: channels_last(request[name]) for name in request if name not in ("dst", "weights", "bias")}
    yield from _offer(request, operator, tail, {**operands, "weights": packed(request["weights"], recipe)}, window)


def _deconvolution(operator: str, node: Node, request: Request) -> Iterator[Candidate]:
    attrs = node.attrs
    if not isinstance(attrs, Deconv) or len(attrs.strides) != 2:
        return
    recipe = DeconvPacking(attrs, request["src"].dims)
    fits = all(0 <= extra < step for extra, step in zip(recipe.output_padding, attrs.strides, strict=True))
    if not fits:
        return
    window = (list(attrs.pad_l), recipe.output_padding, list(attrs.strides), _dilation(attrs), attrs.groups)
    tail = _tail(node, request, then_unary=False, binary=False)
    operands = {key: channels_last(request[key]) for key in request if key not in ("dst", "weights", "bias")}
    yield from _offer(request, operator, tail, {**operands, "weights": packed(request["weights"], recipe)}, window)


def _inner_product(operator: str, node: Node, request: Request) -> Iterator[Candidate]:
    src = request["src"]
    rows, axes = src.dims[0], tuple(range(src.ndim))
    tail = _tail(node, request, then_unary=False)
    others = {name: plain(request[name]) for name in request if port(node, name).role is Role.POST_OP}
    for desc, order in dict.fromkeys(((channels_last(src), (0, *axes[2:], 1)), (plain(src), axes))):
        if src.ndim < 3 and order != axes:
            continue
        weights = packed(request["weights"], LinearPacking(rows, order))
        view = None if src.ndim == 2 else (order, (rows, -1))
        yield from _offer(request, operator, tail, {"src": desc, **others, "weights": weights}, (), view)


def _matmul(operator: str, node: Node, request: Request) -> Iterator[Candidate]:
    src, weights = request["src"], request["weights"]
    if len(weights.dims) != 2:
        return
    bias = request.get("bias")
    if bias is not None and bias.nelems != weights.dims[1]:
        return
    rows = prod(src.dims[:-1])
    tail = _tail(node, request, then_unary=False)
    operands = {name: plain(request[name]) for name in request if name not in ("dst", "weights", "bias")}
    recipe = LinearPacking(rows, (1, 0))
    yield from _offer(request, operator, tail, {**operands, "weights": packed(weights, recipe)}, ())


#: class of an op's attributes -> PyTorch's fused operator, and the ways to call it
FUSED: Mapping[type[Attrs], tuple[str, Callable[[str, Node, Request], Iterator[Candidate]]]] = {
    Conv: ("mkldnn::_convolution_pointwise", _convolution),
    Deconv: ("mkldnn::_convolution_transpose_pointwise", _deconvolution),
    InnerProduct: (_LINEAR, _inner_product),
    MatMul: (_LINEAR, _matmul),
}


def _tail(node: Node, request: Request, *, then_unary: bool, binary: bool = True) -> Division:
    """Divide the post-ops; an operator without a binary form applies only a function."""
    dims = {name: desc.dims for name, desc in request.items()}
    leading = bool(node.post_ops) and node.post_ops[0].op != "eltwise"
    if leading and not binary:
        return Division(rest=node.post_ops)
    return split(node.post_ops, request["dst"], dims, then_unary=then_unary)


# ---------------------------------------------------------------- one candidate


def _offer(
    request: Request,
    operator: str,
    tail: Division,
    formats: Mapping[str, MemoryDesc],
    window: tuple[Any, ...],
    view: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Iterator[Candidate]:
    """Yield the candidate if it has the requested formats and the dispatcher has the operator."""
    name = f"{operator}.binary" if tail.binary else operator
    dst = channels_last(request["dst"]) if window else plain(request["dst"])
    if "bias" in request:
        formats = {**formats, "bias": plain(request["bias"])}
    wanted = {**formats, "dst": dst}
    if not has_kernel(name, "CPU") or any(
        request[key].kind != "any" and request[key] != desc for key, desc in wanted.items()
    ):
        return
    operands = {key: formats[key] for key in request if key != "dst"}
    kernel = _FusedFunctions(tuple(operands), tail, window, view).kernel(operator)
    if operator == _LINEAR and dst.dtype is not DataType.F32 and not _runs(kernel, operands):
        return
    impl = f"{name}+{tail.unary.attr}" if tail.unary.attr != "none" else name
    impl += "".join(f", {post_op.op}" for post_op in tail.rest)
    yield Candidate(_NAME, impl, operands, (dst,), 0.0, False, kernel)


def _runs(kernel: TorchFunction, operands: Mapping[str, MemoryDesc]) -> bool:
    """Return whether a kernel runs, by running it on zeros.

    On AVX-512 without bf16 instructions, oneDNN packs bf16 weights in a format for which it has no inner product with
    many rows. PyTorch raises this error only when it computes.
    """
    try:
        with torch.no_grad():
            kernel.call(*(stored(torch.zeros(d.dims, dtype=torch_dtype(d.dtype)), d) for d in operands.values()))
    except RuntimeError:  # "could not create a primitive descriptor"
        return False
    return True


@dataclass(frozen=True)
class _FusedFunctions:
    """Builder of a function that calls a fused operator with fixed arguments and takes only tensors."""

    names: tuple[str, ...]
    tail: Division
    window: tuple[Any, ...]
    view: tuple[tuple[int, ...], tuple[int, ...]] | None

    def kernel(self, operator: str) -> TorchFunction:
        namespace, base = operator.split("::")
        packet = getattr(getattr(torch.ops, namespace), base)
        if not self.tail.binary:
            return TorchFunction(self._unary(packet.default))
        if self.tail.binary != "add" or not has_kernel(f"{operator}_.binary", "CPU") or not self.window:
            return TorchFunction(self._binary(packet.binary))
        in_place = getattr(getattr(torch.ops, namespace), f"{base}_").binary
        return TorchFunction(self._binary(packet.binary), self.tail.other, self._binary(in_place, other_first=True))

    def _unary(self, operator: Any) -> Any:
        src, weights, bias = (self._position(name) for name in ("src", "weights", "bias"))
        unary = self.tail.unary
        fixed = (*self.window, unary.attr, list(unary.scalars), unary.algorithm)
        source, rest = self._source(), finish(self.tail.rest, self.names)

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            dst = operator(source(tensors[src]), tensors[weights], self._bias(tensors, bias), *fixed)
            return rest(dst, tensors)

        if self.view is None and not self.tail.rest and bias is None:
            return lambda *tensors: operator(tensors[src], tensors[weights], None, *fixed)
        if self.view is None and not self.tail.rest and (src, bias, weights) == (0, 2, 1):
            return lambda x, w, b: operator(x, w, b.reshape(-1) if b.ndim > 1 else b, *fixed)
        return call

    def _binary(self, operator: Any, *, other_first: bool = False) -> Any:
        src, weights, bias = (self._position(name) for name in ("src", "weights", "bias"))
        other = self._position(self.tail.other)
        unary = self.tail.unary
        fixed: tuple[Any, ...] = (self.tail.binary,)
        if self.window:
            attr = None if unary.attr == "none" else unary.attr
            fixed = (*self.window, self.tail.binary, None, attr, list(unary.scalars), unary.algorithm)
        source, rest = self._source(), finish(self.tail.rest, self.names)

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            x, y = source(tensors[src]), tensors[other]
            first = (y, x) if other_first else (x, y)
            dst = operator(*first, tensors[weights], self._bias(tensors, bias), *fixed)
            return rest(dst, tensors)

        return call

    def _position(self, name: str) -> Any:
        return self.names.index(name) if name in self.names else None

    @staticmethod
    def _bias(tensors: tuple[torch.Tensor, ...], position: int | None) -> torch.Tensor | None:
        if position is None:
            return None
        bias, dtype = tensors[position], tensors[0].dtype
        return bias.reshape(-1).to(dtype)

    def _source(self) -> Any:
        """Return the function from the node's source to the operator's: a source with more axes becomes its rows."""
        if self.view is None:
            return lambda tensor: tensor
        order, dims = self.view
        return lambda tensor: tensor.permute(order).reshape(dims)
