"""Lowering of an op to a primitive with other axes of its tensors: permuted, joined, left out or added.

A *grouping* maps axes: for each axis of the primitive's tensor, it has the axes of the op's tensor that this axis runs
over, outermost first, or none for an axis of size 1. Owns the map (descriptors, post-ops) and its exact inverse. Must
not know which op is lowered to which primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from fmtprop.errors import DnnlError, FormatError, UnsupportedOpError
from fmtprop.ir.op import Lowering, NativeAttr, Natives
from fmtprop.layout import MemoryDesc
from fmtprop.ops.building import lowering, native

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PrimitiveAttr, PrimitiveDesc

Grouping = tuple[tuple[int, ...], ...]

#: the function from regrouped descriptors and attributes to a primitive descriptor
Make = Callable[["Natives", "NativeAttr"], "PrimitiveDesc"]


@lru_cache(maxsize=4096)  # implementations share formats, so most calls repeat
def regrouped(desc: MemoryDesc, grouping: Grouping) -> MemoryDesc:
    """Return the descriptor of the same memory with the grouping's axes.

    Raises FormatError if the format cannot express it: joined axes are blocked or do not follow each other in memory.

    >>> image = MemoryDesc((2, 8, 4, 5), tag="acdb")
    >>> regrouped(image, ((0, 2, 3), (1,)))
    MemoryDesc((40, 8), 'f32', tag='ab')
    """
    axes = _axes(grouping)
    if axes == tuple(range(desc.ndim)) and all(len(group) == 1 for group in grouping):
        return desc  # of any kind
    return desc.transpose(axes).reshape(prod(desc.dims[axis] for axis in group) for group in grouping)


@lru_cache(maxsize=4096)
def restored(desc: MemoryDesc, grouping: Grouping, dims: tuple[int, ...]) -> MemoryDesc:
    """Undo :func:`regrouped` for a tensor of these dims.

    Raises FormatError if the format cannot express it: a joined axis is blocked; the kind is opaque, and the axes are
    others.

    >>> restored(MemoryDesc((40, 8), tag="ab"), ((0, 2, 3), (1,)), (2, 8, 4, 5))
    MemoryDesc((2, 8, 4, 5), 'f32', tag='acdb')
    """
    axes = _axes(grouping)
    if axes == tuple(range(desc.ndim)) and desc.dims == dims:
        return desc
    return desc.reshape(dims[axis] for axis in axes).permute_axes(axes)


@dataclass(frozen=True)
class Regrouping:
    """The axes of a primitive's tensors, in terms of an op's operands and result."""

    op: str
    #: for each operand and for ``dst``
    tensors: Mapping[str, Grouping]
    #: format, in the primitive's axes, of each src and dst that is `any`; empty if the primitive chooses. It must not
    #: where axes are joined, since the op's axes cannot express a blocked format of them.
    tag: str = "ab"

    def lower(self, descs: Natives, attr: NativeAttr, make: Make) -> Lowering:
        """Create the primitive descriptor."""
        given = {name: native for name, native in descs.items() if name in self.tensors}
        dims = {name: native.dims for name, native in given.items()}
        if 0 in dims["dst"] or 0 in dims["src"]:
            raise UnsupportedOpError(
                f"{self.op}: dst has dims {dims['dst']}; rows of no elements tell no batch from another"
            )
        bias = given.get("bias")
        if bias is not None:
            self._check_broadcast("bias", bias.dims, dims["dst"])
        asked = {name: self._decided(name, native.desc) for name, native in given.items()}
        seen = {name: self._seen(name, desc) for name, desc in asked.items()}
        pd = make(_natives(seen), None if attr is None else self._attributes(attr, dims))
        plain = lowering(pd, given)

        def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
            formats = {}
            for name, desc in plain.resolve(candidate).items():
                own = self._restored(desc, self.tensors[name], dims[name])
                if asked[name].kind != "any" and own != asked[name]:
                    raise FormatError(f"{self.op}: {candidate.impl} takes {name} as {own}, not as {asked[name]}")
                formats[name] = own
            return formats

        def tail(desc: MemoryDesc, size: tuple[int, ...]) -> MemoryDesc:
            return self._restored(desc, self.tensors["dst"], size)

        return Lowering(pd, resolve, tail)

    def _decided(self, name: str, desc: MemoryDesc) -> MemoryDesc:
        """Decide the format of src or dst if it is `any`."""
        if not self.tag or desc.kind != "any" or name not in ("src", "dst"):
            return desc
        free = regrouped(desc, self.tensors[name])
        return restored(MemoryDesc(free.dims, free.dtype, tag=self.tag), self.tensors[name], desc.dims)

    def _seen(self, name: str, desc: MemoryDesc) -> MemoryDesc:
        seen = self._regrouped(name, desc, self.tensors[name])
        if seen.ndim > 2 and seen.kind != "any" and seen.is_packed and sum(size > 1 for size in seen.dims) < 2:
            # oneDNN derives a vector's tag from strides without a meaning, and has fast code for one tag only. So let
            # it choose, and check that the result is the requested format.
            return MemoryDesc.any(seen.dims, seen.dtype)
        return seen

    def _regrouped(self, name: str, desc: MemoryDesc, grouping: Grouping) -> MemoryDesc:
        try:
            return regrouped(desc, grouping)
        except FormatError as error:
            dims = tuple(prod(desc.dims[axis] for axis in group) for group in grouping)
            raise FormatError(
                f"{self.op}: {name} {desc} cannot be seen as {dims}: reorder it to plain first"
            ) from error

    def _restored(self, desc: MemoryDesc, grouping: Grouping, dims: tuple[int, ...]) -> MemoryDesc:
        """Return the descriptor in the op's dims; refuse it unless it describes exactly the same memory."""
        own = restored(desc, grouping, dims)
        if regrouped(own, grouping) != desc or own.nbytes != desc.nbytes:
            raise FormatError(f"{self.op}: {desc} is nothing that dims {dims} can express")
        try:
            native(own)  # code that fills the tensor creates this descriptor
        except DnnlError as error:
            raise FormatError(f"{self.op}: oneDNN cannot create {own}, which is {desc} in dims {dims}") from error
        return own

    def _check_broadcast(self, name: str, dims: tuple[int, ...], dst: tuple[int, ...]) -> None:
        """Check that an operand of dst's rank varies along all the axes that become one, or along none."""
        if len(dims) != len(dst):
            return
        for group in self.tensors["dst"]:
            sizes, whole = (tuple(shape[axis] for axis in group) for shape in (dims, dst))
            if sizes != whole and prod(sizes) != 1:
                raise UnsupportedOpError(
                    f"{self.op} of a rank-{len(dst)} src sees {whole} as one axis, but {name} has {sizes} there: "
                    "give it all of these sizes or only ones"
                )

    def _attributes(self, attr: PrimitiveAttr, dims: Mapping[str, tuple[int, ...]]) -> PrimitiveAttr:
        """Return the attributes with the second source of each binary post-op regrouped like dst, and its scales."""
        from fmtprop import dnnl

        scales = {argument: self._mask(argument, mask, dims) for argument, mask in attr.scales.items()}
        if all(op.kind in ("eltwise", "sum") for op in attr.ops) and scales == attr.scales:
            return attr
        dst = dims["dst"]
        post_ops = dnnl.PostOps()
        for index, op in enumerate(attr.ops):
            if op.kind == "binary" and op.src1 is not None:
                name = f"the operand of post-op {index}"
                self._check_broadcast(name, op.src1.dims, dst)
                desc = op.src1.desc
                seen = self._regrouped(name, desc, self.tensors["dst"])
                if seen.kind == "any" and self.tag:
                    seen = MemoryDesc(seen.dims, seen.dtype, tag=self.tag)
                post_ops.append_binary(op.alg, native(seen))
            elif op.kind == "eltwise":
                post_ops.append_eltwise(op.alg, *op.values)
            elif op.kind == "sum":
                post_ops.append_sum(*op.values)
            elif op.kind == "prelu" and op.values[0] in (0, 1 << 1) and self.tensors["dst"][1] == (1,):  # by channel
                post_ops.append_prelu(int(op.values[0]))
            else:
                raise UnsupportedOpError(
                    f"{self.op} seen with other axes cannot carry a {op.kind} post-op: keep it as a node of its own"
                )
        return dnnl.PrimitiveAttr(post_ops, scales, attr.zero_points)

    def _mask(self, argument: int, mask: int, dims: Mapping[str, tuple[int, ...]]) -> int:
        """Return the bits of the axes along which an argument's scales vary, in the axes that the primitive sees."""
        from fmtprop import dnnl

        name = dnnl.Arg(argument).name.removesuffix("_0").lower()
        found = 0
        for place, group in enumerate(self.tensors[name]):
            wide = [axis for axis in group if dims[name][axis] > 1]
            varying = [axis for axis in wide if mask >> axis & 1]
            if varying and varying != wide:
                raise UnsupportedOpError(f"{self.op}: scales of {name} vary along some of the axes {wide}, seen as one")
            found |= bool(varying) << place
        return found


def _axes(grouping: Grouping) -> tuple[int, ...]:
    return tuple(axis for group in grouping for axis in group)


def _natives(descs: Mapping[str, MemoryDesc]) -> dict[str, NativeDesc]:
    return {name: native(desc) for name, desc in descs.items()}
