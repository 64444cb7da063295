"""Recurrent layers in training: the forward pass has a workspace as a further result, which the gradients read.

The workspace has an opaque format with the name of the implementation that wrote it. No reorder leads to another one:
both passes of a layer run by the same implementation, or both in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import DnnlError, FormatError, UnsupportedOpError
from fmtprop.ir.facets import Linear
from fmtprop.ir.importing import Call
from fmtprop.ir.node import Value
from fmtprop.ir.op import Category, Lowering, OpDef, Operand, Sample
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.building import only
from fmtprop.ops.recurrent import KINDS, Kind, Recurrent, check_factor, check_types, fields_of, loses, products

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveAttr, PrimitiveDesc

__all__ = ["OPS", "gradients", "workspace_nbytes"]

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class RecurrentTraining(Recurrent):
    """Attributes of a recurrent layer in training.

    Parameters
    ----------
    bidirectional, activation : see :class:`~fmtprop.ops.recurrent.Recurrent`
    workspace_nbytes : int
        Bytes of the workspace.
    """

    workspace_nbytes: int = 0


# ---------------------------------------------------------------- names

_LEARNED = ("weights_layer", "weights_iter", "bias")


def _sources(kind: Kind) -> tuple[str, ...]:
    return ("src_layer", *(f"src_{name}" for name in kind.states))


def _results(kind: Kind) -> tuple[str, ...]:
    return ("dst_layer", *(f"dst_{name}" for name in kind.states))


def _operands(names: Iterable[str]) -> tuple[Operand, ...]:
    return tuple(Operand(name, name.upper(), parameter="weights" in name or "bias" in name) for name in names)


# ---------------------------------------------------------------- meaning


def gradients(kind: Kind, attrs: Recurrent, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of sources, weights and bias, by PyTorch.

    Parameters
    ----------
    kind : Kind
        Kind of the layer.
    attrs : Recurrent
        Its attributes.
    tensors : mapping of str to torch.Tensor
        Its operands, and the gradients of its results as ``diff_dst_layer``, ….
    """
    names = (*_sources(kind), *_LEARNED)
    with torch.enable_grad(), torch.inference_mode(False):
        leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
        results = kind.reference(attrs, leaves)
        diffs = [tensors[f"diff_{name}"].detach().clone() for name in _results(kind)]
        return torch.autograd.grad(results, list(leaves.values()), diffs)


# ---------------------------------------------------------------- primitives


def _problem(kind: Kind, attrs: Recurrent, descs: Mapping[str, NativeDesc], **how: Any) -> Any:
    """Return oneDNN's problem; it ignores descriptors of operands that it has not."""
    from fmtprop import dnnl

    make = getattr(dnnl, kind.problem)
    known = {field.name for field in fields(make)}
    given = {name: value for name, value in {**fields_of(attrs), **descs}.items() if name in known}
    return make(**given, **how)


def _forward(kind: Kind, attrs: Recurrent, descs: Mapping[str, NativeDesc]) -> PrimitiveDesc:
    """Create the forward descriptor."""
    from fmtprop import dnnl

    return dnnl.create(_problem(kind, attrs, descs, prop="forward_training"))


def _open(kind: Kind, attrs: Recurrent, descs: Mapping[str, NativeDesc]) -> PrimitiveDesc:
    """Create the forward descriptor with weights in the format that oneDNN chooses."""
    from fmtprop import dnnl

    weights = {
        name: dnnl.NativeDesc.from_desc(MemoryDesc.any(descs[name].dims, DataType.F32))
        for name in ("weights_layer", "weights_iter")
    }
    names = (*_sources(kind), "bias", *_results(kind))
    plain = {name: dnnl.NativeDesc.from_desc(MemoryDesc(descs[name].dims, DataType.F32)) for name in names}
    return _forward(kind, attrs, {**plain, **weights})


def _lowering(
    pd: PrimitiveDesc, names: Iterable[str], writer: PrimitiveDesc, nbytes: int, *, is_writer: bool = False
) -> Lowering:
    """Return a lowering whose workspace is that of the forward descriptor `writer`, perhaps one of its kind."""
    wanted = tuple(name for name in names if name != "workspace")

    def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
        own = candidate.query_md("workspace")
        is_other = is_writer and candidate.impl != writer.impl
        if is_other or own is None or own != writer.query_md("workspace") or own.dims != (nbytes,):
            raise FormatError(f"{candidate.impl} has another workspace than {writer.impl}")
        found = {name: candidate.query_md(name) for name in wanted}
        formats = {name: native.desc for name, native in found.items() if native is not None}
        return {**formats, "workspace": own.marked(f"workspace of {writer.impl}")}

    return Lowering(pd, resolve)


