"""The gradients of a convolution: by its source, and by its weights. The gradient by a bias is a sum over positions.

oneDNN has a primitive for each, in backward propagation. It takes the forward primitive's descriptor as a hint, and
checks the hint's problem, not its formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Linear, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Primitive, Sample
from fmtprop.layout import MemoryDesc
from fmtprop.ops import convolution
from fmtprop.ops.arguments import computable, ints
from fmtprop.ops.building import by_autograd, create, lowering, native
from fmtprop.ops.convolution import Conv, grouped_dims
from fmtprop.ops.reduction import Reduction
from fmtprop.ops.view_attrs import reshaped

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class ConvGradient(Attrs):
    """Attributes of a convolution's gradient: those of the convolution, and the dims of the result.

    Raises ShapeError if a value is out of range, or lengths differ.

    oneDNN developer guide, "Convolution", backward propagation.
    """

    strides: tuple[int, ...]
    dilates: tuple[int, ...]
    pad_l: tuple[int, ...]
    pad_r: tuple[int, ...]
    groups: int
    #: dims of the result, which are those of the source or of the weights
    dims: tuple[int, ...]
    #: whether the gradient by the bias is a second result of the gradient by the weights
    bias: bool = False

    def __post_init__(self) -> None:
        _ = self.convolution

    @property
    def convolution(self) -> Conv:
        """The attributes of the convolution itself."""
        return Conv(self.strides, self.dilates, self.pad_l, self.pad_r, self.groups)


# ---------------------------------------------------------------- meaning


def _checked(attrs: ConvGradient, types: Mapping[str, TensorType]) -> None:
    """Refuse operands that no convolution gives."""
    expected = convolution.infer(attrs.convolution, types)[0].dims
    if expected != types["diff_dst"].dims:
        raise ShapeError(f"diff_dst has dims {types['diff_dst'].dims} but this convolution's result has {expected}")


def infer_data(attrs: ConvGradient, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src."""
    result = types["diff_dst"].with_dims(attrs.dims)
    _checked(attrs, {**types, "src": result})
    return (result,)


