"""Local response normalization, across channels or within one.

No importer: PyTorch's exporter decomposes ``local_response_norm`` into elementary calls, which
:mod:`fmtprop.passes.rewrites.recognise_lrn` puts together again.

NaN: oneDNN 3.2's kernels for plain formats keep a running sum across channels, so one NaN reaches all later channels,
not only its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir import Attrs, Category, Cost, Onnx, OpDef, Operand, Sample, TensorType, Writing, each_image
from fmtprop.ir.facets import Numbers
from fmtprop.ops.building import primitive_of

# ---------------------------------------------------------------- attributes

ALGORITHMS = ("across_channels", "within_channel")


@dataclass(frozen=True)
class Lrn(Attrs):
    """Attributes of local response normalization: ``dst = src · (k + alpha · mean(src²))^-beta``.

    oneDNN developer guide, "Local Response Normalization (LRN)".
    """

    #: ``"across_channels"``: the mean is over `size` neighbouring channels; ``"within_channel"``: over a window of
    #: `size` positions along every spatial axis. Positions outside count as zeros.
    alg: str = "across_channels"
    #: extent of the neighbourhood; odd, so that it has a middle
    size: int = 5
    #: `alpha`, `beta`, `k`: as in the formula; PyTorch's ``LocalResponseNorm`` uses the same convention
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def __post_init__(self) -> None:
        if self.alg not in ALGORITHMS:
            raise ShapeError(f"lrn has no algorithm {self.alg!r}; it has {', '.join(ALGORITHMS)}")
        if self.size < 1 or self.size % 2 == 0:
            raise ShapeError(f"lrn size is {self.size}, but must be odd and at least 1")


# ---------------------------------------------------------------- meaning


def infer(attrs: Lrn, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the type of src, [N, C, …]."""
    src = types["src"]
    if not 3 <= src.ndim <= 5:
        raise ShapeError(f"src has {src.ndim} axes but lrn takes 3 to 5: [N, C, …]")
    return (src,)


def reference(attrs: Lrn, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Evaluate in plain PyTorch."""
    src = tensors["src"]
    mean = src * src
    axes = (1,) if attrs.alg == "across_channels" else range(2, src.ndim)
    reach = attrs.size // 2
    for axis in axes:
        last = mean.movedim(axis, -1)
        mean = F.pad(last, (reach, reach)).unfold(-1, attrs.size, 1).mean(-1).movedim(-1, axis)
    return (src * (attrs.k + attrs.alpha * mean) ** -attrs.beta,)


def loses(attrs: Lrn) -> frozenset[str]:
    """Return the special values that differ: in a running sum over channels, they reach other channels."""
    return frozenset({"nan", "inf"}) if attrs.alg == "across_channels" else frozenset()


# ---------------------------------------------------------------- ONNX


def _write(attrs: Lrn, w: Writing, operands: Mapping[str, str]) -> str:
    src = operands["src"]
    if attrs.alg == "across_channels":
        return w("LRN", src, size=attrs.size, alpha=attrs.alpha, beta=attrs.beta, bias=attrs.k)
    spatial = w.type(src).ndim - 2
    window: dict[str, object] = {"kernel_shape": [attrs.size] * spatial, "pads": [attrs.size // 2] * 2 * spatial}
    mean = w("AveragePool", w("Mul", src, src), **window, count_include_pad=1)
    sum_ = w("Add", w("Mul", mean, w.constant(attrs.alpha)), w.constant(attrs.k))
    return w("Mul", src, w("Pow", sum_, w.constant(-attrs.beta)))


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield both algorithms, with tails, with parameters that make the neighbours matter."""
    yield Sample("across", Lrn(alpha=1.0), {"src": TensorType((2, 16, 5, 6))})
    yield Sample("across_alexnet", Lrn(k=2.0), {"src": TensorType((1, 32, 7, 7))})
    yield Sample("across_odd", Lrn(size=3, alpha=0.5, beta=0.5), {"src": TensorType((2, 17, 4, 4))})
    yield Sample("within", Lrn("within_channel", 3, 1.0), {"src": TensorType((2, 16, 6, 7))})
    yield Sample("within_odd", Lrn("within_channel", 5, 1.0, 0.5, 2.0), {"src": TensorType((1, 17, 8, 8))})


LRN = OpDef(
    name="lrn",
    attrs=Lrn,
    operands=(Operand("src", "SRC"),),
    category=Category.BANDWIDTH,
    infer=infer,
    reference=reference,
    primitive=primitive_of("Lrn", lambda attrs: {"local_size": attrs.size}),
    numbers=Numbers(spreads=True, loses=loses),
    sliced=each_image,
    cost=Cost(lambda attrs, gathered: 40.0, pytorch=0.05),
    samples=samples,
    onnx=Onnx(_write),
)
