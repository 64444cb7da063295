"""The mkldnn target: PyTorch's own oneDNN as an executor.

Owns the ways to run a node, their order, and the reorders. Must not know how nodes are ordered or run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from fmtprop.ir import Node, linear_of
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.assignment.formats import channels_last, plain
from fmtprop.passes.target import Candidate, CostModel, Request
from fmtprop.targets.executable import Provider
from fmtprop.targets.memory import copied
from fmtprop.targets.mkldnn.costs import MkldnnCosts
from fmtprop.targets.mkldnn.dense import dense_candidates
from fmtprop.targets.mkldnn.dispatcher import computes_in
from fmtprop.targets.mkldnn.formats import is_opaque, opaque, packing_of
from fmtprop.targets.mkldnn.function import TorchFunction
from fmtprop.targets.mkldnn.fused import ConvPacking, DeconvPacking, LinearPacking, fused_candidates
from fmtprop.targets.mkldnn.opaque import opaque_candidates
from fmtprop.targets.mkldnn.recurrent import recurrent_candidates

#: rough costs of a reorder, for comparisons: seconds per call, bytes per second
_CALL_SECONDS, _BYTES_PER_SECOND = 1e-5, 5e9


class MkldnnTarget(Provider):
    """Candidates from the installed PyTorch: fused operators, mkldnn operators, dense operators.

    Answers are cached by value (op, attributes, post-ops, request), so equal layers are examined once.
    """

    name = "mkldnn"

    # PyTorch allocates results, and the fallback's operators are offered as this target's own
    in_place = competing = False

    # no gain by measured costs (ResNet-50, VGG-16); each further node is a call from Python and a new tensor
    expanding = False

    def __init__(self) -> None:
        self._answers: dict[object, tuple[Candidate, ...]] = {}
        self._rejected: set[object] = set()

    def candidates(self, node: Node, request: Request) -> Iterable[Candidate]:
        """Return the ways to run a node, the preferred first."""
        key = (node.op, node.attrs, node.post_ops, node.results, tuple(request.items()))
        if key not in self._answers:
            self._answers[key] = tuple(
                one for one in self._ask(node, request) if _identity(node, one.impl, one.operands) not in self._rejected
            )
        return self._answers[key]

    def reject(self, node: Node) -> None:
        """Never offer a formatted node's choice again, if it is this target's: it gave a wrong result."""
        if node.choice is not None and node.choice.target == self.name:
            self._rejected.add(_identity(node, node.choice.impl, node.choice.operands))
            self.forget()

    def forget(self) -> None:
        """Drop the answers so far."""
        self._answers.clear()

    def computes_in(self, dtype: DataType) -> bool:
        """Return whether PyTorch's oneDNN computes in a data type on this CPU."""
        return computes_in(dtype)

    def at_boundary(self, desc: MemoryDesc) -> MemoryDesc:
        """Return the format of an mkldnn tensor for any with blocks."""
        return desc if desc.is_plain else opaque(desc)

    def model(self) -> CostModel:
        """Return a model of PyTorch's operators."""
        return MkldnnCosts(self.reorder_cost)

    def describe(self) -> dict[str, str]:
        """Return PyTorch's instruction set, and the version of its oneDNN from its build configuration."""
        found = re.search(r"(?:MKL-DNN|oneDNN)\D*v?(\d+\.\d+\.\d+)", torch.__config__.show())
        version = found.group(1) if found else "of unknown version"
        return {"isa": torch.backends.cpu.get_cpu_capability().lower(), "onednn": f"{version} (inside PyTorch)"}

    def reorder_cost(self, src: MemoryDesc, dst: MemoryDesc) -> float | None:
        """Return a rough time by the bytes moved; None if no reorder exists."""
        if src == dst:
            return 0.0
        if _converter(src, dst) is None:
            return None
        # PyTorch converts to and from an mkldnn tensor through row-major
        passes = 1 + sum(is_opaque(a) and b != plain(b) for a, b in ((src, dst), (dst, src)))
        return _CALL_SECONDS + passes * (src.nbytes + dst.nbytes) / _BYTES_PER_SECOND

    def formats(self, dims: tuple[int, ...], dtype: DataType) -> Sequence[MemoryDesc]:
        """Return channels-last, row-major and, if PyTorch has mkldnn tensors of that rank, opaque."""
        desc = MemoryDesc(dims, dtype)
        found = [channels_last(desc), desc] if 3 <= len(dims) <= 5 and 0 not in dims else [desc]
        if computes_in(dtype) and 1 <= len(dims) <= 5 and 0 not in dims:
            found.append(opaque(desc))
        return list(dict.fromkeys(found))

    def _ask(self, node: Node, request: Request) -> Iterator[Candidate]:
        if node.op == "reorder":
            yield from _reorders(request)
            return
        if any(post_op.op == "convolution" for post_op in node.post_ops):
            return  # PyTorch has no operator for two convolutions; as two nodes, their weights can be packed
        fused = tuple(fused_candidates(node, request))
        yield from fused
        yield from recurrent_candidates(node, request)
        if not _packs_weights(node, request):
            yield from dense_candidates(node, request)
        yield from opaque_candidates(node, request)


def _identity(node: Node, impl: str, operands: Request) -> object:
    return node.op, node.attrs, node.post_ops, impl, tuple(operands.items())


def _packs_weights(node: Node, request: Request) -> bool:
    """Whether the plain operator would pack weights in every call, unlike the fused one.

    An explicit request for row-major weights is accepted.
    """
    linear = linear_of(node)
    if linear is None or not linear.windowed or request["weights"].kind != "any":
        return False
    open_ = {name: MemoryDesc.any(desc.dims, desc.dtype) for name, desc in request.items()}
    return any(True for _ in fused_candidates(node, open_))


def _reorders(request: Request) -> Iterator[Candidate]:
    src, dst = request["src"], request["dst"]
    if src.kind == "any":
        return
    if dst.kind == "any":
        dst = src.with_dtype(dst.dtype) if src.is_packed else plain(dst)
    found = _converter(src, dst)
    if found is not None:
        impl, call = found
        yield Candidate("mkldnn", impl, {"src": src}, (dst,), 0.0, False, TorchFunction(call))


def _converter(src: MemoryDesc, dst: MemoryDesc) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None:
    """Return name and function of the operator that converts one format to another; None if there is none."""
    recipe = packing_of(dst)
    if src.is_plain and isinstance(recipe, ConvPacking | DeconvPacking | LinearPacking):
        kind = {ConvPacking: "convolution", DeconvPacking: "convolution_transpose", LinearPacking: "linear"}
        # in the product's data type: with another one, weights are packed again in every call, or refused
        dtype = torch_dtype(dst.dtype)
        return f"mkldnn::_reorder_{kind[type(recipe)]}_weight", lambda weights: recipe.pack(weights.to(dtype))
    same = src.dtype is dst.dtype
    if src.is_plain and is_opaque(dst) and same and dst.ndim <= 5:
        return "aten::to_mkldnn", torch.Tensor.to_mkldnn
    # a new tensor can have gaps (an output in the caller's format), but no repeated element
    can_be_made = dst.is_plain and not dst.has_broadcast and dst.offset0 == 0
    if is_opaque(src) and same and can_be_made:
        if dst == plain(dst):
            return "aten::to_dense", torch.Tensor.to_dense
        return "aten::to_dense, aten::copy_", lambda tensor: copied(tensor.to_dense(), dst)
    if src.is_plain and can_be_made:
        return "aten::copy_", lambda tensor: copied(tensor, dst)
    return None


TorchFunction.offered_by = MkldnnTarget
