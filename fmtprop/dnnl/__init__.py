"""The oneDNN C API through ctypes: owned handles, descriptors, primitives, and nothing else.

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
>>> relu = dnnl.Primitive(dnnl.eltwise_forward("forward_inference", "eltwise_relu", desc, desc))
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
from fmtprop.dnnl.enums import NormFlags
from fmtprop.dnnl.fork import after_fork, fork_guard
from fmtprop.dnnl.handle import live_handles
from fmtprop.dnnl.heap import trim_heap
from fmtprop.dnnl.library import Library, lib, load, loaded, raise_status, status_name
from fmtprop.dnnl.memory import ExecArgs, Memory, memory_of
from fmtprop.dnnl.primitive import Primitive, PrimitiveDesc
from fmtprop.dnnl.primitives import (
    batch_normalization_backward,
    batch_normalization_forward,
    binary,
    concat,
    convolution_backward_data,
    convolution_backward_weights,
    convolution_forward,
    deconvolution_backward_data,
    deconvolution_backward_weights,
    deconvolution_forward,
    eltwise_backward,
    eltwise_forward,
    group_normalization_backward,
    group_normalization_forward,
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
    layer_normalization_backward,
    layer_normalization_forward,
    lrn_backward,
    lrn_forward,
    matmul,
    pooling_backward,
    pooling_forward,
    prelu_backward,
    prelu_forward,
    reduction,
    reorder,
    resampling_backward,
    resampling_forward,
    shuffle_backward,
    shuffle_forward,
    softmax_backward,
    softmax_forward,
    sum,
)
from fmtprop.dnnl.problem import Problem
from fmtprop.dnnl.repro import benchdnn_line

__all__ = [
    "Arg",
    "Engine",
    "ExecArgs",
    "Library",
    "Memory",
    "NativeDesc",
    "NormFlags",
    "PostOp",
    "PostOps",
    "Primitive",
    "PrimitiveAttr",
    "PrimitiveDesc",
    "Problem",
    "Stream",
    "after_fork",
    "batch_normalization_backward",
    "batch_normalization_forward",
    "benchdnn_line",
    "binary",
    "concat",
    "convolution_backward_data",
    "convolution_backward_weights",
    "convolution_forward",
    "deconvolution_backward_data",
    "deconvolution_backward_weights",
    "deconvolution_forward",
    "eltwise_backward",
    "eltwise_forward",
    "fork_guard",
    "group_normalization_backward",
    "group_normalization_forward",
    "hot_execute",
    "inner_product_backward_data",
    "inner_product_backward_weights",
    "inner_product_forward",
    "layer_normalization_backward",
    "layer_normalization_forward",
    "layout_name",
    "lib",
    "live_handles",
    "load",
    "loaded",
    "lrn_backward",
    "lrn_forward",
    "matmul",
    "memory_of",
    "pooling_backward",
    "pooling_forward",
    "prelu_backward",
    "prelu_forward",
    "raise_status",
    "reduction",
    "reorder",
    "resampling_backward",
    "resampling_forward",
    "shuffle_backward",
    "shuffle_forward",
    "softmax_backward",
    "softmax_forward",
    "status_name",
    "sum",
    "supports",
    "trim_heap",
]

hot_execute: Any
"""``dnnl_primitive_execute`` without ``argtypes``, for the hot loop; loads the library on first access."""


def __getattr__(name: str) -> Any:
    if name == "hot_execute":
        from fmtprop.dnnl.library import bare_execute

        function = globals()["hot_execute"] = bare_execute()
        return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
