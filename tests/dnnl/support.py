"""Helpers: run a primitive on numpy arrays, format by format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fmtprop import dnnl
from fmtprop.dnnl import Arg, NativeDesc
from fmtprop.layout import MemoryDesc

Array = npt.NDArray[np.float32]
A = Arg


def plain(shape: tuple[int, ...], dtype: str = "f32") -> NativeDesc:
    return NativeDesc.from_desc(MemoryDesc(shape, dtype))


def tagged(shape: tuple[int, ...], tag: str, dtype: str = "f32") -> NativeDesc:
    return NativeDesc.from_desc(MemoryDesc(shape, dtype, tag=tag))


def any_of(shape: tuple[int, ...], dtype: str = "f32") -> NativeDesc:
    return NativeDesc.from_desc(MemoryDesc.any(shape, dtype))


#: a 3x3 window that keeps the size
SAME: dict[str, Any] = {"strides": (1, 1), "dilates": (0, 0), "pad_l": (1, 1), "pad_r": (1, 1)}


def reorder(src: NativeDesc, dst: NativeDesc) -> dnnl.PrimitiveDesc:
    return dnnl.create(dnnl.Reorder(src=src, dst=dst))


def over(array: npt.NDArray[np.generic], desc: NativeDesc) -> dnnl.Memory:
    assert array.nbytes >= desc.nbytes
    return dnnl.Memory(dnnl.Engine.cpu(), desc, array.ctypes.data, array)


def buffer(desc: NativeDesc) -> npt.NDArray[np.uint8]:
    return np.zeros(max(desc.nbytes, 1), np.uint8)


def to(desc: NativeDesc, array: Array) -> npt.NDArray[np.uint8]:
    """Reorder a plain array into a format."""
    out = buffer(desc)
    src = plain(array.shape)
    with dnnl.Stream() as stream, reorder(src, desc) as pd, dnnl.Primitive(pd) as primitive:
        primitive.execute(stream, {A.SRC: over(np.ascontiguousarray(array), src), A.DST: over(out, desc)})
    return out


def back(desc: NativeDesc, data: npt.NDArray[np.uint8]) -> Array:
    """Reorder from a format into a plain array."""
    out = np.zeros(desc.dims, np.float32)
    dst = plain(desc.dims)
    with dnnl.Stream() as stream, reorder(desc, dst) as pd, dnnl.Primitive(pd) as primitive:
        primitive.execute(stream, {A.SRC: over(data, desc), A.DST: over(out, dst)})
    return out


def run(
    pd: dnnl.PrimitiveDesc,
    inputs: Mapping[Any, Array],
    outputs: tuple[int | Arg, ...] = (A.DST,),
    raw: Mapping[Any, npt.NDArray[np.uint8]] | None = None,
) -> tuple[list[Array], dict[Any, npt.NDArray[np.uint8]]]:
    """Execute with plain arrays; return the outputs as plain arrays, and every raw output buffer."""
    memories: dict[int | Arg, dnnl.Memory] = {}
    for arg, array in inputs.items():
        desc = pd.arg_md(arg)
        if desc is None and arg >= A.ATTR_SCALES:
            desc = plain(array.shape)
        assert desc is not None, f"{pd} takes no argument {arg}"
        memories[arg] = over(to(desc, array), desc)
    results: dict[Any, npt.NDArray[np.uint8]] = {}
    extra = (A.WORKSPACE, A.SCRATCHPAD)
    for arg in (*outputs, *extra):
        desc = pd.arg_md(arg) if arg != A.SCRATCHPAD else pd.query_md("scratchpad")
        if desc is None or (raw is not None and arg in raw):
            continue
        results[arg] = buffer(desc)
        memories[arg] = over(results[arg], desc)
    for arg, data in (raw or {}).items():
        desc = pd.arg_md(arg)
        assert desc is not None
        memories[arg] = over(data, desc)
    with dnnl.Stream() as stream, dnnl.Primitive(pd) as primitive:
        primitive.execute(stream, memories)
    arrays = []
    for arg in outputs:
        desc = pd.arg_md(arg)
        assert desc is not None
        arrays.append(back(desc, results[arg]))
    return arrays, results
