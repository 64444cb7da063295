"""Other ways to compute the same, as data: for one node, for several neighbours, or for the whole graph.

Variants of nodes are alternatives in the exact problem. A variant of the graph has its own problem: costs decide on
its solution, or a race if costs cannot. Owns the list of variants, with the measured gain of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from fmtprop.ir import Graph, Node
from fmtprop.layout import MemoryDesc
from fmtprop.passes.base import Pass
from fmtprop.passes.target import Costs, Setting
from fmtprop.passes.variants.attention_fusion import attention
from fmtprop.passes.variants.depthwise_fusion import Fused, fused
from fmtprop.passes.variants.depthwise_planes import DepthwisePlanes
from fmtprop.passes.variants.expand import ExpandingPass
from fmtprop.passes.variants.merge_groups import MergeGroups
from fmtprop.passes.variants.norm_as_convolution import NormAsConvolution
from fmtprop.passes.variants.norm_with_function import NormWithFunction
from fmtprop.passes.variants.rounded import rounded
from fmtprop.passes.variants.scale_weights import ScaleWeights
from fmtprop.passes.variants.slice_batch import SliceBatch
from fmtprop.passes.variants.tabulate import tabulated
from fmtprop.passes.variants.whole_strides import WholeStrides
from fmtprop.passes.variants.winograd import Winograd

#: from the last of several nodes to one node for all, None where they are no such nodes
Fusion: TypeAlias = Callable[[Graph, Node], "Fused | None"]

Rewrite = TypeVar("Rewrite")


def _free(graph: Graph) -> Mapping[str, MemoryDesc]:
    return {}


@dataclass(frozen=True)
class Variant(Generic[Rewrite]):
    """Another way to compute the same."""

    name: str
    rewrite: Rewrite
    #: time with it over time without, and the source of the measurement
    gain: str
    #: whether costs can decide on it. Otherwise it must run.
    is_priced: bool = True
    #: from the graph, before it is rewritten, to formats that are settled then, by ``"node.operand"``
    pins: Callable[[Graph], Mapping[str, MemoryDesc]] = _free
    #: rewrites the best formatted graph of the original, if its formats allow it: without a problem of its own
    formatted: Callable[[Graph, Setting, Costs], Graph] | None = None


#: several nodes for one
EXPANSIONS: tuple[Variant[ExpandingPass], ...] = (
    Variant(
        "filtering",
        Winograd(),
        "VGG-16 0.62, ResNet-50 0.92 (AVX2, docs/performance.md); a training step of U-Net 0.85",
    ),
    Variant("norm as convolution", NormAsConvolution(), "DenseNet-121 0.78, 0.84 on AVX-512 (docs/experiments.md)"),
    Variant("depthwise planes", DepthwisePlanes(), "Conv-TasNet 0.40 (AVX-512, docs/experiments.md)"),
    Variant(
        "depthwise planes, upright", DepthwisePlanes(upright=True), "Conv-TasNet 0.40 (AVX-512, docs/experiments.md)"
    ),
    Variant("whole strides", WholeStrides(), "DCGAN generator for digits 0.85 (AVX-512, docs/experiments.md)"),
    Variant("groups merged", MergeGroups(), "ResNeXt-50 32x4d 0.86 (AVX2, docs/experiments.md)"),
)

#: one node for several
FUSIONS: tuple[Variant[Fusion], ...] = (
    Variant(
        "depthwise pair", fused, "MobileNetV2 0.93 and 0.95 (AVX-512, 2 threads, docs/experiments.md); 1.00 on AVX2"
    ),
    Variant("table", tabulated, "EfficientNet-B0 in int8 0.43 (AVX-512, docs/performance.md)"),
    Variant("rounded rows", rounded, "Swin-T in int8 0.87, ConvNeXt 0.91 (AVX-512, docs/performance.md)"),
    Variant("attention", attention, "GPT-2 of 192 channels 0.81, BERT-base 0.94 (AVX-512, docs/experiments.md)"),
)

#: another graph
OF_GRAPH: tuple[Variant[Pass], ...] = (
    Variant(
        "factors in weights",
        ScaleWeights(),
        "EfficientNet-B0 0.93 (AVX-512, docs/experiments.md)",
        pins=ScaleWeights().pins,
    ),
    Variant(
        "norm with function",
        NormWithFunction(),
        "a training step of MobileNetV2 0.95, bf16 0.92 (AVX-512, batch 4, docs/experiments.md)",
        formatted=NormWithFunction().run_formatted,
    ),
    Variant(
        "batch in slices",
        SliceBatch(),
        "DenseNet-121 0.82, MobileNetV2 0.94, ResNet-50 0.95 (batch 16, AVX-512, docs/experiments.md)",
        is_priced=False,  # the cost of a layer does not include its effect on the cache of the next
    ),
)
