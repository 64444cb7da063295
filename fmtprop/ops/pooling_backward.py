"""The gradient of average pooling: oneDNN's pooling primitive in backward propagation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Call, Category, Importer, Lowering, NativeAttr, Natives, OpDef, Operand, Sample, Value
from fmtprop.ir.facets import ByPyTorch
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import pooling
from fmtprop.ops.arguments import batched, computable, unbatched
from fmtprop.ops.building import Ready, Tensors, by_autograd, create, lowering, native
from fmtprop.ops.pooling import Pooling, adaptive_attributes, average_attributes

# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class PoolingGradient(Attrs):
    """Attributes of an average pooling's gradient: those of the pooling, and the dims of its source.

    oneDNN developer guide, "Pooling", backward propagation.
    """

    alg: str
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilates: tuple[int, ...]
    pad_l: tuple[int, ...]
    pad_r: tuple[int, ...]
    #: dims of the source, [N, C, …]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.pooling.alg == "max":
            raise ShapeError("the gradient of a maximum needs its indices: only averages have a gradient of this kind")

    @property
    def pooling(self) -> Pooling:
        """The attributes of the pooling itself."""
        return Pooling(self.alg, self.kernel, self.strides, self.dilates, self.pad_l, self.pad_r)

    @classmethod
    def of(cls, attrs: Pooling, dims: tuple[int, ...]) -> PoolingGradient:
        """Return the attributes of the gradient of a pooling of a source of these dims."""
        return cls(attrs.alg, attrs.kernel, attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r, dims)


# ---------------------------------------------------------------- meaning


def infer(attrs: PoolingGradient, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of diff_src."""
    result = types["diff_dst"].with_dims(attrs.dims)
    expected = pooling.infer(attrs.pooling, {"src": result})[0].dims
    if expected != types["diff_dst"].dims:
        raise ShapeError(f"diff_dst has dims {types['diff_dst'].dims} but this pooling's result has {expected}")
    return (result,)


def reference(attrs: PoolingGradient, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate by PyTorch's autograd: an average is linear, so that the source's values do not matter."""
    diff_dst = tensors["diff_dst"]
    src = diff_dst.new_zeros(attrs.dims)
    return by_autograd(lambda src: pooling.reference(attrs.pooling, {"src": src})[0], src, diff_dst)


def operator(attrs: PoolingGradient, tensors: Tensors, results: Sequence[torch.Tensor]) -> Ready:
    """Return PyTorch's operator for it, which writes its result to a tensor."""
    spatial = len(attrs.kernel)
    if spatial == 1 or attrs.pad_l != attrs.pad_r or any(attrs.dilates) or not results[0].is_contiguous():
        return None
    if any(2 * pad > kernel for pad, kernel in zip(attrs.pad_l, attrs.kernel, strict=True)):
        return None
    gradient: Any = (torch.ops.aten.avg_pool2d_backward, torch.ops.aten.avg_pool3d_backward)[spatial - 2].grad_input
    including = attrs.alg == "avg_include_padding"
    window = attrs.kernel, attrs.strides, attrs.pad_l, False, including, None
    return partial(gradient, tensors["diff_dst"], results[0], *window, grad_input=results[0])


def primitive(attrs: PoolingGradient, descs: Natives, attr: NativeAttr) -> Lowering:
    """Create the descriptor; of the forward one that it takes as a hint, oneDNN checks the problem."""
    images = {
        name.removeprefix("diff_"): native(MemoryDesc(desc.dims, desc.desc.dtype)) for name, desc in descs.items()
    }
    forward = create("Pooling", attrs.pooling, images, attr, prop="forward_training")
    return lowering(create("Pooling", attrs.pooling, descs, attr, forward, prop="backward_data"), descs)


# ---------------------------------------------------------------- importers


def _emit(call: Call, attrs: Pooling | None) -> Value | None:
    src, diff_dst = call["self"], call["grad_output"]
    if attrs is None or not computable(call, src, diff_dst):
        return None
    rank = len(attrs.kernel) + 2
    dims = call.type(src).dims
    gradient = PoolingGradient.of(attrs, dims if len(dims) == rank else (1, *dims))
    diff_src = call.emit("pooling_backward", {"diff_dst": batched(call, diff_dst, rank)}, gradient)
    return unbatched(call, diff_src, like=src)


def _average(spatial: int) -> Importer:
    return lambda call: _emit(call, average_attributes(call, spatial))


def _adaptive(spatial: int) -> Importer:
    def importer(call: Call) -> Value | None:
        sizes, counts = (call.type(call[name]).dims[-spatial:] for name in ("self", "grad_output"))
        return _emit(call, adaptive_attributes("avg_include_padding", sizes, counts))

    return importer


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield the gradients of the pooling's own samples that are averages."""
    for sample in pooling.samples():
        attrs: Pooling = sample.attrs  # type: ignore[assignment]
        if attrs.alg != "max":
            (dst,) = pooling.infer(attrs, sample.types)
            gradient = PoolingGradient.of(attrs, sample.types["src"].dims)
            yield Sample(sample.name, gradient, {"diff_dst": dst})


POOLING_BACKWARD = OpDef(
    name="pooling_backward",
    attrs=PoolingGradient,
    operands=(Operand("diff_dst", "DIFF_DST"),),
    results=(Operand("diff_src", "DIFF_SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    pytorch=ByPyTorch(operator),
    primitive=primitive,
    cost=pooling.POOLING.cost,
    short="pool_back",
    samples=samples,
    torch={
        "aten.avg_pool2d_backward.default": _average(2),
        "aten.avg_pool3d_backward.default": _average(3),
        "aten._adaptive_avg_pool2d_backward.default": _adaptive(2),
        "aten._adaptive_avg_pool3d_backward.default": _adaptive(3),
    },
)