def infer_weights(attrs: ConvGradient, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of diff_weights and, if requested, of diff_bias, which is f32."""
    result, diff_dst = types["diff_dst"].with_dims(attrs.dims), types["diff_dst"]
    _checked(attrs, {**types, "weights": result})
    return (result, TensorType((diff_dst.dims[1],))) if attrs.bias else (result,)


def reference_data(attrs: ConvGradient, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd, in the data type of diff_dst."""
    weights = tensors["weights"].to(tensors["diff_dst"].dtype)
    return _gradient(attrs, {"weights": weights}, "src", tensors["diff_dst"])


def reference_weights(attrs: ConvGradient, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd, in the data type of src."""
    diff_dst = tensors["diff_dst"].to(tensors["src"].dtype)
    found = _gradient(attrs, {"src": tensors["src"]}, "weights", diff_dst)
    if not attrs.bias:
        return found
    wide = torch.promote_types(diff_dst.dtype, torch.float32)
    return (*found, diff_dst.sum((0, *range(2, diff_dst.ndim)), dtype=wide))


def _gradient(
    attrs: ConvGradient, known: Mapping[str, torch.Tensor], wanted: str, diff_dst: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradient by an operand. A convolution is linear in it, so its value does not matter."""

    def forward(operand: torch.Tensor) -> torch.Tensor:
        others = {name: tensor.detach().clone() for name, tensor in known.items()}
        return convolution.reference(attrs.convolution, {**others, wanted: operand})[0]

    return by_autograd(forward, diff_dst.new_zeros(attrs.dims), diff_dst)


# ---------------------------------------------------------------- primitives


def _primitive(prop: str) -> Primitive:
    """Return the rule of a gradient; its hint is the forward descriptor, with formats that oneDNN chooses."""

    def primitive(attrs: ConvGradient, descs: Natives, attr: NativeAttr) -> Lowering:
        # a gradient may be wider than its tensor was
        dtype = descs["diff_dst"].desc.dtype
        shapes = {name.removeprefix("diff_"): desc.dims for name, desc in descs.items()}
        free = {name: native(MemoryDesc.any(dims, "f32" if name == "bias" else dtype)) for name, dims in shapes.items()}
        hint = create("Convolution", attrs.convolution, free, attr, prop="forward_training")
        return lowering(create("Convolution", attrs.convolution, descs, attr, hint, prop=prop), descs)

    return primitive


# ---------------------------------------------------------------- importer


def _convolution_backward(call: Call) -> tuple[Value | None, ...] | None:
    diff_dst, src, weights = call["grad_output"], call["input"], call["weight"]
    dims, groups = call.type(weights).dims, call["groups"]
    spatial = len(dims) - 2
    if not 1 <= spatial <= 3 or not computable(call, diff_dst, src, weights):
        return None
    dilates = tuple(dilation - 1 for dilation in ints(call["dilation"], spatial))
    padding = ints(call["padding"], spatial)
    window = ints(call["stride"], spatial), dilates, padding, padding, groups
    if call["transposed"]:
        return _deconvolution_backward(call, Conv(*window))
    grouped = grouped_dims(dims, groups)
    wants_src, wants_weights, wants_bias = call["output_mask"]
    found: list[Value | None] = [None, None, None]
    if wants_src:
        inputs = {"diff_dst": diff_dst, "weights": reshaped(call, weights, grouped)}
        found[0] = call.emit("convolution_backward_data", inputs, ConvGradient(*window, call.type(src).dims))
    if wants_weights:
        inputs = {"src": src, "diff_dst": diff_dst}
        attrs = ConvGradient(*window, grouped, wants_bias)
        gradient = call.emit("convolution_backward_weights", inputs, attrs)
        found[1] = reshaped(call, gradient, dims)
        found[2] = Value(gradient.node, 1) if wants_bias else None
    elif wants_bias:
        found[2] = _bias_gradient(call)
    return tuple(found)


def _deconvolution_backward(call: Call, attrs: Conv) -> tuple[Value | None, ...] | None:
    """Import the gradients of a deconvolution, which is the gradient by the source of a convolution.

    So its gradient by the source is that convolution, and its gradient by the weights is the convolution's, with src
    and diff_dst exchanged.
    """
    diff_dst, src, weights = call["grad_output"], call["input"], call["weight"]
    dims = call.type(weights).dims
    grouped = grouped_dims(dims, attrs.groups)
    types = {"src": call.type(diff_dst), "weights": call.type(weights).with_dims(grouped)}
    if convolution.infer(attrs, types)[0].dims != call.type(src).dims:
        return None  # an output_padding of a stride or more adds windows
    wants_src, wants_weights, wants_bias = call["output_mask"]
    found: list[Value | None] = [None, None, _bias_gradient(call) if wants_bias else None]
    if wants_src:
        inputs = {"src": diff_dst, "weights": reshaped(call, weights, grouped)}
        found[0] = call.emit("convolution", inputs, attrs)
    if wants_weights:
        window = attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r, attrs.groups
        inputs = {"src": diff_dst, "diff_dst": src}
        gradient = call.emit("convolution_backward_weights", inputs, ConvGradient(*window, grouped))
        found[1] = reshaped(call, gradient, dims)
    return tuple(found)


def _bias_gradient(call: Call) -> Value:
    type_ = call.type(call["grad_output"])
    axes = (0, *range(2, type_.ndim))
    total = call.emit("reduction", {"src": call["grad_output"]}, Reduction("sum", axes))
    return reshaped(call, total, (type_.dims[1],))


# ---------------------------------------------------------------- samples and declarations


def _samples(known: str, wanted: str) -> Iterable[Sample]:
    """Yield the gradients of the convolutions that are samples of the op itself."""
    for sample in convolution.samples():
        types = {name: type_ for name, type_ in sample.types.items() if name != "bias"}
        attrs: Conv = sample.attrs  # type: ignore[assignment]
        diff_dst = convolution.infer(attrs, types)[0]
        window = attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r, attrs.groups
        yield Sample(
            sample.name, ConvGradient(*window, types[wanted].dims), {known: types[known], "diff_dst": diff_dst}
        )


def samples_data() -> Iterable[Sample]:
    """Yield the gradients by the source of the convolution's own samples, unless most positions have none."""
    return (sample for sample in _samples("weights", "src") if sample.name != "1x1_s2_no_bias")


def samples_weights() -> Iterable[Sample]:
    """Yield the gradients by the weights of the convolution's own samples, and one with the bias's."""
    for sample in _samples("src", "weights"):
        yield sample
        if sample.name in ("3x3", "groups_odd", "1d"):
            attrs: ConvGradient = sample.attrs  # type: ignore[assignment]
            yield Sample(f"{sample.name}_bias", replace(attrs, bias=True), sample.types)


CONVOLUTION_BACKWARD_DATA = OpDef(
    name="convolution_backward_data",
    attrs=ConvGradient,
    operands=(Operand("diff_dst", "DIFF_DST"), Operand("weights", "WEIGHTS", parameter=True)),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.COMPUTE,
    infer=infer_data,
    reference=reference_data,
    primitive=_primitive("backward_data"),
    linear=Linear(convolution.convolution_products, windowed=True, roles=("diff_src", "weights", "diff_dst")),
    numbers=Numbers(spreads=True),
    short="conv_data",
    samples=samples_data,
    torch={"aten.convolution_backward.default": _convolution_backward},
)

CONVOLUTION_BACKWARD_WEIGHTS = OpDef(
    name="convolution_backward_weights",
    attrs=ConvGradient,
    operands=(Operand("src", "SRC"), Operand("diff_dst", "DIFF_DST")),
    results=(Operand("diff_weights", "DIFF_WEIGHTS"), Operand("diff_bias", "DIFF_BIAS", parameter=True)),
    category=Category.COMPUTE,
    infer=infer_weights,
    reference=reference_weights,
    primitive=_primitive("backward_weights"),
    linear=Linear(convolution.convolution_products, windowed=True, roles=("src", "diff_weights", "diff_dst")),
    numbers=Numbers(spreads=True),
    short="conv_weights",
    samples=samples_weights,
)
