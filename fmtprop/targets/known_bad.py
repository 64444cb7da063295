"""Combinations with wrong results or bad speed in some versions of oneDNN, which are avoided.

Each rule is declared with the versions and the defect. A combination that fails a plan's self-check (see
:mod:`fmtprop.runtime.selfcheck`) belongs here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from functools import lru_cache

from fmtprop.ir.node import Node
from fmtprop.layout import MemoryDesc
from fmtprop.ops import BatchNorm, Conv, Deconv, Eltwise, FakeQuantize, LayerNorm, Prelu, Recurrent, Reduction, Reorder
from fmtprop.ops.convolution_backward import ConvGradient
from fmtprop.ops.softmax import Softmax
from fmtprop.passes.assignment.formats import plain
from fmtprop.passes.target import Request, is_loop

Version = tuple[int, ...]

#: whether a node with these formats of operands and results, run by this implementation, has the defect
_Rule = Callable[[Node, Request, str], bool]

#: first version with a defect, first one without it, rule, and the defect in words
_DEFECTS: list[tuple[Version, Version, _Rule, str]] = []

#: largest product of channels and places of the window for which the sums of strided deconvolutions were right
_LONGEST_RIGHT_SUM = 3840

#: places of an image for which the compiled 1x1 convolution for AMX was right in all sizes: more than three tiles of 16
_FEWEST_RIGHT_PLACES = 49

#: channels for which the compiled gradient by dilated weights for AMX was right in all sizes: two vectors, a tile's row
_MOST_RIGHT_CHANNELS = 32

#: kernels that compensate a zero point under dilated windows over padding wrongly
_WRONG_COMPENSATION = frozenset({"jit:avx512_core_amx", "brgconv:avx2_vnni"})

#: numbers of f32 in a vector of AVX-512, and of AVX2
_LONGEST_VECTOR, _LANES_OF_AVX2 = 16, 8

#: the newest tested version, 3.13.2, still has the defect
_NOT_YET: Version = (4, 0)


def _defect(first: Version, fixed: Version, why: str) -> Callable[[_Rule], _Rule]:
    def declared(rule: _Rule) -> _Rule:
        _DEFECTS.append((first, fixed, rule, why))
        return rule

    return declared


def _binary_tails(node: Node, formats: Request) -> list[MemoryDesc]:
    return [formats[tail.operand] for tail in node.post_ops if tail.op == "binary" and tail.operand]


@_defect((3, 0), (3, 4), "resampling with sum or binary post-ops gives wrong results in any format but row-major")
def _resampling_with_tail_not_row_major(node: Node, formats: Request, impl: str) -> bool:
    tail = any(post_op.operand is not None for post_op in node.post_ops)
    return node.op == "resampling" and tail and formats["src"] != plain(formats["src"])


@_defect((3, 0), (3, 4), "binary post-op with a non-dense source gives wrong results")
def _binary_tail_not_dense(node: Node, formats: Request, impl: str) -> bool:
    return any(desc.kind == "blocked" and not desc.is_dense for desc in _binary_tails(node, formats))


def _pooling_tails_of_dst_size(node: Node, formats: Request, impl: str) -> list[MemoryDesc]:
    """Return the tails that compiled pooling reads by dst's positions (of a blocked buffer if dst is row-major)."""
    if node.op != "pooling" or not impl.startswith("jit"):
        return []
    dst = formats["dst"]
    return [desc.at_start().with_dtype(dst.dtype) for desc in _binary_tails(node, formats) if desc.dims == dst.dims]


# 3.6.2 has it, 3.13.2 does not
@_defect(
    (3, 0), (3, 13),
    "pooling's compiled kernels misread a binary post-op's source of dst's size in another format than dst's",
)  # fmt: skip
def _pooling_with_tail_laid_out_otherwise(node: Node, formats: Request, impl: str) -> bool:
    return any(desc != formats["dst"].at_start() for desc in _pooling_tails_of_dst_size(node, formats, impl))


