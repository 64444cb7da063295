"""Lower one sample of an op, run it through oneDNN on real memory, compare with the op's reference.

The statuses are benchdnn's: PASSED, FAILED, UNIMPLEMENTED (oneDNN has no such primitive), MISTRUSTED (right, but with
so many zeros in the answer that it proves little).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import DnnlError, FmtpropError, FormatError, UnsupportedOpError
from fmtprop.ir.node import Node
from fmtprop.ir.op import Category, Lowering, OpDef, Operand, Sample
from fmtprop.ir.tensors import torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.eltwise import Eltwise
from fmtprop.targets.known_bad import known_bad

#: greatest difference, relative to the greatest magnitude in the answer
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 4e-3}
#: beyond this share of zeros an agreement is no evidence
MOSTLY_ZERO = 0.7
ALPHABET = "abcdefghijkl"
FORMATS = ("any", "plain", "channels_last", "blocked")


@dataclass
class Outcome:
    """What became of one problem."""

    status: str
    detail: str = ""
    impl: str = ""
    descs: Mapping[str, MemoryDesc] = field(default_factory=dict)


def plain(type_: TensorType) -> MemoryDesc:
    return MemoryDesc(type_.dims, type_.dtype, tag=ALPHABET[: type_.ndim])


def layout_of(type_: TensorType, kind: str) -> MemoryDesc:
    """Return the format of that kind, or tag; plain where the rank or a broadcast axis does not allow it."""
    letters = ALPHABET[: type_.ndim]
    if kind == "any":
        return MemoryDesc.any(type_.dims, type_.dtype)
    if kind not in FORMATS:
        return (
            MemoryDesc(type_.dims, type_.dtype, tag=kind)
            if len({*kind.lower()} & {*ALPHABET}) == type_.ndim
            else plain(type_)
        )
    if type_.ndim < 3 or type_.dims[1] == 1 or kind == "plain":
        return plain(type_)
    if kind == "channels_last":
        return MemoryDesc(type_.dims, type_.dtype, tag=f"a{letters[2:]}b")
    return MemoryDesc(type_.dims, type_.dtype, tag=f"aB{letters[2:]}8b")


def orders_of_axes(ndim: int, block: int) -> Iterator[str]:
    """Yield the tags of all orders of axes, without blocks, and with blocks of each of the first two."""
    for letters in map("".join, permutations(ALPHABET[:ndim])):
        yield letters
        for axis in ALPHABET[: min(ndim, 2)]:
            yield letters.replace(axis, axis.upper()) + f"{block}{axis}"


def typed(op: OpDef, sample: Sample, dtype: str) -> dict[str, TensorType]:
    """Return operand types with floats in `dtype`; vectors of parameters stay f32, as oneDNN wants them."""
    found = {}
    for name, type_ in sample.types.items():
        keep = not type_.dtype.is_floating or (op.operand(name).parameter and type_.ndim == 1)
        found[name] = type_ if keep else type_.with_dtype(dtype)
    return found


def random_tensors(types: Mapping[str, TensorType], low: float, high: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.rand(type_.dims, generator=generator) * (high - low) + low).to(torch_dtype(type_.dtype))
        for name, type_ in types.items()
    }


def requested(op: OpDef, types: Mapping[str, TensorType], dst: TensorType, kind: str) -> dict[str, MemoryDesc]:
    """Return the descriptors that a planner would ask for, with activations in formats of that kind."""
    if op.name == "reorder":
        # both formats are the caller's: from each to plain, and from plain to another
        (src,) = types.values()
        other = "channels_last" if kind == "plain" else "plain"
        return {"src": plain(src) if kind == "any" else layout_of(src, kind), "dst": layout_of(dst, other)}
    compute = op.category is Category.COMPUTE
    descs = {}
    for name, type_ in types.items():
        parameter = op.operand(name).parameter
        if compute and kind != "plain" and (parameter or name != "src"):
            descs[name] = layout_of(type_, "any")
        elif parameter or (kind == "any" and not compute):
            descs[name] = plain(type_)
        else:
            descs[name] = layout_of(type_, kind)
    descs[op.results[0].name] = layout_of(dst, "plain" if kind == "plain" else "any")
    return descs


def lower(op: OpDef, attrs: Any, descs: Mapping[str, MemoryDesc], attr: dnnl.PrimitiveAttr | None = None) -> Lowering:
    assert op.primitive is not None
    natives = {name: dnnl.NativeDesc.from_desc(desc) for name, desc in descs.items()}
    user = attr if attr is not None else dnnl.PrimitiveAttr()
    return op.primitive(attrs, natives, user)


def _buffer(nbytes: int) -> torch.Tensor:
    """Return written memory, full of NaN in every floating-point type."""
    return torch.full((max(nbytes, 1),), 0xFF, dtype=torch.uint8)


def reordered(tensor: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return bytes that hold the tensor in a format."""
    dtype = DataType.from_any(tensor.dtype)
    src = dnnl.NativeDesc.from_desc(MemoryDesc(tuple(tensor.shape), dtype, tag=ALPHABET[: tensor.ndim]))
    dst = dnnl.NativeDesc.from_desc(desc)
    data = _buffer(dst.nbytes)
    run_buffers(dnnl.create(dnnl.Reorder(src=src, dst=dst)), {dnnl.Arg.FROM: tensor, dnnl.Arg.TO: data})
    return data


