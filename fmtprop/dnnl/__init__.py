"""The oneDNN C API through ctypes: handles with one owner, descriptors and primitives.

Nothing is loaded on import; the library is found and loaded on first use (see `load`).

A failed call raises `fmtprop.errors.DnnlError` with the operands and a benchdnn line; a closed handle raises
`fmtprop.errors.HandleError`.

Examples
--------
>>> import torch
>>> from fmtprop import dnnl
>>> from fmtprop.layout import MemoryDesc
>>> x, y = torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2)
>>> desc = dnnl.NativeDesc.from_desc(MemoryDesc((1, 2), "f32", tag="ab"))
>>> relu = dnnl.Primitive(dnnl.create(dnnl.Eltwise(src=desc, dst=desc, alg="eltwise_relu")))
>>> relu.execute(dnnl.Stream(), {dnnl.Arg.SRC: dnnl.memory_of(x, desc), dnnl.Arg.DST: dnnl.memory_of(y, desc)})
>>> y
tensor([[0., 2.]])
"""

from __future__ import annotations

from typing import Any

from fmtprop.dnnl._abi import Arg
from fmtprop.dnnl.attr import PostOp, PostOps, PrimitiveAttr
from fmtprop.dnnl.capability import supports
from fmtprop.dnnl.desc import NativeDesc, layout_name
from fmtprop.dnnl.engine import Engine, Stream
from fmtprop.dnnl.enums import NormFlags, RnnFlags
from fmtprop.dnnl.fork import after_fork, fork_guard
from fmtprop.dnnl.handle import live_handles
from fmtprop.dnnl.heap import drop_pages, trim_heap, use_huge_pages
from fmtprop.dnnl.kinds import (
    BatchNormalization,
    Binary,
    Concat,
    Convolution,
    Deconvolution,
    Eltwise,
    GroupNormalization,
    Gru,
    InnerProduct,
    LayerNormalization,
    LbrGru,
    Lrn,
    Lstm,
    Matmul,
    Pooling,
    Prelu,
    Problem,
    Reduction,
    Reorder,
    Resampling,
    Shuffle,
    Softmax,
    Sum,
    VanillaRnn,
)
from fmtprop.dnnl.library import Library, lib, load, loaded, raise_status, status_name
from fmtprop.dnnl.native_memory import ExecArgs, Memory, memory_of
from fmtprop.dnnl.primitive import Primitive, PrimitiveDesc, create
from fmtprop.dnnl.recipe import Recipe
from fmtprop.dnnl.specs import SPECS, Spec, spec_of

__all__ = [
    "SPECS",
    "Arg",
    "BatchNormalization",
    "Binary",
    "Concat",
    "Convolution",
    "Deconvolution",
    "Eltwise",
    "Engine",
    "ExecArgs",
    "GroupNormalization",
    "Gru",
    "InnerProduct",
    "LayerNormalization",
    "LbrGru",
    "Library",
    "Lrn",
    "Lstm",
    "Matmul",
    "Memory",
    "NativeDesc",
    "NormFlags",
    "Pooling",
    "PostOp",
    "PostOps",
    "Prelu",
    "Primitive",
    "PrimitiveAttr",
    "PrimitiveDesc",
    "Problem",
    "Recipe",
    "Reduction",
    "Reorder",
    "Resampling",
    "RnnFlags",
    "Shuffle",
    "Softmax",
    "Spec",
    "Stream",
    "Sum",
    "VanillaRnn",
    "after_fork",
    "create",
    "drop_pages",
    "fork_guard",
    "hot_execute",
    "layout_name",
    "lib",
    "live_handles",
    "load",
    "loaded",
    "memory_of",
    "raise_status",
    "spec_of",
    "status_name",
    "supports",
    "trim_heap",
    "use_huge_pages",
]

hot_execute: Any
"""``dnnl_primitive_execute`` without ``argtypes``, for the hot loop; loads the library on first access."""


def __getattr__(name: str) -> Any:
    if name == "hot_execute":
        from fmtprop.dnnl.library import bare_execute

        function = globals()["hot_execute"] = bare_execute()
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