@_defect(
    (3, 0), _NOT_YET,
    "pooling's compiled kernels misread a binary post-op's source of dst's size where dst is row-major",
)  # fmt: skip
def _row_major_pooling_with_tail(node: Node, formats: Request, impl: str) -> bool:
    tails = _pooling_tails_of_dst_size(node, formats, impl)
    return bool(tails) and formats["dst"].at_start() == plain(formats["dst"])


# seen in 3.13.2; 3.2.0 and 3.6.2 are right
@_defect((3, 7), _NOT_YET, "deconvolution with strides gives wrong results in the kernels for AMX")
def _strided_deconvolution_on_amx(node: Node, formats: Request, impl: str) -> bool:
    return isinstance(node.attrs, Deconv) and "amx" in impl and max(node.attrs.strides) > 1


# seen in 3.6.2, for any sizes; 3.2.0 is right
@_defect((3, 3), _NOT_YET, "deconvolution with bias gives wrong results in the compiled kernel for AMX")
def _deconvolution_with_bias_on_amx(node: Node, formats: Request, impl: str) -> bool:
    return "bias" in formats and impl.startswith("jit_deconvolution") and impl.endswith("amx")


# seen in 3.2.0, for most sizes; 3.6.2 is right
@_defect(
    (3, 0), (3, 6),
    "deconvolution with strides adds long sums in parts, and its bias and post-ops to each part, with AVX-512",
)  # fmt: skip
def _long_sums_of_a_strided_deconvolution(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Deconv) or not (impl.startswith("brg_conv:avx512_core+") and "strided" in impl):
        return False
    src, weights = formats.get("src"), formats.get("weights")
    if src is None or weights is None or src.dtype.nbytes < 4 or not (node.post_ops or "bias" in formats):
        return False
    return src.dims[1] * math.prod(weights.dims[2 - src.ndim :]) > _LONGEST_RIGHT_SUM