def plain_tensor(data: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return what the bytes hold in a format as a plain tensor."""
    result = torch.empty(desc.dims, dtype=torch_dtype(desc.dtype))
    dst = dnnl.NativeDesc.from_desc(MemoryDesc(desc.dims, desc.dtype, tag=ALPHABET[: desc.ndim]))
    pd = dnnl.create(dnnl.Reorder(src=dnnl.NativeDesc.from_desc(desc), dst=dst))
    run_buffers(pd, {dnnl.Arg.FROM: data, dnnl.Arg.TO: result})
    return result


def run_buffers(pd: dnnl.PrimitiveDesc, buffers: Mapping[int, torch.Tensor]) -> None:
    """Execute on bytes by argument."""
    buffers = {int(arg): data.contiguous() for arg, data in buffers.items()}
    scratchpad = pd.query_md("scratchpad")
    if scratchpad is not None and scratchpad.nbytes:
        buffers[int(dnnl.Arg.SCRATCHPAD)] = _buffer(scratchpad.nbytes)
    memories = {}
    for arg, data in buffers.items():
        desc = pd.arg_md(arg)
        assert desc is not None, f"{pd} takes no argument {arg}"
        memories[arg] = dnnl.memory_of(data, desc)
    dnnl.Primitive(pd).execute(dnnl.Stream(), memories)


def arg_of(operand: Operand, name: str) -> int:
    """Return the execution argument of an operand, the index of a variadic one added."""
    return int(dnnl.Arg[operand.arg]) + (operand.index_of(name) or 0)


def execute(
    op: OpDef,
    lowering: Lowering,
    pd: dnnl.PrimitiveDesc,
    tensors: Mapping[str, torch.Tensor],
    *,
    extra: Mapping[int, torch.Tensor] | None = None,
    inplace: str | None = None,
    dst: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Mapping[str, MemoryDesc]]:
    """Run an implementation on plain tensors; return a plain dst and the formats.

    `extra` are post-op buffers by argument, `inplace` the operand whose buffer dst takes over, `dst` what it holds
    before (for sum).
    """
    formats = lowering.resolve(pd)
    data = {name: reordered(tensor, formats[name]) for name, tensor in tensors.items()}
    if inplace is not None:
        result = data[inplace]
    elif dst is not None:
        result = reordered(dst, formats[op.results[0].name])
    else:
        result = _buffer(dnnl.NativeDesc.from_desc(formats[op.results[0].name]).nbytes)
    buffers = {arg_of(op.operand(name), name): value for name, value in data.items()}
    for other in op.results[1:]:
        if other.name in formats:
            buffers[int(dnnl.Arg[other.arg])] = _buffer(formats[other.name].nbytes)
    run_buffers(pd, {**buffers, int(dnnl.Arg[op.results[0].arg]): result, **(extra or {})})
    return plain_tensor(result, formats[op.results[0].name]), formats


def exact(op: OpDef, attrs: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the reference's answer in f64 on the very numbers that oneDNN gets."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    return op.reference(attrs, wide)[0].double()


def judge(got: torch.Tensor, wanted: torch.Tensor, dtype: str) -> Outcome:
    """Compare an answer with the reference's."""
    got = got.double()
    if got.shape != wanted.shape:
        return Outcome("FAILED", f"dims {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    scale = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
    # NaN must not pass
    wrong = ~((got - wanted).abs() <= TOLERANCE[dtype] * scale)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        share = f"{int(wrong.sum())} of {wrong.numel()}"
        return Outcome("FAILED", f"{share} differ, first at {index}: {got[index]:g}, expected {wanted[index]:g}")
    zeros = float((wanted == 0).double().mean()) if wanted.numel() else 1.0
    if zeros > MOSTLY_ZERO:
        return Outcome("MISTRUSTED", f"{zeros:.0%} of the answer are zeros")
    return Outcome("PASSED")


def lacking(sample: Sample, dtype: str, error: DnnlError) -> bool:
    """Tell whether oneDNN has no such primitive; it calls rounding of other types than f32 an invalid argument."""
    rounds = isinstance(sample.attrs, Eltwise) and sample.attrs.alg == "round" and dtype != "f32"
    return error.status == ("invalid_arguments" if rounds else "unimplemented")


def conform(op: OpDef, sample: Sample, dtype: str, kind: str, limit: int | None = None) -> list[Outcome]:
    """Run the first `limit` implementations of a sample in one setting of formats; the first is oneDNN's own choice."""
    types = typed(op, sample, dtype)
    result, *others = op.infer(sample.attrs, types)
    descs = requested(op, types, result, kind)
    descs |= {one.name: layout_of(type_, "any") for one, type_ in zip(op.results[1:], others, strict=False)}
    try:
        lowering = lower(op, sample.attrs, descs)
    except (UnsupportedOpError, FormatError) as error:
        return [Outcome("UNIMPLEMENTED", str(error))]
    except DnnlError as error:
        return [Outcome("UNIMPLEMENTED" if lacking(sample, dtype, error) else "FAILED", str(error))]
    tensors = random_tensors(types, sample.low, sample.high)
    wanted = exact(op, sample.attrs, tensors)
    outcomes = []
    node = Node(op.name, op.name, sample.attrs, results=(result,))
    for pd in islice(lowering.pd.implementations(), limit):
        try:
            defect = known_bad(dnnl.lib().version, node, lowering.resolve(pd), pd.impl)
        except FormatError as error:  # the op's dims have no name for this implementation's formats
            defect = str(error)
        if defect is not None:
            outcomes.append(Outcome("UNIMPLEMENTED", defect, pd.impl))
            continue
        try:
            got, formats = execute(op, lowering, pd, tensors)
        except FmtpropError as error:
            outcomes.append(Outcome("FAILED", str(error), pd.impl))
            continue
        outcome = judge(got, wanted, result.dtype.value)
        outcome.impl, outcome.descs = pd.impl, formats
        outcomes.append(outcome)
    return outcomes
