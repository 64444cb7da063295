"""Recurrent layers in training: the forward pass has a workspace as a further result, which the gradients read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import DnnlError, UnsupportedOpError
from fmtprop.ir import Call, Category, Linear, Lowering, NativeAttr, Natives, OpDef, Operand, Sample, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import create, native, only
from fmtprop.ops.recurrent import KINDS, Kind, Recurrent, check_factor, check_types, fields_of, loses, operand, products
from fmtprop.ops.workspace import WORKSPACE, WORKSPACE_TYPE, lowering_with_workspace

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveDesc

# ---------------------------------------------------------------- names

_LEARNED = ("weights_layer", "weights_iter", "bias")


def _sources(kind: Kind) -> tuple[str, ...]:
    return ("src_layer", *(f"src_{name}" for name in kind.states))


def _results(kind: Kind) -> tuple[str, ...]:
    return ("dst_layer", *(f"dst_{name}" for name in kind.states))


def _operands(names: Iterable[str]) -> tuple[Operand, ...]:
    return tuple(map(operand, names))


# ---------------------------------------------------------------- meaning


def gradients(kind: Kind, attrs: Recurrent, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of sources, weights and bias, by PyTorch.

    `tensors`: its operands, and the gradients of its results as ``diff_dst_layer``, ….
    """
    names = (*_sources(kind), *_LEARNED)
    with torch.enable_grad(), torch.inference_mode(False):
        leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names}
        results = kind.reference(attrs, leaves)
        diffs = [
            tensors[f"diff_{name}"].detach().to(result.dtype, copy=True)
            for name, result in zip(_results(kind), results, strict=True)
        ]
        found = torch.autograd.grad(results, list(leaves.values()), diffs)
        return tuple(gradient.to(leaves["bias"].dtype) for gradient in found)  # f32, as oneDNN's


# ---------------------------------------------------------------- primitives


def _forward(kind: Kind, attrs: Recurrent, descs: Natives) -> PrimitiveDesc:
    """Create the forward descriptor."""
    return create(kind.problem, attrs, descs, prop="forward_training", **fields_of(attrs))


def _described(descs: Natives, names: Iterable[str], **how: Any) -> dict[str, NativeDesc]:
    """Return descriptors of operands of these names: weights in the format that oneDNN chooses, all else row-major.

    With ``end`` and ``dtype``, they are named and typed as gradients.
    """
    end, dtype = how.get("end", ""), how.get("dtype")
    found = {}
    for name in names:
        desc = descs[name]
        make = MemoryDesc.any if "weights" in name else MemoryDesc
        found[end + name] = native(make(desc.dims, dtype or desc.data_type))
    return found


def _open(kind: Kind, attrs: Recurrent, descs: Natives) -> PrimitiveDesc:
    """Create the forward descriptor with weights in the format that oneDNN chooses."""
    return _forward(kind, attrs, _described(descs, (*_sources(kind), *_LEARNED, *_results(kind))))


def _gradient(kind: Kind, attrs: Recurrent, descs: Natives, hint: PrimitiveDesc) -> PrimitiveDesc:
    """Create the descriptor of the gradients."""
    from fmtprop import dnnl

    flags = dnnl.RnnFlags.DIFF_WEIGHTS_OVERWRITE
    return create(kind.problem, attrs, descs, hint=hint, prop="backward", flags=flags, **fields_of(attrs))


def _primitive(kind: Kind) -> Any:
    def primitive(attrs: Recurrent, descs: Natives, attr: NativeAttr) -> Lowering:
        check_types(descs)
        writer = _open(kind, attrs, descs)
        _check_gradient(kind, attrs, descs, writer)
        return lowering_with_workspace(_forward(kind, attrs, descs), descs, writer, is_writer=True)

    return primitive


def _primitive_backward(kind: Kind) -> Any:
    def primitive(attrs: Recurrent, descs: Natives, attr: NativeAttr) -> Lowering:
        check_types(descs)
        hint = _open(kind, attrs, descs)
        return lowering_with_workspace(_gradient(kind, attrs, descs, hint), descs, hint)

    return primitive


