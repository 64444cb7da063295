"""Deconvolution (transposed convolution) over one to three spatial axes.

Also owns the importer of ``aten.convolution.default``, which is a convolution or a deconvolution by its argument
``transposed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Bytes, Call, Category, Cost, Linear, Onnx, OpDef, Sample, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, Numbers
from fmtprop.ops.arguments import batched, computable, ints, unbatched
from fmtprop.ops.building import WEIGHTED, primitive_of
from fmtprop.ops.convolution import (
    Window,
    check_channels,
    grouped_dims,
    import_padded,
    problem,
    window_attributes,
)
from fmtprop.ops.view_attrs import permuted, reshaped
from fmtprop.ops.window import extent, products, torch_padding

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Deconv(Window):
    """Attributes of a deconvolution, as of :class:`~fmtprop.ops.convolution.Window`.

    oneDNN developer guide, "Convolution", section "Deconvolution".
    """

    def __post_init__(self) -> None:
        self.check("deconvolution", tuple(map(abs, self.pad_r)))
        for axis, (pad, stride) in enumerate(zip(self.pad_r, self.strides, strict=True)):
            if pad + stride < 1:
                raise ShapeError(
                    f"deconvolution pad_r[{axis}] is {pad}, but must be at least {1 - stride} (1 - stride)"
                )


# ---------------------------------------------------------------- meaning


def infer(attrs: Deconv, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, O, …]."""
    spatial = len(attrs.strides)
    channels = check_channels(types, spatial, attrs.groups)
    src, kernel = types["src"], types["weights"].dims[-spatial:]
    sizes = []
    for axis, size in enumerate(src.dims[2:]):
        covered, cut = _covered(attrs, axis, size, kernel[axis]), attrs.pad_l[axis] + attrs.pad_r[axis]
        if covered - cut < 1:
            raise ShapeError(f"dst axis {axis + 2} would be empty: {covered} positions less padding {cut}")
        sizes.append(covered - cut)
    return (src.with_dims((src.dims[0], channels, *sizes)),)


def _covered(attrs: Deconv, axis: int, size: int, kernel: int) -> int:
    """Return the positions of dst that the windows of a spatial axis cover, before padding is cut off."""
    return (size - 1) * attrs.strides[axis] + extent(kernel, attrs.dilates[axis])


