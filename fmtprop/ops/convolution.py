"""Convolution over one to three spatial axes, with groups, dilation and asymmetric padding.

NaN is passed on as in PyTorch, but not through a fused ``relu`` or ``clip``: those give 0 in most implementations of
oneDNN 3.2, as the eltwise primitive does, and NaN in those that call ``gemm``. The same holds for deconvolution, inner
product and matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

from fmtprop.errors import FormatError, ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Bytes, Call, Linear, Onnx, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, PostOpForm, Sample
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.arguments import batched, computable, ints, unbatched
from fmtprop.ops.building import WEIGHTED, create, native, primitive_of
from fmtprop.ops.linear import make_inner_product, make_matmul
from fmtprop.ops.regrouping import Regrouping
from fmtprop.ops.view_attrs import reshaped
from fmtprop.ops.window import check_window, products, same_padding, torch_padding, window_count

if TYPE_CHECKING:
    from fmtprop.dnnl import NativeDesc, PostOps, PrimitiveDesc

#: columns of an image with which kernels are nearly as fast as with more. 64 channels, windows of 3 x 3, one, two,
#: three, four and eight columns: 0.3, 0.6, 0.7, 0.75 and 0.9 of the pace with 500 (AVX2, v3.2, one thread)
FULL_ROW = 8

# ---------------------------------------------------------------- attributes


C = TypeVar("C", bound="Window")


@dataclass(frozen=True)
class Window(Attrs):
    """Attributes that a convolution and a deconvolution have, one number per spatial axis.

    oneDNN developer guide, "Convolution".
    """

    #: step of the window, over src of a convolution and dst of a deconvolution, at least 1
    strides: tuple[int, ...]
    #: positions skipped between two taps; 0 is dense (PyTorch's dilation minus 1)
    dilates: tuple[int, ...]
    #: `pad_l`, `pad_r`: zeros before and after the source of a convolution, or positions cut off dst of a
    #: deconvolution. PyTorch's ``output_padding`` is subtracted from a deconvolution's ``pad_r``, which is negative
    #: down to ``1 - stride``.
    pad_l: tuple[int, ...]
    pad_r: tuple[int, ...]
    #: number of channel groups. The weights are [O, I, k…], with groups > 1 [G, O/G, I/G, k…].
    groups: int = 1

    @classmethod
    def make(
        cls: type[C],
        ndim: int,
        strides: int = 1,
        dilates: int = 0,
        pad_l: int = 0,
        pad_r: int | None = None,
        groups: int = 1,
    ) -> C:
        """Return attributes that are the same on all `ndim` spatial axes; padding is symmetric unless `pad_r` is given.

        >>> Conv.make(2, pad_l=1)
        Conv(strides=(1, 1), dilates=(0, 0), pad_l=(1, 1), pad_r=(1, 1), groups=1)
        """
        right = pad_l if pad_r is None else pad_r
        return cls((strides,) * ndim, (dilates,) * ndim, (pad_l,) * ndim, (right,) * ndim, groups)

    def check(self, op: str, pad_r: tuple[int, ...]) -> None:
        """Check all attributes except the sign of `pad_r`."""
        check_window(op, self.strides, dilates=self.dilates, pad_l=self.pad_l, pad_r=pad_r)
        if self.groups < 1:
            raise ShapeError(f"{op} groups is {self.groups}, but must be at least 1")


@dataclass(frozen=True)
class Conv(Window):
    """Attributes of a convolution, as of :class:`Window`."""

    def __post_init__(self) -> None:
        self.check("convolution", self.pad_r)


# ---------------------------------------------------------------- meaning


def check_channels(types: Mapping[str, TensorType], spatial: int, groups: int) -> int:
    """Check ranks, channels and bias of a (de)convolution and return the number of output channels.

    `types`: types of ``src`` [N, I, …], ``weights`` [O, I, k…] or [G, O/G, I/G, k…] and perhaps ``bias`` [O].
    """
    src, weights = types["src"].dims, types["weights"].dims
    if len(src) != spatial + 2:
        raise ShapeError(f"src has {len(src)} axes but {spatial} spatial axes need {spatial + 2}: [N, C, …]")
    grouped = groups > 1
    if len(weights) != spatial + 2 + grouped:
        layout = "[G, O/G, I/G, k…]" if grouped else "[O, I, k…]"
        raise ShapeError(
            f"weights has {len(weights)} axes but {layout} needs {spatial + 2 + grouped} (groups={groups})"
        )
    if grouped and weights[0] != groups:
        raise ShapeError(f"weights axis 0 has {weights[0]} groups but the attribute says groups={groups}")
    expected = weights[1 + grouped] * groups
    if src[1] != expected:
        axis = 1 + grouped
        raise ShapeError(
            f"src axis 1 has {src[1]} channels but weights axis {axis} expects {expected} (groups={groups})"
        )
    channels = weights[grouped] * groups
    bias = types.get("bias")
    if bias is not None and bias.dims != (channels,):
        raise ShapeError(f"bias has dims {bias.dims} but the {channels} output channels need ({channels},)")
    return channels


def infer(attrs: Conv, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, O, …]."""
    spatial = len(attrs.strides)
    channels = check_channels(types, spatial, attrs.groups)
    src, kernel = types["src"], types["weights"].dims[-spatial:]
    sizes = window_count(src.dims[2:], kernel, attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r)
    return (src.with_dims((src.dims[0], channels, *sizes)),)