def _gradient(kind: Kind, attrs: Recurrent, descs: Mapping[str, NativeDesc], hint: PrimitiveDesc) -> PrimitiveDesc:
    """Create the descriptor of the gradients."""
    from fmtprop import dnnl

    how = {"prop": "backward", "flags": dnnl.RnnFlags.DIFF_WEIGHTS_OVERWRITE}
    return dnnl.create(_problem(kind, attrs, descs, **how), hint=hint)


def _primitive(kind: Kind) -> Any:
    def primitive(attrs: RecurrentTraining, descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None) -> Lowering:
        check_types(descs)
        writer = _open(kind, attrs, descs)
        _check_gradient(kind, attrs, descs, writer)
        return _lowering(_forward(kind, attrs, descs), descs, writer, attrs.workspace_nbytes, is_writer=True)

    return primitive


def _primitive_backward(kind: Kind) -> Any:
    def primitive(attrs: RecurrentTraining, descs: Mapping[str, NativeDesc], attr: PrimitiveAttr | None) -> Lowering:
        check_types(descs)
        hint = _open(kind, attrs, descs)
        return _lowering(_gradient(kind, attrs, descs, hint), descs, hint, attrs.workspace_nbytes)

    return primitive


def _check_gradient(kind: Kind, attrs: Recurrent, descs: Mapping[str, NativeDesc], hint: PrimitiveDesc) -> None:
    """Refuse a forward pass whose workspace no gradient of oneDNN reads: then both passes run in PyTorch."""
    from fmtprop import dnnl

    dims = {name: descs[name].dims for name in (*_sources(kind), *_LEARNED, *_results(kind))}
    formats = {
        end + name: MemoryDesc.any(size, DataType.F32) if "weights" in name else MemoryDesc(size, DataType.F32)
        for end in ("", "diff_")
        for name, size in dims.items()
    }
    try:
        _gradient(kind, attrs, {name: dnnl.NativeDesc.from_desc(desc) for name, desc in formats.items()}, hint)
    except DnnlError as error:
        raise UnsupportedOpError(f"oneDNN has no gradient of this {kind.name}: {error}") from error