def reference(attrs: Deconv, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src."""
    src = tensors["src"]
    spatial = len(attrs.strides)
    weights = tensors["weights"].to(src.dtype)
    # PyTorch keeps the weights as [I, O/G, k…]
    weights = weights.transpose(1, 2).flatten(0, 1) if attrs.groups > 1 else weights.transpose(0, 1)
    if spatial == 2:  # of few channels, PyTorch's kernel for channels last takes a tenth of the other's time
        weights = weights.contiguous(memory_format=torch.channels_last)
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    dilation = tuple(dilate + 1 for dilate in attrs.dilates)
    more = tuple(left - right for left, right in zip(attrs.pad_l, attrs.pad_r, strict=True))
    if min(attrs.pad_l) >= 0 and all(0 <= m < max(s, d) for m, s, d in zip(more, attrs.strides, dilation, strict=True)):
        dst = convolve(src, weights, None, attrs.strides, attrs.pad_l, more, attrs.groups, dilation)
    else:
        dst = convolve(src, weights, None, attrs.strides, 0, 0, attrs.groups, dilation)
        dst = F.pad(dst, [-pad for pad in torch_padding(attrs.pad_l, attrs.pad_r)])
    if "bias" in tensors:  # PyTorch's kernels for strides take up to ten times as long with a bias
        dst += tensors["bias"].to(src.dtype).reshape(-1, *(1,) * spatial)
    return (dst,)


# ---------------------------------------------------------------- importers


def _import(call: Call) -> Value | None:
    src, weights, bias = call["input"], call["weight"], call["bias"]
    if not computable(call, src, weights, bias):
        return None
    dims, groups = call.type(weights).dims, call["groups"]
    spatial = len(dims) - 2
    if not 1 <= spatial <= 3:
        return None
    strides, padding = ints(call["stride"], spatial), ints(call["padding"], spatial)
    extra = ints(call["output_padding"], spatial)
    pad_r = tuple(pad - more for pad, more in zip(padding, extra, strict=True))
    if any(pad + stride < 1 for pad, stride in zip(pad_r, strides, strict=True)):
        # PyTorch allows an output_padding beyond the stride if the dilation is larger; oneDNN does not
        return None
    dilates = tuple(dilation - 1 for dilation in ints(call["dilation"], spatial))
    attrs = Deconv(strides, dilates, padding, pad_r, groups)
    sizes = call.type(src).dims[-spatial:]
    if any(_covered(attrs, i, sizes[i], dims[i + 2]) <= padding[i] + pad_r[i] for i in range(spatial)):
        return None  # PyTorch gives an empty result; oneDNN has none
    split = reshaped(call, weights, grouped_dims(dims, groups))
    order = list(range(call.type(split).ndim))
    first = len(order) - spatial - 2
    order[first], order[first + 1] = first + 1, first
    inputs = {"src": batched(call, src, len(dims)), "weights": permuted(call, split, order), "bias": bias}
    dst = call.emit("deconvolution", inputs, attrs)
    return unbatched(call, dst, like=src)


def _import_either(call: Call) -> Value | None:
    return _import(call) if call["transposed"] else import_padded(call)


# ---------------------------------------------------------------- ONNX


def _write(attrs: Deconv, w: Writing, operands: Mapping[str, str]) -> str:
    weights, grouped = operands["weights"], attrs.groups > 1
    dims = w.type(weights).dims
    order = list(range(len(dims)))
    order[grouped], order[grouped + 1] = grouped + 1, int(grouped)
    weights = w.transposed(weights, order)
    if grouped:  # ONNX keeps them as [I, O/G, k…], as PyTorch does
        weights = w.reshaped(weights, (dims[0] * dims[2], dims[1], *dims[3:]))
    pads = [*attrs.pad_l, *(max(pad, 0) for pad in attrs.pad_r)]
    extra = [max(-pad, 0) for pad in attrs.pad_r]
    return w(
        "ConvTranspose",
        operands["src"],
        weights,
        operands.get("bias"),
        **window_attributes(attrs),
        pads=pads,
        output_padding=extra,
    )


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield 1-D to 3-D problems with strides, output padding, groups and dilation."""
    yield Sample("up2", Deconv.make(2, 2), problem((2, 16, 5, 6), 8, (2, 2)))
    yield Sample("up2_3x3", Deconv.make(2, 2, pad_l=1, pad_r=0), problem((1, 16, 6, 6), 32, (3, 3)))
    yield Sample("output_padding", Deconv.make(2, 3, pad_l=0, pad_r=-2), problem((1, 8, 5, 5), 16, (3, 3)))
    yield Sample("s1_no_bias", Deconv.make(2, pad_l=1), problem((2, 32, 7, 7), 16, (3, 3), bias=False))
    yield Sample("odd_channels", Deconv.make(2, 2, pad_l=1), problem((1, 17, 5, 5), 19, (4, 4)))
    yield Sample("groups", Deconv.make(2, 2, pad_l=1, groups=2), problem((1, 16, 5, 5), 32, (4, 4), 2))
    yield Sample("depthwise", Deconv.make(2, 2, pad_l=1, groups=16), problem((1, 16, 5, 5), 16, (4, 4), 16))
    yield Sample("dilated", Deconv.make(2, dilates=1, pad_l=1), problem((1, 8, 6, 6), 8, (3, 3)))
    yield Sample("asymmetric", Deconv((2, 1), (0, 0), (1, 0), (0, 2)), problem((1, 8, 5, 6), 16, (3, 4)))
    yield Sample("1d", Deconv.make(1, 2, pad_l=1), problem((2, 16, 9), 8, (4,)))
    yield Sample("3d", Deconv.make(3, 2), problem((1, 8, 3, 4, 5), 8, (2, 2, 2)))


DECONVOLUTION = OpDef(
    name="deconvolution",
    attrs=Deconv,
    operands=WEIGHTED,
    category=Category.COMPUTE,
    infer=infer,
    reference=reference,
    primitive=primitive_of("Deconvolution"),
    linear=Linear(lambda src, weights, dst: products(src, dst[1], weights), windowed=True, transposed=True),
    numbers=Numbers(spreads=True, bytes=lambda attrs: Bytes.MULTIPLIED),
    cost=Cost(pytorch=0.03, across=3.0),
    sliced=each_image,
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum", "prelu"})),
    short="deconv",
    samples=samples,
    torch={
        "aten.conv_transpose1d.default": _import,
        "aten.conv_transpose2d.input": _import,
        "aten.conv_transpose3d.input": _import,
        "aten.convolution.default": _import_either,
    },
    onnx=Onnx(_write),
)
