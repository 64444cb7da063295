"""Resampling of images: nearest neighbour and (bi-, tri-) linear interpolation between pixel centres.

NaN at the border: PyTorch's ``linear`` multiplies it by a weight of 0 in the outermost pixels and gives NaN there;
oneDNN does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Bytes, Call, Cost, Importer, Onnx, Reads, TensorType, Value, Writing, each_image
from fmtprop.ir.facets import Absorbs, ByPyTorch, Numbers
from fmtprop.ir.op import Category, OpDef, Operand, Sample
from fmtprop.ops.arguments import computable
from fmtprop.ops.building import primitive_of

# ---------------------------------------------------------------- attributes

ALGORITHMS = ("nearest", "linear")


@dataclass(frozen=True)
class Resampling(Attrs):
    """Attributes of a resampling.

    Position ``o`` of an axis reads source position ``(o + 0.5) · src / dst - 0.5``: rounded for ``nearest``, mixed from
    its two neighbours for ``linear``.

    oneDNN developer guide, "Resampling".
    """

    alg: str
    #: spatial dimensions of dst, at least 1
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.alg not in ALGORITHMS:
            raise ShapeError(f"resampling has no algorithm {self.alg!r}; it has {', '.join(ALGORITHMS)}")
        if not 1 <= len(self.size) <= 3:
            raise ShapeError(f"resampling has 1 to 3 spatial axes, but size={self.size} has {len(self.size)}")
        for axis, size in enumerate(self.size):
            if size < 1:
                raise ShapeError(f"resampling size[{axis}] is {size}, but must be at least 1")


# ---------------------------------------------------------------- meaning


def infer(attrs: Resampling, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of dst, [N, C, …]."""
    src, spatial = types["src"], len(attrs.size)
    if src.ndim != spatial + 2:
        raise ShapeError(f"src has {src.ndim} axes but {spatial} spatial axes need {spatial + 2}: [N, C, …]")
    return (src.with_dims((*src.dims[:2], *attrs.size)),)


