"""The gradients of softmax and of its logarithm, by their results: oneDNN's softmax in backward propagation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmtprop.ir import Call, Importer, Reads, TensorType, Value, each_image_across_axis
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Sample
from fmtprop.ops import softmax
from fmtprop.ops.building import Ready, Tensors, check_alike, create, is_native, lowering, normalised_axis
from fmtprop.ops.softmax import Softmax

# ---------------------------------------------------------------- meaning


def infer(attrs: Softmax, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src: that of diff_dst."""
    check_alike(types, "dst", "diff_dst")
    return softmax.infer(attrs, {"src": types["diff_dst"]})


def _gradient(attrs: Softmax) -> Any:
    aten = torch.ops.aten
    return aten._log_softmax_backward_data if attrs.alg == "log" else aten._softmax_backward_data


def reference(attrs: Softmax, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    dst, diff_dst = tensors["dst"].contiguous(), tensors["diff_dst"].contiguous()
    return (_gradient(attrs)(diff_dst, dst, attrs.axis, diff_dst.dtype),)


def operator(attrs: Softmax, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    dst, diff_dst = tensors["dst"], tensors["diff_dst"]
    if not all(tensor.is_contiguous() for tensor in (dst, diff_dst, results[0])):
        return None
    if attrs.alg == "log":
        return partial(_gradient(attrs).out, diff_dst, dst, attrs.axis, diff_dst.dtype, out=results[0])
    return partial(_gradient(attrs).out, diff_dst, dst, attrs.axis, diff_dst.dtype, grad_input=results[0])


def loses(attrs: Softmax) -> frozenset[str]:
    """Name the special values that differ: oneDNN's exponential of NaN is a number."""
    return frozenset({"nan"}) if attrs.alg == "log" else frozenset()


def primitive(attrs: Softmax, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor; the forward one that it takes as a hint has dst in the same format."""
    hint = create("Softmax", attrs, dict.fromkeys(("src", "dst"), descs["dst"]), attr, prop="forward_training")
    return lowering(create("Softmax", attrs, descs, attr, hint, prop="backward_data"), descs)


# ---------------------------------------------------------------- importers


def _import(alg: str) -> Importer:
    def importer(call: Call) -> Value | None:
        dst, diff_dst = call["output"], call["grad_output"]
        type_ = call.type(diff_dst)
        if not is_native(type_) or call.type(dst) != type_ or call["input_dtype"] != type_.dtype:
            return None
        attrs = Softmax(normalised_axis(call["dim"], type_.ndim), alg)
        return call.emit("softmax_backward", {"dst": dst, "diff_dst": diff_dst}, attrs)

    return importer


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield the gradients of the softmax's own samples; results are positive, their logarithms negative."""
    for sample in softmax.samples():
        attrs: Softmax = sample.attrs  # type: ignore[assignment]
        types = {"dst": sample.types["src"], "diff_dst": sample.types["src"]}
        low, high = (-3.0, -0.1) if attrs.alg == "log" else (0.0, 1.0)
        yield Sample(sample.name, attrs, types, low, high)


SOFTMAX_BACKWARD = OpDef(
    name="softmax_backward",
    attrs=Softmax,
    operands=(Operand("dst", "DST"), Operand("diff_dst", "DIFF_DST")),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator, reads=Reads.ROWS),
    primitive=primitive,
    sliced=each_image_across_axis,
    cost=softmax.SOFTMAX.cost,
    numbers=Numbers(loses=loses),
    inplace=frozenset({"diff_dst"}),
    short="softmax_back",
    samples=samples,
    torch={
        "aten._softmax_backward_data.default": _import("accurate"),
        "aten._log_softmax_backward_data.default": _import("log"),
    },
)