def reference(attrs: Conv, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch, in the data type of src."""
    src = tensors["src"]
    weights, bias = tensors["weights"].to(src.dtype), tensors.get("bias")
    if attrs.groups > 1:
        weights = weights.flatten(0, 1)
    if any(attrs.pad_l) or any(attrs.pad_r):
        src = F.pad(src, torch_padding(attrs.pad_l, attrs.pad_r))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(attrs.strides) - 1]
    bias = None if bias is None else bias.to(src.dtype)
    dilation = tuple(dilate + 1 for dilate in attrs.dilates)
    return (convolve(src, weights, bias, attrs.strides, 0, dilation, attrs.groups),)


def primitive(attrs: Conv, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the direct convolution's primitive descriptor.

    A depthwise convolution among the post-ops changes dst: oneDNN takes the descriptor of its source, and answers with
    the descriptor of its result.

    Raises UnsupportedOpError if dst after a depthwise convolution is in a format without a tag.
    """
    fused = attr is not None and any(op.kind == "convolution" for op in attr.ops)
    asked = descs["dst"].desc
    dst = _before_depthwise(attrs, descs) if fused else descs["dst"]
    own = primitive_of("Convolution")(attrs, {**descs, "dst": dst}, attr)
    if not fused:
        return own

    def resolve(candidate: PrimitiveDesc) -> Mapping[str, MemoryDesc]:
        formats = own.resolve(candidate)
        if asked.kind != "any" and formats["dst"] != asked:
            raise FormatError(f"convolution: {candidate.impl} writes dst as {formats['dst']}, not as {asked}")
        return formats

    return Lowering(own.pd, resolve)


def _before_depthwise(attrs: Conv, descs: Natives) -> NativeDesc:
    """Return the descriptor of a fused depthwise convolution's source, in the format of its result."""
    src, weights, dst = descs["src"].dims, descs["weights"].dims, descs["dst"].desc
    sizes = window_count(
        src[2:], weights[-len(attrs.strides) :], attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r
    )
    dims = (*dst.dims[:2], *sizes)
    if dst.kind == "any":
        return native(MemoryDesc.any(dims, dst.dtype))
    if dst.tag is None:
        raise UnsupportedOpError(f"convolution: dst {dst} after a depthwise convolution: ask for a dense format")
    return native(MemoryDesc(dims, dst.dtype, tag=dst.tag))


def _as_matmul(attrs: Conv, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the matmul of all images' positions, each a row of channels, with the transposed weights."""
    _check_pointwise(attrs, descs)
    spatial = tuple(range(2, len(attrs.strides) + 2))
    rows = ((0, *spatial), (1,))
    tensors = {"src": rows, "weights": ((1,), (0, *spatial)), "bias": ((), (0,)), "dst": rows}
    return Regrouping("convolution", tensors).lower(descs, attr, make_matmul)


def _as_inner_product(attrs: Conv, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the inner product over the positions of all images."""
    _check_pointwise(attrs, descs)
    spatial = tuple(range(2, len(attrs.strides) + 2))
    rows = ((0, *spatial), (1,))
    tensors = {"src": rows, "weights": ((0,), (1, *spatial)), "bias": ((0,),), "dst": rows}
    return Regrouping("convolution", tensors).lower(descs, attr, make_inner_product)


def _exchanged(attrs: Conv, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the convolution of images whose rows are the columns: kernels keep positions of a row in registers."""
    kernel, sizes = descs["weights"].dims[-2:], descs["dst"].dims[2:]
    if len(sizes) != 2 or max(kernel) == 1 or sizes[1] >= min(sizes[0], FULL_ROW):
        raise UnsupportedOpError(f"convolution: images of {sizes} are as fast as they are for a window of {kernel}")
    if not all(native.desc.dtype.is_floating for native in descs.values()):
        raise UnsupportedOpError("convolution of bytes: rules for its kernels know images as they are")
    image = ((0,), (1,), (3,), (2,))
    groups = tuple((axis,) for axis in range(len(descs["weights"].dims) - 2))
    last = len(groups)
    tensors = {"src": image, "weights": (*groups, (last + 1,), (last,)), "bias": ((0,),), "dst": image}
    other = Conv(attrs.strides[::-1], attrs.dilates[::-1], attrs.pad_l[::-1], attrs.pad_r[::-1], attrs.groups)

    def make(natives: Natives, attr: NativeAttr) -> PrimitiveDesc:
        return create("Convolution", other, natives, attr)

    return Regrouping("convolution", tensors, "").lower(descs, attr, make)


def _check_pointwise(attrs: Conv, descs: Natives) -> None:
    """Check that every output depends on the channels at one position only."""
    plain = {1} == set(attrs.strides) and not any((*attrs.pad_l, *attrs.pad_r)) and attrs.groups == 1
    kernel = descs["weights"].dims[2:]
    if not plain or set(kernel) != {1}:
        raise UnsupportedOpError(f"convolution: a kernel of {kernel} with {attrs} is no product of matrices")


# ---------------------------------------------------------------- importers


def grouped_dims(dims: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return weight dimensions; with several groups, the leading axis is split into groups."""
    return (groups, dims[0] // groups, *dims[1:]) if groups > 1 else dims


def import_convolution(
    call: Call, pads: Callable[[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
) -> Value | None:
    """Emit a convolution from any of the ATen forms.

    `call`: with arguments ``input, weight, bias, stride, dilation, groups``. `pads`: ``(kernel, dilates) -> (pad_l,
    pad_r)``.
    """
    src, weights, bias = call["input"], call["weight"], call["bias"]
    if not computable(call, src, weights, bias):
        return None
    dims, groups = call.type(weights).dims, call["groups"]
    spatial = len(dims) - 2
    if not 1 <= spatial <= 3:
        return None
    dilates = tuple(dilation - 1 for dilation in ints(call["dilation"], spatial))
    pad_l, pad_r = pads(dims[2:], dilates)
    attrs = Conv(ints(call["stride"], spatial), dilates, pad_l, pad_r, groups)
    inputs = {
        "src": batched(call, src, len(dims)),
        "weights": reshaped(call, weights, grouped_dims(dims, groups)),
        "bias": bias,
    }
    return unbatched(call, call.emit("convolution", inputs, attrs), like=src)


def import_padded(call: Call) -> Value | None:
    """Import a form with a list of numbers as ``padding``, the same on both sides."""

    def pads(kernel: tuple[int, ...], dilates: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        both = ints(call["padding"], len(kernel))
        return both, both

    return import_convolution(call, pads)


def _import_named_padding(call: Call) -> Value | None:
    """Import a form with ``"same"`` or ``"valid"`` as ``padding``."""

    def pads(kernel: tuple[int, ...], dilates: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if call["padding"] == "valid":
            return (0,) * len(kernel), (0,) * len(kernel)
        left, right = zip(*(same_padding(k, d) for k, d in zip(kernel, dilates, strict=True)), strict=True)
        return left, right

    return import_convolution(call, pads)


def convolution_products(src: tuple[int, ...], weights: tuple[int, ...], dst: tuple[int, ...]) -> float:
    """Return the number of products of a convolution or of its gradient."""
    return products(dst, src[1], weights)


def _append(attrs: Conv, tail: PostOps, operands: Sequence[NativeDesc], dtype: DataType) -> None:
    weights, *bias = operands
    kernel, stride, padding = set(weights.dims[3:]), set(attrs.strides), {*attrs.pad_l, *attrs.pad_r}
    if len(attrs.strides) != 2 or any(attrs.dilates) or max(map(len, (kernel, stride, padding))) > 1:
        raise UnsupportedOpError(
            "oneDNN fuses a depthwise convolution with one kernel size, stride and padding for both spatial axes and "
            f"without dilation, not {attrs}; keep it as a node of its own"
        )
    types = weights.data_type, bias[0].data_type if bias else None, dtype.value
    tail.append_dw(*types, kernel.pop(), stride.pop(), padding.pop())


# ---------------------------------------------------------------- ONNX


def window_attributes(attrs: Window) -> dict[str, Any]:
    """Return ONNX's attributes of a (de)convolution, without the padding."""
    dilations = [dilate + 1 for dilate in attrs.dilates]
    return {"strides": list(attrs.strides), "dilations": dilations, "group": attrs.groups}


def _write(attrs: Conv, w: Writing, operands: Mapping[str, str]) -> str:
    weights = operands["weights"]
    dims = w.type(weights).dims
    if attrs.groups > 1:
        weights = w.reshaped(weights, (dims[0] * dims[1], *dims[2:]))
    pads = [*attrs.pad_l, *attrs.pad_r]
    return w("Conv", operands["src"], weights, operands.get("bias"), **window_attributes(attrs), pads=pads)


# ---------------------------------------------------------------- samples and declaration


def problem(
    src: tuple[int, ...], outputs: int, kernel: tuple[int, ...], groups: int = 1, bias: bool = True
) -> dict[str, TensorType]:
    """Return operand types of a (de)convolution from src dims, output channels and kernel."""
    weights = (outputs // groups, src[1] // groups, *kernel)
    types = {"src": TensorType(src), "weights": TensorType((groups, *weights) if groups > 1 else weights)}
    return {**types, "bias": TensorType((outputs,))} if bias else types


def samples() -> Iterable[Sample]:
    """Yield 1-D to 3-D problems with tails, groups, dilation, strides and asymmetric padding."""
    yield Sample("3x3", Conv.make(2, pad_l=1), problem((2, 16, 9, 9), 32, (3, 3)))
    yield Sample("1x1", Conv.make(2), problem((1, 32, 7, 5), 16, (1, 1)))
    yield Sample("1x1_one_place", Conv.make(2), problem((3, 32, 1, 1), 8, (1, 1)))
    yield Sample("1x1_3d_odd", Conv.make(3), problem((2, 17, 2, 3, 4), 19, (1, 1, 1)))
    yield Sample("1x1_s2_no_bias", Conv.make(2, 2), problem((2, 24, 8, 8), 40, (1, 1), bias=False))
    yield Sample("stem", Conv.make(2, 2, pad_l=3), problem((1, 3, 23, 23), 16, (7, 7)))
    yield Sample("odd_channels", Conv.make(2, pad_l=1), problem((2, 17, 8, 7), 19, (3, 3)))
    yield Sample("depthwise", Conv.make(2, pad_l=1, groups=16), problem((2, 16, 8, 8), 16, (3, 3), 16))
    yield Sample("depthwise_odd", Conv.make(2, 2, pad_l=1, groups=17), problem((1, 17, 9, 9), 17, (3, 3), 17))
    yield Sample("groups", Conv.make(2, pad_l=1, groups=4), problem((2, 32, 6, 6), 64, (3, 3), 4))
    yield Sample("groups_odd", Conv.make(2, groups=3), problem((2, 9, 6, 6), 15, (3, 3), 3))
    yield Sample("dilated", Conv.make(2, dilates=1, pad_l=2), problem((1, 16, 10, 10), 16, (3, 3)))
    yield Sample("asymmetric", Conv((2, 1), (0, 0), (0, 1), (1, 2), 1), problem((1, 8, 9, 8), 16, (3, 4)))
    yield Sample("column", Conv((2, 1), (1, 0), (4, 0), (3, 0)), problem((2, 16, 21, 1), 24, (5, 1)))
    yield Sample("few_columns", Conv.make(2, pad_l=1), problem((2, 16, 12, 3), 32, (3, 3)))
    yield Sample("few_columns_depthwise", Conv.make(2, pad_l=1, groups=17), problem((1, 17, 9, 2), 17, (3, 3), 17))
    yield Sample("1d", Conv.make(1, pad_l=2), problem((2, 16, 20), 32, (5,)))
    yield Sample("1d_dilated_odd", Conv.make(1, 2, 2), problem((2, 5, 21), 7, (3,)))
    yield Sample("3d", Conv.make(3, pad_l=1), problem((1, 8, 5, 6, 7), 16, (3, 3, 3)))
    yield Sample("3d_s2_groups", Conv.make(3, 2, pad_l=1, groups=2), problem((1, 8, 6, 6, 6), 8, (3, 3, 3), 2))


CONVOLUTION = OpDef(
    name="convolution",
    attrs=Conv,
    operands=WEIGHTED,
    category=Category.COMPUTE,
    infer=infer,
    reference=reference,
    primitive=primitive,
    equivalents=(_as_matmul, _as_inner_product, _exchanged),
    linear=Linear(convolution_products, windowed=True),
    numbers=Numbers(bytes=lambda attrs: Bytes.MULTIPLIED, spreads=True),
    sliced=each_image,
    absorbs=Absorbs(frozenset({"eltwise", "binary", "sum", "prelu", "convolution"})),
    as_post_op=PostOpForm("convolution", _append),
    short="conv",
    samples=samples,
    torch={
        "aten.conv1d.default": import_padded,
        "aten.conv2d.default": import_padded,
        "aten.conv3d.default": import_padded,
        "aten.conv1d.padding": _import_named_padding,
        "aten.conv2d.padding": _import_named_padding,
        "aten.conv3d.padding": _import_named_padding,
    },
    onnx=Onnx(_write),
)