def nearest_indices(size: int, count: int) -> list[int]:
    """Return the source position that oneDNN's ``nearest`` reads for each of `count` positions.

    >>> nearest_indices(3, 6), nearest_indices(4, 2)
    ([0, 0, 1, 1, 2, 2], [1, 3])
    """
    # (o + 0.5) · size / count - 0.5, halves rounded up, in exact integers
    return [min((2 * o + 1) * size // (2 * count), size - 1) for o in range(count)]


def reference(attrs: Resampling, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src = tensors["src"]
    if attrs.alg == "linear":
        mode = ("linear", "bilinear", "trilinear")[len(attrs.size) - 1]
        return (F.interpolate(src, attrs.size, mode=mode, align_corners=False),)
    for axis, count in enumerate(attrs.size, start=2):
        src = src.index_select(axis, torch.tensor(nearest_indices(src.shape[axis], count), device="cpu"))
    return (src,)


def _operations(attrs: Resampling, _: float) -> float:
    return 0.9 * (2 ** len(attrs.size) if attrs.alg == "linear" else 1)


def loses(attrs: Resampling) -> frozenset[str]:
    """Return the special values that differ, as a neighbour of weight 0 counts only in PyTorch."""
    return frozenset({"nan", "inf"}) if attrs.alg == "linear" else frozenset()


# ---------------------------------------------------------------- importers


def _scales(call: Call, spatial: int) -> Sequence[float | None]:
    """Return the scale factors that the caller gave, or None."""
    if "scale_factors" in call.args:
        return call["scale_factors"] or (None,) * spatial
    if spatial == 1:
        return (call["scales"],)
    return tuple(call[name] for name in ("scales_d", "scales_h", "scales_w")[-spatial:])


def _samples_alike(alg: str, torch_kernel: str, size: int, count: int, scale: float | None) -> bool:
    """Return whether PyTorch and oneDNN sample one axis at the same positions.

    PyTorch's ``nearest`` has another convention than oneDNN's, and a given scale factor counts before the sizes.
    """
    kernel = getattr(torch.ops.aten, torch_kernel).default
    ramp = torch.arange(size, dtype=torch.float32, device="cpu").reshape(1, 1, size)
    extra = (False,) if alg == "linear" else ()
    wanted = kernel(ramp, [count], *extra, scale)
    (given,) = reference(Resampling(alg, (count,)), {"src": ramp})
    return torch.allclose(wanted, given, rtol=1e-6, atol=1e-6)


def _resample(alg: str, spatial: int, torch_kernel: str) -> Importer:
    """Return an importer that declines if oneDNN would read other source positions than `torch_kernel`."""

    def importer(call: Call) -> Value | None:
        src: Value = call["input"] if "input" in call.args else call["self"]
        if not computable(call, src) or call.args.get("align_corners", False):
            return None
        sizes, scales = call.type(src).dims[2:], _scales(call, spatial)
        counts = call["output_size"]
        if counts is None:
            counts = [floor(size * scale) for size, scale in zip(sizes, call["scale_factors"], strict=True)]
        axes = list(zip(sizes, counts, scales, strict=True))
        # an empty tensor has no samples
        if call.type(src).size and not all(_samples_alike(alg, torch_kernel, *axis) for axis in axes):
            return None
        if tuple(counts) == sizes:
            return src
        return call.emit("resampling", {"src": src}, Resampling(alg, tuple(counts)))

    return importer


def _importers() -> Mapping[str, Importer]:
    found = {}
    for spatial in (1, 2, 3):
        linear = ("linear1d", "bilinear2d", "trilinear3d")[spatial - 1]
        for overload in ("vec", "default"):
            found[f"aten.upsample_nearest{spatial}d.{overload}"] = _resample("nearest", spatial, "upsample_nearest1d")
            found[f"aten._upsample_nearest_exact{spatial}d.{overload}"] = _resample(
                "nearest", spatial, "_upsample_nearest_exact1d"
            )
            found[f"aten.upsample_{linear}.{overload}"] = _resample("linear", spatial, "upsample_linear1d")
    return found


# ---------------------------------------------------------------- ONNX


def _write(attrs: Resampling, w: Writing, operands: Mapping[str, str]) -> str:
    src = operands["src"]
    dims = w.type(src).dims
    if attrs.alg == "linear":
        sizes = w.constant([*dims[:2], *attrs.size], "s64")
        return w("Resize", src, None, None, sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    factors = [count / size for count, size in zip(attrs.size, dims[2:], strict=True)]
    if all(factor.is_integer() for factor in factors):
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return w("Resize", src, None, w.constant([1.0, 1.0, *factors], "f32"), **how)
    # indices, since runtimes compute positions in f32 and round halves in different ways
    for axis, count in enumerate(attrs.size, start=2):
        src = w("Gather", src, w.constant(nearest_indices(dims[axis], count), "s64"), axis=axis)
    return src


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield enlarging and shrinking, whole and broken factors, in 1-D to 3-D."""
    for alg in ALGORITHMS:
        yield Sample(f"{alg}_double", Resampling(alg, (10, 12)), {"src": TensorType((2, 16, 5, 6))})
        yield Sample(f"{alg}_broken", Resampling(alg, (7, 9)), {"src": TensorType((2, 17, 5, 4))})
        yield Sample(f"{alg}_shrink", Resampling(alg, (4, 3)), {"src": TensorType((1, 8, 9, 9))})
        yield Sample(f"{alg}_1d", Resampling(alg, (14,)), {"src": TensorType((2, 16, 7))})
        yield Sample(f"{alg}_3d", Resampling(alg, (4, 6, 8)), {"src": TensorType((1, 8, 2, 3, 4))})


RESAMPLING = OpDef(
    name="resampling",
    attrs=Resampling,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive_of("Resampling"),
    sliced=each_image,
    # oneDNN reads a neighbour in 0.05 ns in a vector of channels, in 0.4 ns alone (one thread, AVX2 and AVX-512);
    # PyTorch's kernels for channels-last take a quarter of the time (2 threads, AVX-512)
    cost=Cost(_operations, gathers=8.0, window=lambda attrs: 0.4 if len(attrs.size) < 3 else 1.2, pytorch=1.0),
    pytorch=ByPyTorch(reads=Reads.ROWS_OR_CHANNELS_LAST),
    numbers=Numbers(bytes=lambda attrs: Bytes.MOVED if attrs.alg == "nearest" else Bytes.NEVER, loses=loses),
    absorbs=Absorbs(
        # sum and binary give wrong results on blocked formats in oneDNN 3.2
        kinds=frozenset({"eltwise"}),
    ),
    samples=samples,
    torch=_importers(),
    onnx=Onnx(_write),
)