# seen in 3.2.0
@_defect((3, 0), _NOT_YET, "batch normalization's compiled kernels count only whole blocks of channels")
def _batch_normalization_of_a_part_of_a_block(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src")
    if not isinstance(node.attrs, BatchNorm) or is_loop(impl) or src is None or src.kind != "blocked":
        return False
    return any(block.axis == 1 and src.padded_dims[1] % block.size for block in src.inner_blocks)


# seen in 3.2.0
@_defect(
    (3, 0), _NOT_YET,
    "layer normalization's compiled kernels take the rows of all tensors for dense ones in one order",
)  # fmt: skip
def _layer_normalization_in_other_orders(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, LayerNorm) or is_loop(impl):
        return False
    found = [formats[name].at_start() for name in ("src", "dst", "diff_src", "diff_dst") if name in formats]
    # equal descriptors place all elements alike: their data types and the strides of dimensions of 1 may differ
    return not all(desc.is_dense for desc in found) or len({desc.with_dtype(found[0].dtype) for desc in found}) > 1


# seen in 3.2.0
@_defect(
    (3, 0),
    _NOT_YET,
    "logarithms of compiled kernels are 2e-6 too small, whatever their size: 20 to 75 times PyTorch's error, and "
    "softplus is negative far below 0",
)
def _logarithm(node: Node, formats: Request, impl: str) -> bool:
    if "diff_dst" in formats:  # gradients compute no logarithms
        return False
    steps = [node.attrs, *(tail.attrs for tail in node.post_ops)]
    return not is_loop(impl) and any(
        isinstance(attrs, Eltwise | Softmax) and attrs.alg in ("log", "soft_relu") for attrs in steps
    )


# seen in 3.2.0 and 3.6.2, with AVX-512
@_defect((3, 0), _NOT_YET, "binary in bf16 reads the wrong elements if the outermost of the inner blocks has 4")
def _binary_of_narrow_elements_in_blocks_of_4(node: Node, formats: Request, impl: str) -> bool:
    if node.op != "binary" or is_loop(impl):
        return False
    src = formats["src_0"]
    return src.kind == "blocked" and src.dtype.nbytes < 4 and any(block.size == 4 for block in src.inner_blocks[:1])


def _is_nested(desc: MemoryDesc, axes: Sequence[int]) -> bool:
    """Tell whether each of these axes lies around all that follow; blocks are inside all of them."""
    inner = math.prod(block.size for block in desc.inner_blocks)
    extent = inner
    for axis in reversed(axes):
        if desc.dims[axis] > 1:
            if desc.strides[axis] < extent:
                return False
            blocks = math.prod(block.size for block in desc.inner_blocks if block.axis == axis)
            extent = desc.strides[axis] * (desc.padded_dims[axis] // blocks)
    return True


def _is_in_a_known_order(desc: MemoryDesc) -> bool:
    """Tell whether the axes lie as in row-major, channels-last or blocked tensors."""
    first, *spatial = (axis for axis in range(desc.ndim) if axis != 1)
    return _is_nested(desc, range(desc.ndim)) or (desc.is_plain and _is_nested(desc, (first, *spatial, 1)))


# seen in 3.2.0 and 3.6.2, in f32 and bf16, with AVX2 and AVX-512
@_defect(
    (3, 0), _NOT_YET,
    "binary's compiled kernels find a smaller operand's elements, and the padding, by the order of axes in row-major, "
    "channels-last or blocked tensors, although src has another one",
)  # fmt: skip
def _binary_in_other_orders(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src_0")
    if node.op != "binary" or is_loop(impl) or src is None or src.kind != "blocked" or _is_in_a_known_order(src):
        return False
    tails = _binary_tails(node, formats)
    if src.inner_blocks and (tails or src.padded_dims != src.dims):
        return True
    return any(desc.dims != src.dims for desc in (formats["src_1"], *tails))


# seen in 3.2.0 and 3.6.2: row-major and channels-last are one format then
@_defect((3, 0), _NOT_YET, "binary's compiled kernels misread a smaller post-op of images of one place")
def _binary_of_single_places(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src_0")
    if node.op != "binary" or is_loop(impl) or src is None or src.ndim < 3 or math.prod(src.dims[2:]) > 1:
        return False
    return src.dims[0] > 1 and any(desc.dims != src.dims for desc in _binary_tails(node, formats))


# seen in 3.2.0 and 3.6.2
@_defect((3, 0), _NOT_YET, "binary takes blocks of the same sizes and strides for one format, whatever their axes")
def _binary_of_two_kinds_of_blocks(node: Node, formats: Request, impl: str) -> bool:
    if node.op != "binary" or is_loop(impl):
        return False
    first, second = formats["src_0"], formats["src_1"]
    return first.dims == second.dims and first.inner_blocks != second.inner_blocks


# seen in 3.2.0 and 3.6.2
@_defect(
    (3, 0), _NOT_YET,
    "eltwise's reference code takes padded blocks of channels for images one after another",
)  # fmt: skip
def _eltwise_of_padded_blocks_in_other_orders(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src")
    if not isinstance(node.attrs, Eltwise) or not is_loop(impl) or src is None or not src.inner_blocks:
        return False
    return src.padded_dims != src.dims and not _is_nested(src, range(src.ndim))


# seen in 3.2.0, forward and backward; 3.6.2 is right
@_defect((3, 0), (3, 6), "softmax's reference code takes rows for dense: it writes outside of memory")
def _softmax_of_rows_apart(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Softmax) or not is_loop(impl) or node.attrs.axis == 0:
        return False
    axis, found = node.attrs.axis, [desc for desc in formats.values() if desc.kind == "blocked"]
    return any(
        math.prod(desc.dims[axis + 1 :]) == 1 and desc.strides[axis - 1] != desc.padded_dims[axis] for desc in found
    )


# seen in 3.2.0 and 3.6.2: src is bcAd8a, and the batch is reduced
@_defect((3, 0), _NOT_YET, "reduction offers a format that has no name, and writes outside of memory")
def _reduction_to_no_format(node: Node, formats: Request, impl: str) -> bool:
    return isinstance(node.attrs, Reduction) and formats["dst"].kind == "opaque"


# seen in 3.2.0, for some sizes of images
@_defect(
    (3, 0), _NOT_YET,
    "the compiled 1x1 convolution of bf16 is wrong for an odd number of channels that are innermost",
)  # fmt: skip
def _odd_channels_of_narrow_pixels(node: Node, formats: Request, impl: str) -> bool:
    if "jit_bf16_1x1" not in impl or "src" not in formats:
        return False
    src = formats["src"]
    channels = src.dims[-1 if node.op == "matmul" else 1]  # a product runs as a convolution, too
    return src.kind == "blocked" and src.is_plain and channels % 2 == 1


# seen in 3.2.0 for products of 27 to 48 rows by 32 and more, where rows make three tiles; the rule holds for all that
# make few, since the library does not say how it cuts them
@_defect((3, 0), _NOT_YET, "the compiled 1x1 convolution for AMX is wrong for some images of few places")
def _few_places_on_amx(node: Node, formats: Request, impl: str) -> bool:
    if "jit_1x1" not in impl or not impl.partition("+")[0].endswith("amx") or "dst" not in formats:
        return False
    dims = formats["dst"].dims
    return math.prod(dims[2:] if isinstance(node.attrs, Conv) else dims[:-1]) < _FEWEST_RIGHT_PLACES


# seen in 3.2.0 for windows as wide as the image (5x5 with dilation 2 on 9x9; 7x7 with strides in groups on 20x20); the
# rule holds for all dilated ones, since the library does not say which places it compensates
@_defect(
    (3, 0), _NOT_YET,
    "convolutions of bytes with a zero point compensate dilated windows over padding wrongly, in two kernels",
)  # fmt: skip
def _zero_point_under_dilated_windows(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Conv) or not any(node.attrs.dilates):
        return False
    grid = node.grids.get("src")
    is_padded = any((*node.attrs.pad_l, *node.attrs.pad_r))
    return grid is not None and grid.zero != 0 and is_padded and impl.partition("+")[0] in _WRONG_COMPENSATION


# seen in 3.2.0 for images of 33 channels and more (volumes have no such kernel); with wide windows, the process ends
@_defect(
    (3, 0), _NOT_YET,
    "the compiled gradient by dilated weights for AMX reads outside of a source whose channels fill no vector",
)  # fmt: skip
def _gradient_by_dilated_weights_on_amx(node: Node, formats: Request, impl: str) -> bool:
    if node.op != "convolution_backward_weights" or not isinstance(node.attrs, ConvGradient):
        return False
    channels = node.attrs.dims[-1 - len(node.attrs.strides)]
    is_cut = channels > _MOST_RIGHT_CHANNELS and channels % _LONGEST_VECTOR != 0
    return impl == "jit:avx512_core_amx" and any(node.attrs.dilates) and is_cut


# seen in 3.2.0, forward and backward, in every data type
@_defect(
    (3, 0), _NOT_YET,
    "PReLU's compiled kernels take channels for outermost or innermost, although other axes lie on both sides",
)  # fmt: skip
def _slopes_of_channels_between_other_axes(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src")
    if not isinstance(node.attrs, Prelu) or is_loop(impl) or src is None or src.kind != "blocked":
        return False
    if not src.is_plain or formats["weights"].dims == src.dims or src.dims[1] == 1:
        return False
    step = src.strides[1]
    outside = any(stride > step for stride, size in zip(src.strides[2:], src.dims[2:], strict=True) if size > 1)
    return outside and step > 1


# seen in 3.2.0
@_defect(
    (3, 0), _NOT_YET,
    "PReLU's compiled kernels with a slope of each element count the last elements without padding",
)  # fmt: skip
def _slopes_of_padded_elements(node: Node, formats: Request, impl: str) -> bool:
    src = formats.get("src")
    if not isinstance(node.attrs, Prelu) or is_loop(impl) or src is None or src.kind != "blocked":
        return False
    if formats["weights"].dims != src.dims or src.padded_dims == src.dims:
        return False
    return math.prod(src.padded_dims) % _LONGEST_VECTOR != 0


def _is_a_matrix(desc: MemoryDesc, rows: Container[int]) -> bool:
    """Tell whether these axes lie around all others, or inside all others of a desc without blocks."""
    if any(block.axis in rows for block in desc.inner_blocks):
        return False
    long = [axis for axis, size in enumerate(desc.dims) if size > 1]
    ours = [desc.strides[axis] for axis in long if axis in rows]
    others = [desc.strides[axis] for axis in long if axis not in rows]
    if not ours or not others or min(ours) > max(others):
        return True
    return not desc.inner_blocks and max(ours) < min(others)


# src and weights in the same blocks of the batch pass oneDNN's comparison of formats; 3.6.2 has it, too
@_defect((3, 0), _NOT_YET, "inner product by gemm takes any two formats of the same order for matrices")
def _inner_product_of_no_matrices(node: Node, formats: Request, impl: str) -> bool:
    if "gemm" not in impl.split(":") or "inner_product" not in (node.op, impl.split(":")[0]):
        return False
    for name, desc in formats.items():
        operand, last = name.removeprefix("diff_"), desc.ndim - 1
        if operand not in ("src", "weights") or desc.kind != "blocked":
            continue
        of_matmul = range(last) if operand == "src" else (last,)
        if not _is_a_matrix(desc, of_matmul if node.op == "matmul" else (0,)):
            return True
    return False


# seen in 3.2.0
@_defect((3, 0), _NOT_YET, "gradients of recurrent layers take sequences and states for row-major ones")
def _gradient_of_a_recurrent_layer_in_other_orders(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Recurrent) or "diff_dst_layer" not in formats:
        return False
    data = [desc for name, desc in formats.items() if "weights" not in name and desc.kind == "blocked"]
    return any(desc.at_start() != plain(desc) for desc in data)


# the product with the states is written in rows of ws_gates_ld (64 bytes of bf16) to scratch_cell, which has room for
# rows of scratch_gates_ld (64 bytes of f32): 144 and 160 numbers for 48 states, 784 and 800 for 256. In 3.2.0 and the
# newest sources alike (cell_gru_lbr.cpp); 49 states, whose rows are as long, ended a process, too
@_defect(
    (3, 0), _NOT_YET, "GRU by gemm in bf16 writes behind its scratchpad: the process ends, or other numbers change"
)
def _narrow_gru_by_gemm(node: Node, formats: Request, impl: str) -> bool:
    is_forward = node.op.startswith("lbr_gru") and "diff_dst_layer" not in formats
    return is_forward and impl == "ref" and formats["src_layer"].dtype.nbytes < 4


# seen in 3.2.0: 17x8x8 from f32, row-major, to u8, channels innermost; 64x5x7 the other way round; 3.6.2 is right. Of
# 7 813 random tensors without gaps, 145 are wrong: all of these are among the 803 for which the rule holds. Where src
# has a stride that 16 divides, oneDNN makes its innermost axis the inner loop (prb_block_for_cache). From blocks, also
# where the order of the other axes changes: 25 of the 299 of 1 788 for which the rule holds
@_defect(
    (3, 0), (3, 6),
    "the compiled reorder to another order of axes forgets zero points of the last elements of a row",
)  # fmt: skip
def _shifted_bytes_in_another_order(node: Node, formats: Request, impl: str) -> bool:
    if not any(grid.zero for grid in node.grids.values()) or "jit" not in impl or not {"src", "dst"} <= formats.keys():
        return False
    src, dst = formats["src"].at_start(), formats["dst"].at_start()
    if src.dtype is dst.dtype or not isinstance(node.attrs, Reorder | FakeQuantize) or not dst.is_plain:
        return False
    axes = [axis for axis, size in enumerate(src.dims) if size > 1]
    inner = {block.axis for block in src.inner_blocks} or {axis for axis in axes if src.strides[axis] == 1}
    outer = [axis for axis in axes if axis not in inner]
    if src == dst.with_dtype(src.dtype) or (src.inner_blocks and _in_order(src, outer) == _in_order(dst, outer)):
        return False
    if not (dst.is_packed and inner) or not (src.inner_blocks or src.is_packed):
        return True
    steps = [dst.strides[axis] for axis in inner]
    return any(src.strides[axis] % 16 == 0 for axis in axes) and any(step > 1 and step % 4 for step in steps)


def _in_order(desc: MemoryDesc, axes: Sequence[int]) -> list[int]:
    """Return axes, the outermost first."""
    return sorted(axes, key=lambda axis: -desc.strides[axis])


# seen in 3.2.0 (s8[1,16,20,20] in 2 groups of 4 outputs) and in 3.6.2 (64 channels to 33, strides of 2 and 3)
@_defect((3, 0), _NOT_YET, "convolution of bytes by gemm is wrong for windows of one place with groups or strides")
def _bytes_by_gemm_of_single_places(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Conv) or "gemm_s8" not in impl:
        return False
    attrs, window = node.attrs, formats["weights"].dims[2 - formats["src"].ndim :]
    return math.prod(window) == 1 and (attrs.groups > 1 or max(attrs.strides) > 1)


# seen in 3.6.2 for few rows: [2,33] by [33,33], [5,48] by [48,8]; 3.2.0 is right
@_defect((3, 0), _NOT_YET, "compiled deconvolution of bytes is wrong where its window is smaller than its strides")
def _bytes_deconvolved_with_gaps(node: Node, formats: Request, impl: str) -> bool:
    attrs = node.attrs
    if not isinstance(attrs, Deconv) or not impl.startswith("jit") or formats["src"].dtype.nbytes > 1:
        return False
    window = formats["weights"].dims[-len(attrs.strides) :]
    return any(size < stride for size, stride in zip(window, attrs.strides, strict=True))


# seen in 3.2.0 with 6 and 11 channels, with AVX2 and SSE4.1; 8 and 16 are right
@_defect(
    (3, 0), _NOT_YET,
    "compiled depthwise convolution of bytes misreads a binary post-op's source beside a part of a vector of channels",
)  # fmt: skip
def _depthwise_bytes_with_tail_of_a_part(node: Node, formats: Request, impl: str) -> bool:
    if not isinstance(node.attrs, Conv) or not impl.startswith("jit_uni_int8"):
        return False
    channels = node.results[0].dims[1]
    is_part = node.attrs.groups == channels and channels % _LANES_OF_AVX2 > 0
    return is_part and any(math.prod(desc.dims) > 1 for desc in _binary_tails(node, formats))


@_defect((3, 3), _NOT_YET, "the product of matrices of bytes by gemm is wrong with a bias")
def _bytes_by_gemm_with_bias(node: Node, formats: Request, impl: str) -> bool:
    return impl in ("gemm:jit", "matmul:gemm:jit") and "bias" in formats and formats["src"].dtype.nbytes == 1


def known_bad(version: Version, node: Node, formats: Request, impl: str) -> str | None:
    """Return the reason why this implementation must not be used with this library version, or None."""
    return next((why for rule, why in _defects_of(version) if rule(node, formats, impl)), None)


@lru_cache(maxsize=4)
def _defects_of(version: Version) -> list[tuple[_Rule, str]]:
    return [(rule, why) for first, fixed, rule, why in _DEFECTS if first <= version < fixed]