def workspace_nbytes(kind: Kind, attrs: Recurrent, dims: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of a layer's workspace, of the implementation that oneDNN prefers; 0 if it has none.

    Parameters
    ----------
    kind : Kind
        Kind of the layer.
    attrs : Recurrent
        Its attributes.
    dims : mapping of str to tuple of int
        Dims of its operands.
    """
    return _workspace_nbytes(kind, attrs, tuple(dims.items()))


@cache
def _workspace_nbytes(kind: Kind, attrs: Recurrent, operands: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    from fmtprop import dnnl

    types = {operand: TensorType(dims) for operand, dims in operands}
    types |= dict(zip(_results(kind), kind.infer(attrs, types), strict=True))
    descs = {name: dnnl.NativeDesc.from_desc(MemoryDesc(type_.dims, DataType.F32)) for name, type_ in types.items()}
    try:
        workspace = _open(kind, attrs, descs).query_md("workspace")
    except DnnlError:  # this library has no such layer: both passes run in PyTorch
        return 0
    return 0 if workspace is None else workspace.nbytes


# ---------------------------------------------------------------- importers


#: index of the workspace among the results of `fmtprop::recurrent`
_WORKSPACE = 3


def _import(call: Call) -> tuple[Value | None, ...]:
    """Import `fmtprop::recurrent`, whose tensors are oneDNN's."""
    kind, attrs, inputs = _read(call)
    if _WORKSPACE in call.used:
        dst = call.emit(f"{kind.name}_training", inputs, attrs)
    else:
        dst = call.emit(kind.name, inputs, Recurrent(attrs.bidirectional, attrs.activation))
    states = [Value(dst.node, index) for index in range(1, len(kind.states) + 1)]
    rest = [None] * (2 - len(states))  # only LSTM has a cell state
    workspace = Value(dst.node, len(states) + 1) if _WORKSPACE in call.used else None
    return (dst, *states, *rest, workspace)


def _import_backward(call: Call) -> tuple[Value | None, ...]:
    """Import `fmtprop::recurrent_backward`."""
    kind, attrs, inputs = _read(call)
    given = dict(zip(_results(kind), call["results"], strict=True))
    diffs = dict(zip((f"diff_{name}" for name in _results(kind)), call["diffs"], strict=True))
    everything = {**inputs, **given, "workspace": call["workspace"], **diffs}
    first = call.emit(f"{kind.name}_backward", everything, attrs)
    count = len(kind.states) + 1
    sources = [Value(first.node, index) for index in range(count)]
    learned = [Value(first.node, index) for index in range(count, count + 3)]
    return (*sources, *[None] * (3 - count), *learned)


def _read(call: Call) -> tuple[Kind, RecurrentTraining, dict[str, Value]]:
    kind = KINDS[call["kind"]]
    nbytes = int(call["workspace_nbytes"])
    attrs = RecurrentTraining(bool(call["bidirectional"]), call["activation"], nbytes)
    tensors = [call["src"], *call["states"], call["weights_layer"], call["weights_iter"], call["bias"]]
    return kind, attrs, dict(zip((*_sources(kind), *_LEARNED), tensors, strict=True))


# ---------------------------------------------------------------- declarations


def _declared(kind: Kind) -> tuple[OpDef, OpDef]:
    sources, learned, results = _sources(kind), _LEARNED, _results(kind)
    diffs = tuple(f"diff_{name}" for name in results)

    def infer(attrs: Any, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
        return (*kind.infer(attrs, types), TensorType((attrs.workspace_nbytes,), "u8"))

    def reference(attrs: RecurrentTraining, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (*kind.reference(attrs, tensors), torch.zeros(attrs.workspace_nbytes, dtype=torch.uint8))

    def infer_backward(attrs: Any, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
        kind.infer(attrs, {name: types[name] for name in (*sources, *learned)})
        return only(types, *sources, *learned)

    def reference_backward(attrs: RecurrentTraining, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return gradients(kind, attrs, tensors)

    def samples() -> Iterable[Sample]:
        for name, plain, types in kind.problems():
            nbytes = workspace_nbytes(kind, plain, {operand: type_.dims for operand, type_ in types.items()})
            yield Sample(name, RecurrentTraining(plain.bidirectional, workspace_nbytes=nbytes), types)

    def samples_backward() -> Iterable[Sample]:
        for sample in samples():
            found = dict(zip((*results, "workspace"), infer(sample.attrs, sample.types), strict=True))
            gradients_of = {f"diff_{name}": found[name] for name in results}
            yield Sample(sample.name, sample.attrs, {**sample.types, **found, **gradients_of})

    forward = OpDef(
        name=f"{kind.name}_training",
        attrs=RecurrentTraining,
        operands=_operands((*sources, *learned)),
        results=_operands((*results, "workspace")),
        category=Category.COMPUTE,
        infer=infer,
        reference=reference,
        primitive=_primitive(kind),
        linear=Linear(products, by_columns=True, roles=("src_layer", "weights_layer", "dst_layer")),
        factor=check_factor,
        loses=loses,
        samples=samples,
        torch={"fmtprop.recurrent.default": _import} if kind.name == "lstm" else {},
    )
    backward = OpDef(
        name=f"{kind.name}_backward",
        attrs=RecurrentTraining,
        operands=_operands((*sources, *learned, *results, "workspace", *diffs)),
        results=_operands(f"diff_{name}" for name in (*sources, *learned)),
        category=Category.COMPUTE,
        infer=infer_backward,
        reference=reference_backward,
        primitive=_primitive_backward(kind),
        linear=Linear(_products_backward, by_columns=True, roles=("src_layer", "weights_layer", "dst_layer")),
        checkable=lambda attrs: False,
        loses=loses,
        samples=samples_backward,
        torch={"fmtprop.recurrent_backward.default": _import_backward} if kind.name == "lstm" else {},
    )
    return forward, backward


def _products_backward(src: tuple[int, ...], weights: tuple[int, ...], dst: tuple[int, ...]) -> float:
    return 2 * products(src, weights, dst)


OPS: tuple[OpDef, ...] = tuple(op for kind in KINDS.values() for op in _declared(kind))