def _check_gradient(kind: Kind, attrs: Recurrent, descs: Natives, hint: PrimitiveDesc) -> None:
    """Refuse a forward pass if no gradient of oneDNN reads its workspace: then both passes run in PyTorch."""
    names = (*_sources(kind), *_LEARNED, *_results(kind))
    formats = {**_described(descs, names), **_described(descs, names, end="diff_", dtype="f32")}
    try:
        _gradient(kind, attrs, formats, hint)
    except DnnlError as error:
        raise UnsupportedOpError(f"oneDNN has no gradient of this {kind.name}: {error}") from error


# ---------------------------------------------------------------- importers


#: index of the workspace among the results of `fmtprop::recurrent`
_WORKSPACE = 3


def _import(call: Call) -> tuple[Value | None, ...]:
    """Import `fmtprop::recurrent`; its tensors are oneDNN's."""
    kind, attrs, inputs = _read(call)
    dst = call.emit(f"{kind.name}_training" if _WORKSPACE in call.used else kind.name, inputs, attrs)
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


def _read(call: Call) -> tuple[Kind, Recurrent, dict[str, Value]]:
    kind = KINDS[call["kind"]]
    attrs = Recurrent(bool(call["bidirectional"]), call["activation"])
    tensors = [call["src"], *call["states"], call["weights_layer"], call["weights_iter"], call["bias"]]
    return kind, attrs, dict(zip((*_sources(kind), *_LEARNED), tensors, strict=True))


# ---------------------------------------------------------------- declarations


def _declared(kind: Kind) -> tuple[OpDef, OpDef]:
    sources, learned, results = _sources(kind), _LEARNED, _results(kind)
    diffs = tuple(f"diff_{name}" for name in results)

    def infer(attrs: Any, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
        return (*kind.infer(attrs, types), WORKSPACE_TYPE)

    def reference(attrs: Recurrent, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (*kind.reference(attrs, tensors), torch.zeros(1, dtype=torch.uint8))

    def infer_backward(attrs: Any, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
        kind.infer(attrs, {name: types[name] for name in (*sources, *learned)})
        return tuple(type_.with_dtype("f32") for type_ in only(types, *sources, *learned))

    def reference_backward(attrs: Recurrent, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return gradients(kind, attrs, tensors)

    def samples_backward() -> Iterable[Sample]:
        for sample in kind.samples():
            found = dict(zip((*results, WORKSPACE.name), infer(sample.attrs, sample.types), strict=True))
            gradients_of = {f"diff_{name}": found[name] for name in results}
            yield Sample(sample.name, sample.attrs, {**sample.types, **found, **gradients_of})

    forward = OpDef(
        name=f"{kind.name}_training",
        attrs=Recurrent,
        operands=_operands((*sources, *learned)),
        results=(*_operands(results), WORKSPACE),
        category=Category.COMPUTE,
        infer=infer,
        reference=reference,
        primitive=_primitive(kind),
        linear=Linear(products, by_columns=True, roles=("src_layer", "weights_layer", "dst_layer")),
        numbers=Numbers(factor=check_factor, stays_wide=kind.stays_wide, loses=loses),
        samples=kind.samples,
        torch={"fmtprop.recurrent.default": _import} if kind.name == "lstm" else {},
    )
    backward = OpDef(
        name=f"{kind.name}_backward",
        attrs=Recurrent,
        operands=(*_operands((*sources, *learned, *results)), WORKSPACE, *_operands(diffs)),
        results=_operands(f"diff_{name}" for name in (*sources, *learned)),
        category=Category.COMPUTE,
        infer=infer_backward,
        reference=reference_backward,
        primitive=_primitive_backward(kind),
        linear=Linear(_products_backward, by_columns=True, roles=("src_layer", "weights_layer", "dst_layer")),
        numbers=Numbers(checkable=lambda attrs: False, stays_wide=kind.stays_wide, loses=loses),
        samples=samples_backward,
        torch={"fmtprop.recurrent_backward.default": _import_backward} if kind.name == "lstm" else {},
    )
    return forward, backward


def _products_backward(src: tuple[int, ...], weights: tuple[int, ...], dst: tuple[int, ...]) -> float:
    return 2 * products(src, weights, dst)


OPS: tuple[OpDef, ...] = tuple(op for kind in KINDS.values() for op in _declared(kind))
