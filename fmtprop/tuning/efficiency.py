"""How near implementations of sums of products come to the machine's peak, by their names and the kind of sum.

Owns the measured shares; :mod:`fmtprop.tuning.roofline` makes costs of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from fmtprop.ir.facets import Linear
from fmtprop.layout import MemoryDesc
from fmtprop.ops.convolution import FULL_ROW
from fmtprop.passes.target import AS_GRADIENT, EXCHANGED

#: share of the peak that a family of implementations reaches, by the start of its name (the first that matches counts):
#: on windows and products, on windows of one position, on one channel per group. Medians over the layers of the
#: built-in convolutional networks, each timed as it runs (see `measure`), with one thread on AVX2, by operations per
#: second over the peak. Where AVX-512 has another picture the order of the families is the same. The rows of
#: ``brgconv_strided`` and ``jit_bf16`` are of gradients, on AVX-512 (v3.2). The bare name ``ref`` is that of recurrent
#: layers by matrix products: they are as fast as PyTorch's but in bf16 on small layers, so these come first in a race.
_EFFICIENCY = (
    ("ref:", (0.004, 0.004, 0.004)),
    ("ref_", (0.004, 0.004, 0.004)),
    ("ref", (0.7, 0.7, 0.7)),
    ("aten::mkldnn_rnn", (0.75, 0.75, 0.75)),
    ("recurrent", (0.95, 0.95, 0.95)),
    ("attention", (0.65, 0.65, 0.65)),
    ("simple", (0.02, 0.02, 0.02)),
    ("brdgmm", (0.30, 0.30, 0.30)),
    # bytes, of the peak of pairs that saturate (AVX2 without VNNI)
    ("byte_products", (0.75, 0.7, 0.02)),
    ("grouped_convolution", (0.85, 0.7, 0.7)),
    ("jit_dw:avx512_core_bf16", (0.19, 0.19, 0.19)),
    ("jit_dw", (0.38, 0.38, 0.38)),
    ("depthwise", (0.47, 0.47, 0.47)),
    ("brgconv_strided", (0.75, 0.65, 0.003)),
    ("brgconv", (0.93, 0.82, 0.03)),  # on one channel per group it is all that f16 has in a fused pair (v3.2)
    ("brg", (0.80, 0.80, 0.80)),
    # bytes, beside `brgconv` and `jit_dw` (layers of ResNet-50, MobileNetV2 and EfficientNet-B0, AVX-512, v3.2)
    ("jit_int8", (0.93, 0.82, 0.36)),
    ("jit_uni_int8", (0.60, 0.55, 0.18)),
    ("jit_wino", (1.20, 1.20, 1.20)),
    ("jit_1x1", (0.85, 0.85, 0.85)),
    ("jit_bf16_1x1", (0.85, 0.85, 0.85)),
    ("jit_bf16", (0.80, 0.35, 0.005)),
    ("jit", (0.80, 0.35, 0.02)),  # each group is padded to a block of channels
    ("gemm", (0.55, 0.33, 0.007)),
    ("x64:gemm", (0.55, 0.33, 0.007)),
)
_OTHER = (0.5, 0.5, 0.2)

#: the same of the peak of matrices (AMX), where reading and writing come on top: the shares with the least error over
#: 27 products of transformers and 26 convolutions in bf16, of which two in three take 0.75 to 1.33 of their costs (one
#: thread of a Xeon, v3.2); those of gradients, `brgconv_strided`, are the ones above
_EFFICIENCY_OF_TILES = (
    ("brgconv_strided", (0.75, 0.65, 0.003)),
    ("brgconv", (0.94, 0.72, 0.03)),
    ("brg", (0.72, 0.72, 0.72)),
    ("jit_1x1", (0.66, 0.66, 0.66)),
    ("jit", (0.74, 0.50, 0.02)),
)

#: sequences with which recurrent layers reach half of these shares, by oneDNN and by the kernel of our own: a step is a
#: product of as many rows. LSTMs of 48 to 512 states, 48 steps of 1, 2, 4, 6 and 8 sequences, the kernel's time over
#: oneDNN's: 0.6, 0.55, 0.7, 0.8 and 0.85 (AVX-512), 0.5, 0.5, 0.7, 0.7 and 0.7 (AVX2, v3.2, one thread)
_HALF_SEQUENCES, _HALF_SEQUENCES_OF_KERNEL = 1.5, 0.8

#: prefixes of an implementation of another primitive; its gemm gathers nothing, except for a convolution
_WRAPPERS = ("inner_product:", "matmul:", "reorder:")
#: the same of a product that runs as convolution: with windows of one position, and `brgconv` is the kernel that is
#: `brg` otherwise. 15 products of transformers, one thread, time over `brgemm` as inner product (v3.2): `jit_1x1`
#: 0.94 with AVX2 and 0.97 with AVX-512, where `brg` and `brgconv_1x1` have 0.97
AS_CONVOLUTION = "convolution:"
_GEMM = 0.78

#: part of that speed where the vectors are shorter than the machine's, or have no fused multiply-add
_OLD = {"sse41": 0.3, "avx": 0.6}

#: channels of a group with which convolutions reach half of these shares, in elements of the machine's vectors, by the
#: start of the implementation's name; on channels-last tensors, and on blocks; a general product runs group by group,
#: for any vectors. Measured on ResNeXt-50's layers of 4 to 32 channels a group, on AVX2 and on AVX-512 (v3.2)
_HALF = (("brg", (0.4, 0.4)), ("jit", (1.2, 0.6)), ("grouped_convolution", (0.0, 0.0)))
_HALF_BY_CALLS = 16.0


#: positions of a row with which kernels of windows reach half of the speed that long rows approach: with it, rows of
#: one to four positions have the shares that are measured at `FULL_ROW`
_HALF_ROW = 3

#: prefix of the two kernels of a fused depthwise pair
_FUSED = "ref_fused_convolution:any:"


@lru_cache(maxsize=512)
def efficiency(impl: str, shape: int = 0) -> float:
    """Return the share of the peak that an implementation reaches.

    `shape`: 0 for windows and products, 1 for windows of one position, 2 for one channel per group.

    >>> efficiency("brgconv:avx2") > efficiency("gemm:jit") > efficiency("ref:any")
    True
    >>> efficiency("ref_fused_convolution:any:jit_1x1:avx2:jit_dw:avx2") > efficiency("ref:any")
    True
    >>> efficiency("jit:sse41+swish") == efficiency("jit:sse41") < efficiency("jit:avx2")
    True
    >>> efficiency("conv:any+x64:gemm:jit") == efficiency("x64:gemm:jit")
    True
    >>> efficiency("convolution:jit_1x1:avx2") > efficiency("inner_product:brgemm:avx2")  # a product in two ways
    True
    >>> efficiency("convolution:x64:gemm:jit") < efficiency("inner_product:x64:gemm:jit")
    True
    """
    impl = impl.removeprefix(AS_GRADIENT).removeprefix(f"{EXCHANGED}:")
    # a fused depthwise pair is called reference, but runs the two kernels that it goes on to name; a kernel after it
    # does not change the share
    impl = impl.removeprefix(_FUSED).partition("+")[0]
    name = impl
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    if impl.startswith(AS_CONVOLUTION):
        name, shape = name.removeprefix(AS_CONVOLUTION).replace("brgconv", "brg"), shape or 1
    elif name != impl and "gemm:jit" in name:
        return _GEMM
    table = (*_EFFICIENCY_OF_TILES, *_EFFICIENCY) if uses_tiles(impl) else _EFFICIENCY
    shares = next((shares for start, shares in table if name.startswith(start)), _OTHER)
    return shares[shape] * _OLD.get(impl.rpartition(":")[2], 1.0)


def uses_tiles(impl: str) -> bool:
    """Return whether an implementation multiplies matrices (AMX).

    >>> uses_tiles("brgconv:avx512_core_amx+swish"), uses_tiles("brgconv:avx512_core_bf16")
    (True, False)
    """
    return "_amx" in impl


def of_depthwise(impl: str) -> float:
    """Return the share of the peak that the second kernel of a fused depthwise pair reaches.

    >>> of_depthwise("ref_fused_convolution:any:jit_1x1:avx2:jit_dw:avx2") == efficiency("jit_dw:avx2", 2)
    True
    """
    second = impl.removeprefix(_FUSED).partition("+")[0].split(":")[2:]
    return efficiency(":".join(second) if second else "jit_dw", 2)


def shape_of(linear: Linear, src: MemoryDesc, weights: MemoryDesc) -> int:
    """Return the kind of a sum, the `shape` of :func:`efficiency`."""
    if not linear.windowed:
        return 0
    if linear.channels_per_group(weights.dims, src.ndim) == 1:
        return 2
    return int(prod(weights.dims[2 - src.ndim :]) == 1)


def filled(impl: str, lanes: int, linear: Linear, src: MemoryDesc, weights: MemoryDesc) -> float:
    """Return the part of its speed at which an implementation runs groups of few channels."""
    channels = linear.channels_per_group(weights.dims, src.ndim)
    if channels <= 1:
        return 1.0
    blocked = bool(src.inner_blocks)
    halves = (shares[blocked] * lanes for start, shares in _HALF if impl.startswith(start))
    return channels / (channels + next(halves, _HALF_BY_CALLS))


def in_rows(impl: str, positions: int) -> float:
    """Return the part of its speed at which an implementation computes windows along rows of so many positions.

    >>> in_rows("jit:avx2", 2) < in_rows("jit:avx2", 8) == in_rows("gemm:jit", 2) == 1.0
    True
    """
    if positions >= FULL_ROW or not impl.startswith(("brg", "jit")):
        return 1.0
    return positions / (positions + _HALF_ROW) * (FULL_ROW + _HALF_ROW) / FULL_ROW


def in_steps(sequences: int, *, by_kernel: bool = False) -> float:
    """Return the part of its speed at which oneDNN, or the kernel, computes the steps of so many sequences."""
    return sequences / (sequences + (_HALF_SEQUENCES_OF_KERNEL if by_kernel else _HALF_SEQUENCES))


def is_by_vectors(impl: str, linear: Linear, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc) -> bool:
    """Return whether a convolution by windows computes whole vectors of channels, more than dst has room for."""
    is_window = linear.windowed and weights.ndim == dst.ndim and shape_of(linear, src, weights) == 0
    return is_window and not dst.inner_blocks and impl.removeprefix(AS_GRADIENT).startswith(("brg", "jit"))


def is_general(impl: str) -> bool:
    """Return whether an implementation of a convolution is a general product."""
    return impl.removeprefix(AS_GRADIENT).removeprefix("x64:").startswith("gemm")
