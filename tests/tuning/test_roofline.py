"""The model: fast, positive, larger for more, and the right order of what everybody knows."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from types import SimpleNamespace

import pytest
import torch

import fmtprop as fp
from fmtprop.capture import load
from fmtprop.compiling.snapshots import snapshots
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.binary import Binary
from fmtprop.ops.convolution import Conv
from fmtprop.ops.deconvolution import Deconv
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.matmul import MatMul
from fmtprop.ops.normalization import BatchNorm, LayerNorm
from fmtprop.ops.pooling import Pooling
from fmtprop.ops.prelu import Prelu
from fmtprop.ops.recurrent import KINDS, Recurrent
from fmtprop.ops.resampling import Resampling
from fmtprop.ops.sum import Sum
from fmtprop.passes.target import Candidate
from fmtprop.targets.reference import ReferenceImplementation
from fmtprop.tuning import roofline
from fmtprop.tuning.efficiency import efficiency
from fmtprop.tuning.peaks import FOOTPRINTS, Peaks
from fmtprop.tuning.roofline import ModelCosts

PEAKS = Peaks(
    {DataType.F32: 1e11, DataType.BF16: 2e11},
    dict(zip(FOOTPRINTS, (4e10, 2e10, 1e10, 1e10), strict=True)),
    5e10,
    1.5e-6,
)
COSTS = ModelCosts(PEAKS, 100 << 20)


def conv(channels: int, size: int, impl: str, tag: str, groups: int = 1, dtype: str = "f32") -> tuple[Node, Candidate]:
    dims = (1, channels, size, size)
    weights = (groups, channels // groups, channels // groups, 3, 3) if groups > 1 else (channels, channels, 3, 3)
    src = MemoryDesc(dims, dtype, tag=tag)
    attrs = Conv((1, 1), (0, 0), (1, 1), (1, 1), groups)
    node = Node("conv", "convolution", attrs, (TensorType(dims, DataType(dtype)),))
    return node, Candidate("onednn", impl, {"src": src, "weights": MemoryDesc(weights, dtype)}, (src,))


def row_product(size: int, impl: str, **told: bool) -> tuple[Node, Candidate]:
    src, weights = MemoryDesc((1, size)), MemoryDesc((size, size), tag="ba")
    node = Node("product", "matmul", MatMul(), (TensorType(src.dims),))
    return node, Candidate("jit", impl, {"src": src, "weights": weights}, (src,), handle=SimpleNamespace(**told))


def test_a_convolution_takes_the_time_of_its_arithmetic() -> None:
    flops = 2 * 64 * 64 * 9 * 56 * 56
    assert COSTS.node(*conv(64, 56, "brgconv:avx2", "acdb")) == pytest.approx(
        flops / (1e11 * efficiency("brgconv:avx2")), rel=0.01
    )


def test_more_channels_and_larger_images_cost_more() -> None:
    costs = [COSTS.node(*conv(c, s, "jit:avx2", "aBcd8b")) for c, s in ((8, 7), (16, 7), (16, 14), (64, 14), (64, 56))]
    assert costs == sorted(costs) and len(set(costs)) == len(costs)


@pytest.mark.parametrize("impl", ["jit:avx2", "brgconv:avx2", "grouped_convolution:avx2"])
def test_windows_along_rows_of_few_places_are_slow_in_onednn_unless_rows_and_columns_are_exchanged(impl: str) -> None:
    def cost(rows: int, columns: int, impl: str) -> float:
        src = MemoryDesc((1, 64, rows, columns), tag="acdb")
        node = Node("conv", "convolution", Conv.make(2, pad_l=1), (TensorType(src.dims),))
        return COSTS.node(node, Candidate("onednn", impl, {"src": src, "weights": MemoryDesc((64, 64, 3, 3))}, (src,)))

    full = cost(12, 24, impl)
    assert cost(24, 12, impl) == cost(96, 3, f"exchanged:{impl}") == full
    few = [cost(288 // columns, columns, impl) / full for columns in (1, 2, 4)]
    if impl.startswith("grouped"):
        assert few == [1.0, 1.0, 1.0]
    else:
        assert 3.0 > few[0] > few[1] > few[2] > 1.2


def test_brgconv_copies_what_lies_between_the_numbers_of_dilated_windows() -> None:
    def cost(apart: int, impl: str, tag: str) -> float:
        src, dst = (MemoryDesc((1, 128, size), tag=tag) for size in (7500 + 2 * apart, 7500))
        attrs = Conv((1,), (apart - 1,), (0,), (0,), 1)
        node = Node("conv", "convolution", attrs, (TensorType(dst.dims),))
        return COSTS.node(node, Candidate("onednn", impl, {"src": src, "weights": MemoryDesc((128, 128, 3))}, (dst,)))

    assert cost(1, "brgconv:avx2", "acb") < cost(1, "jit:avx2", "aBc8b") < cost(2048, "brgconv:avx2", "acb")
    assert cost(2048, "jit:avx2", "aBc8b") == cost(1, "jit:avx2", "aBc8b")


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_of_few_sequences_are_slow_in_onednn(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "threads_here", lambda: threads)

    def cost(sequences: int, impl: str, **told: object) -> float:
        types = KINDS["lstm"].problem_types(32, sequences, 128, 128, 1)
        node = Node("layer", "lstm", Recurrent(), (TensorType((32, sequences, 128)),))
        operands = {name: MemoryDesc(type_.dims) for name, type_ in types.items()}
        results = (MemoryDesc((32, sequences, 128)), *[MemoryDesc((1, 1, sequences, 128))] * 2)
        return COSTS.node(node, Candidate("", impl, operands, results, handle=SimpleNamespace(**told)))

    def own_cost(sequences: int, tasks: int) -> float:
        kernel = SimpleNamespace(rows=sequences // tasks, tasks=tasks)
        return cost(sequences, "recurrent:lstm:avx2", by_kernel=True, kernel=kernel)

    others = [cost(count, "brgemm:avx2") for count in (1, 2, 6)]
    own = [own_cost(count, 1) for count in (1, 2, 6)]
    assert others[1] < 1.5 * others[0] and own[2] < 4 * own[0]
    assert own[0] < 0.85 * others[0]  # oneDNN's steps of one sequence leave a second thread idle
    assert (own[2] < 0.85 * others[2]) is (threads == 1)
    assert own_cost(4, 2) < others[2]  # each thread has a group


def test_weights_beyond_the_second_cache_are_read_in_each_step() -> None:
    def cost(states: int, groups: int) -> float:
        types = KINDS["lstm"].problem_types(32, 2, states, states, 1)
        node = Node("layer", "lstm", Recurrent(), (TensorType((32, 2, states)),))
        operands = {name: MemoryDesc(type_.dims) for name, type_ in types.items()}
        results = (MemoryDesc((32, 2, states)), *[MemoryDesc((1, 1, 2, states))] * 2)
        handle = SimpleNamespace(kernel=SimpleNamespace(rows=2, tasks=1, groups=groups), by_kernel=True)
        return COSTS.node(node, Candidate("", "recurrent:lstm:avx2", operands, results, handle=handle))

    again = 31 * (4 * 4 * 1024**2 - (1 << 20)) / COSTS.peaks.rate(8 << 20)
    assert cost(1024, 2) - cost(1024, 1) == pytest.approx(again)
    assert cost(128, 2) == cost(128, 1)


@pytest.mark.parametrize("behind", ["", "+swish"])
def test_half_vectors_take_twice_as_long_whatever_runs_behind_them(behind: str) -> None:
    costs = ModelCosts(PEAKS, 100 << 20, lanes=16)
    half, whole = (costs.node(*conv(64, 56, f"jit:{isa}{behind}", "aBcd8b")) for isa in ("avx2", "avx512_core"))
    assert half > 1.7 * whole


def test_channels_that_only_fill_a_block_are_computed_too() -> None:
    full, padded = (COSTS.node(*conv(c, 56, "jit:avx2", "aBcd8b")) for c in (16, 9))
    assert padded == pytest.approx(full, rel=0.02)
    assert COSTS.node(*conv(9, 56, "jit:avx2", "acdb")) < 0.6 * padded


def test_a_depthwise_convolution_has_one_channel_per_sum() -> None:
    depthwise = COSTS.node(*conv(64, 56, "jit_dw:avx2", "aBcd8b", groups=64))
    assert depthwise < 0.1 * COSTS.node(*conv(64, 56, "jit:avx2", "aBcd8b"))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_fused_pair_costs_what_both_do_whatever_is_left_behind_its_strides(stride: int) -> None:
    def type_(*dims: int) -> TensorType:
        return TensorType(dims)

    swish = PostOp("eltwise", Eltwise("swish", 1.0))
    inputs = {"src": type_(1, 16, 112, 112), "weights": type_(96, 16, 1, 1), "post_op_1": type_(96, 1, 1, 3, 3)}
    small = 112 // stride
    depthwise = Conv.make(2, stride, pad_l=1, groups=96)
    between, dst = type_(1, 96, 112, 112), type_(1, 96, small, small)
    alone = Node("expand", "convolution", Conv.make(2), (between,), post_ops=(swish,))
    behind = Node("depthwise", "convolution", depthwise, (dst,))
    tail = (swish, PostOp("convolution", depthwise, "post_op_1"))
    fused = Node("both", "convolution", Conv.make(2), (dst,), post_ops=tail)

    def cost(node: Node, impl: str, **types: TensorType) -> float:
        formats = {name: MemoryDesc(t.dims, t.dtype) for name, t in types.items()}
        return COSTS.node(node, Candidate("onednn", impl, formats, (MemoryDesc(node.results[0].dims),)))

    first = cost(alone, "jit_1x1:avx2", src=inputs["src"], weights=inputs["weights"])
    second = cost(behind, "jit_dw:avx2", src=between, weights=inputs["post_op_1"])
    both = cost(fused, "jit_1x1:avx2", **inputs)
    assert first < both < 1.2 * (first + second)


def test_vectors_do_not_reach_the_peak_of_matrices() -> None:
    peaks = Peaks({DataType.F32: 1e11, DataType.BF16: 1e12}, {1 << 30: 2e10}, 1e11, 2e-6)
    costs = ModelCosts(peaks, 1 << 20, has_tiles=True)

    def seconds(impl: str, groups: int = 1, dtype: str = "bf16") -> float:
        return costs.node(*conv(256, 14, impl, "acdb", groups, dtype))

    matrices, vectors = (seconds(f"brgconv:avx512_core_{isa}") for isa in ("amx", "bf16"))
    assert matrices < 0.3 * vectors
    assert vectors > seconds("brgconv:avx512_core", dtype="f32"), "pairs have half of the units beside matrices"
    faster = ModelCosts(Peaks({DataType.F32: 1e11, DataType.BF16: 2e11}, {1 << 30: 2e10}, 1e11, 2e-6), 1 << 20)
    pairs = faster.node(*conv(256, 14, "brgconv:avx512_core_bf16", "acdb", 1, "bf16"))
    assert pairs == pytest.approx(seconds("brgconv:avx512_core", dtype="f32") / 2, rel=0.1)
    own, old = (
        costs.node(*conv(64, 112, i, "acdb", 64, "bf16")) for i in ("depthwise:avx512_core", "jit_dw:avx512_core_bf16")
    )
    assert own < 0.6 * old


def test_the_pointwise_kernel_of_blocks_is_slower_across_channels_with_wide_vectors() -> None:
    wide = ModelCosts(PEAKS, 100 << 20, lanes=16)

    def seconds(costs: ModelCosts, impl: str, tag: str) -> float:
        node, candidate = conv(256, 14, impl, tag)
        weights = MemoryDesc((256, 256, 1, 1))
        return costs.node(node, replace(candidate, operands={**candidate.operands, "weights": weights}))

    across, blocks = (seconds(wide, "jit_1x1:avx512_core", tag) for tag in ("acdb", "aBcd16b"))
    assert blocks < seconds(wide, "brgconv_1x1:avx512_core", "acdb") < across
    assert seconds(COSTS, "jit_1x1:avx2", "acdb") == seconds(COSTS, "jit_1x1:avx2", "aBcd8b")


def test_a_product_by_the_pointwise_kernel_is_ahead_with_vectors_of_eight_alone() -> None:
    def cost(lanes: int, impl: str) -> float:
        src, weights = MemoryDesc((1, 197, 768)), MemoryDesc((768, 3072), tag="BA8a24b")
        dst = MemoryDesc((1, 197, 3072))
        node = Node("product", "matmul", MatMul(), (TensorType(dst.dims),))
        candidate = Candidate("onednn", impl, {"src": src, "weights": weights}, (dst,))
        return ModelCosts(PEAKS, 100 << 20, lanes=lanes).node(node, candidate)

    assert cost(8, "convolution:jit_1x1:avx2") < cost(8, "inner_product:brgemm:avx2")
    assert cost(16, "convolution:jit_1x1:avx512_core") > cost(16, "brg:avx512_core")
    assert cost(16, "convolution:brgconv_1x1:avx512_core") == cost(16, "brg:avx512_core")
    assert cost(8, "convolution:x64:gemm:jit") > cost(8, "inner_product:x64:gemm:jit")


def test_consecutive_columns_are_rearranged_by_brg_in_each_run() -> None:
    node = Node("product", "matmul", MatMul(), (TensorType((12, 1, 1024)),))
    src, dst = MemoryDesc((12, 1, 64)), MemoryDesc((12, 1, 1024))

    def seconds(impl: str, tag: str) -> float:
        operands = {"src": src, "weights": MemoryDesc((12, 64, 1024), tag=tag)}
        return COSTS.node(node, Candidate("onednn", impl, operands, (dst,)))

    assert seconds("brg:avx512_core", "acb") > 1.5 * seconds("gemm:jit:f32", "acb")
    assert seconds("brg:avx512_core", "abc") == pytest.approx(seconds("gemm:jit:f32", "abc"))


@pytest.mark.parametrize(
    ("tag", "columns", "dtype", "slow"),
    [("ab", 3072, "f32", True), ("ab", 768, "f32", False), ("ba", 3072, "f32", False), ("ab", 3072, "bf16", False)],
)
def test_rows_whole_pages_apart_compete_for_the_first_cache_in_brg(tag, columns, dtype, slow) -> None:
    dst = MemoryDesc((200, columns), dtype)
    node = Node("product", "matmul", MatMul(), (TensorType(dst.dims, dst.dtype),))

    def seconds(impl: str) -> float:
        operands = {"src": MemoryDesc((200, 1024), dtype), "weights": MemoryDesc((1024, columns), dtype, tag=tag)}
        return COSTS.node(node, Candidate("onednn", impl, operands, (dst,)))

    assert (seconds("brg:avx512_core") > 1.2 * seconds("matmul:gemm:jit:f32")) is slow


def test_the_reference_loop_is_the_slowest_implementation() -> None:
    names = ["brgconv:avx2", "jit:avx2", "gemm:jit", "ref:any"]
    costs = [COSTS.node(*conv(64, 56, name, "acdb")) for name in names]
    assert costs == sorted(costs) and costs[-1] > 50 * costs[0]


def test_bf16_uses_its_own_peak() -> None:
    f32, bf16 = (COSTS.node(*conv(64, 56, "brgconv:avx512_core_bf16", "acdb", dtype=d)) for d in ("f32", "bf16"))
    assert bf16 == pytest.approx(f32 / 2, rel=0.02)


def test_weights_that_fit_in_cache_are_read_faster() -> None:
    node, candidate = conv(1024, 2, "brgconv:avx2", "acdb")
    assert ModelCosts(PEAKS, 1 << 20).node(node, candidate) < COSTS.node(node, candidate)


def test_a_kernel_of_few_rows_reads_as_fast_as_was_measured() -> None:
    node, candidate = row_product(1 << 10, "gemv:avx2", by_kernel=True, moves_freely=True)
    far = {footprint: rate if footprint > 24 << 20 else 2 * rate for footprint, rate in PEAKS.reading.items()}
    for footprint, factor in ((8 << 20, 2.0), (128 << 20, 1.0)):
        library, own = (ModelCosts(replace(PEAKS, streaming=known), footprint) for known in ({}, far))
        call = 3 * PEAKS.call
        assert library.node(node, candidate) - call == pytest.approx(
            factor * (own.node(node, candidate) - call), rel=0.01
        )


def test_large_activations_move_as_fast_as_was_measured_for_so_many_bytes() -> None:
    costs = ModelCosts(replace(PEAKS, moving={8 << 20: 2.5e10, 32 << 20: 5e9}), 1 << 20)
    src, dst = (MemoryDesc((1, 64, 256, 256), tag=tag) for tag in ("abcd", "acdb"))  # 16 MiB each
    assert costs.reorder(src, dst) == pytest.approx((32 << 20) / 5e9, rel=0.01)
    near = [MemoryDesc((1, 64, 32, 32), tag=tag) for tag in ("abcd", "acdb")]
    assert costs.reorder(*near) == COSTS.reorder(*near)


def test_a_function_in_a_kernel_of_our_own_takes_as_long_behind_sums_as_behind_a_primitive() -> None:
    swish = (PostOp("eltwise", Eltwise("swish", 1.0)),)
    plain, candidate = conv(64, 112, "depthwise:avx2", "acdb", groups=64)
    own = replace(candidate, handle=SimpleNamespace(by_kernel=True))
    with_function = plain.with_(post_ops=swish)
    numbers = 64 * 112 * 112
    costs = ModelCosts(replace(PEAKS, functions=1e9), 1 << 20)
    assert costs.node(with_function, own) - costs.node(plain, own) == pytest.approx(numbers / 1e9)
    assert costs.node(with_function, own) < costs.node(with_function, candidate)


def test_views_cost_nothing_and_the_reference_target_its_call() -> None:
    node, candidate = conv(8, 8, "brgconv:avx2", "acdb")
    assert COSTS.node(node, Candidate("view", "view", candidate.operands, candidate.results)) == 0.0
    assert (
        COSTS.node(
            node,
            Candidate(
                "reference", "torch", candidate.operands, candidate.results, handle=ReferenceImplementation("torch")
            ),
        )
        > 4e-6
    )


def test_a_costly_function_costs_more_than_a_cheap_one() -> None:
    desc = MemoryDesc((1, 64, 28, 28), "f32")
    candidate = Candidate("onednn", "jit:avx2", {"src": desc}, (desc,))
    type_ = TensorType(desc.dims, DataType.F32)
    relu, gelu = (Node("act", "eltwise", Eltwise(alg), (type_,)) for alg in ("relu", "gelu_erf"))
    assert COSTS.node(relu, candidate) < COSTS.node(gelu, candidate)


def test_pytorch_computes_some_functions_in_more_operations() -> None:
    """180 000 numbers: tanh takes 0.46 ms by PyTorch and 0.11 by oneDNN, a sigmoid 0.07 and 0.09."""
    desc = MemoryDesc((60, 60, 50), "f32")

    def ratio(alg: str) -> float:
        node = Node("a", "eltwise", Eltwise(alg), (TensorType(desc.dims),))
        by_pytorch = Candidate("reference", "torch", {"src": desc}, (desc,), handle=ReferenceImplementation("torch"))
        own = Candidate("onednn", "jit:avx2", {"src": desc}, (desc,))
        return COSTS.node(node, by_pytorch) / COSTS.node(node, own)

    assert all(ratio(alg) > 1.5 for alg in ("tanh", "exp", "mish"))
    assert ratio("logistic") < 1


@pytest.mark.parametrize(("loop", "tag"), [("ncsp_bnorm:any", "abcd"), ("nspc_bnorm:any", "acdb")])
def test_normalizations_without_generated_code_are_slower_than_a_change_of_format(loop: str, tag: str) -> None:
    dims, vector = (1, 288, 28, 28), MemoryDesc((288,))
    node = Node("bn", "batch_normalization", BatchNorm(1e-5), (TensorType(dims),))

    def seconds(impl: str, tag: str) -> float:
        src = MemoryDesc(dims, tag=tag)
        operands = {"src": src, **dict.fromkeys(("mean", "variance", "scale", "shift"), vector)}
        return COSTS.node(node, Candidate("onednn", impl, operands, (src,)))

    change = COSTS.reorder(MemoryDesc(dims, tag=tag), MemoryDesc(dims, tag="aBcd8b")) or 0.0
    assert seconds(loop, tag) > 2 * change + seconds("bnorm_jit:avx2", "aBcd8b")


def test_reorders() -> None:
    plain, last, blocked = (MemoryDesc((1, 64, 56, 56), "f32", tag=tag) for tag in ("abcd", "acdb", "aBcd8b"))
    small = MemoryDesc((1, 64, 7, 7), "f32", tag="acdb")
    assert COSTS.reorder(plain, plain) == 0.0
    assert COSTS.reorder(plain, MemoryDesc((1, 64, 56, 56), "f32", strides=(0, 0, 0, 0))) is None
    copy = COSTS.reorder(last, last.with_dtype("bf16"))
    into, transpose = COSTS.reorder(last, blocked), COSTS.reorder(plain, last)
    assert copy is not None and into is not None and transpose is not None
    assert PEAKS.call < copy < into < transpose
    assert (COSTS.reorder(small, MemoryDesc(small.dims, "f32")) or 0) < transpose


def test_deconvolutions_of_few_channels_cost_their_additions() -> None:
    """PRNet's last layers took 3.7 ms by oneDNN's general product, 10.8 by blocks of 16, 1.2 by PyTorch."""
    src, dst = MemoryDesc((1, 3, 259, 259), "f32", tag="acdb"), MemoryDesc((1, 3, 256, 256), "f32", tag="acdb")
    node = Node("deconv", "deconvolution", Deconv.make(2, pad_l=3), (TensorType(dst.dims, DataType.F32),))

    def cost(impl: str, weights: str, handle: object = None) -> float:
        operands = {"src": src, "weights": MemoryDesc((3, 3, 4, 4), "f32", tag=weights)}
        return COSTS.node(node, Candidate("", impl, operands, (dst,), handle=handle))

    blocks, general = cost("conv:any+jit:avx512_core", "ABcd16b16a"), cost("conv:any+x64:gemm:jit", "bacd")
    assert 5e-3 < blocks < 50e-3
    assert 2e-3 < general < blocks
    assert 0.5e-3 < cost("torch", "abcd", ReferenceImplementation("torch")) < general


def test_whole_vectors_of_channels_are_computed() -> None:
    """A deconvolution from 64 channels took 1.5 ms to 1, 3, 8 or 16, and 0.2, 0.5, 1.2 or 2.7 by a general product."""
    costs = ModelCosts(PEAKS, 100 << 20, lanes=16)

    def cost(outputs: int, impl: str, tag: str) -> float:
        src, dst = MemoryDesc((1, 64, 64, 64), "f32", tag=tag), MemoryDesc((1, outputs, 128, 128), "f32", tag=tag)
        node = Node("deconv", "deconvolution", Deconv.make(2, 2, pad_l=1), (TensorType(dst.dims, DataType.F32),))
        operands = {"src": src, "weights": MemoryDesc((outputs, 64, 4, 4), "f32")}
        return costs.node(node, Candidate("", impl, operands, (dst,)))

    vectors = "brg_conv:avx512_core+brgconv_strided:avx512_core"
    assert cost(1, vectors, "acdb") == pytest.approx(cost(16, vectors, "acdb"), rel=0.1)
    assert cost(3, "conv:any+x64:gemm:jit", "abcd") < cost(3, vectors, "acdb")
    assert cost(16, vectors, "acdb") < cost(16, "conv:any+x64:gemm:jit", "abcd")


def test_kernels_of_vectors_compute_whole_ones_in_convolutions_too() -> None:
    """64 to 1 channels, 3x3, on 256x256: 12 ms with vectors of 16, 8.8 of 8, 26 by a general product, which gathers."""
    costs = ModelCosts(PEAKS, 100 << 20, lanes=16)

    def cost(outputs: int, impl: str, tag: str) -> float:
        src, dst = MemoryDesc((1, 64, 256, 256), "f32", tag=tag), MemoryDesc((1, outputs, 256, 256), "f32", tag=tag)
        node = Node("conv", "convolution", Conv.make(2, pad_l=1), (TensorType(dst.dims, DataType.F32),))
        operands = {"src": src, "weights": MemoryDesc((outputs, 64, 3, 3), "f32")}
        return costs.node(node, Candidate("", impl, operands, (dst,)))

    for impl in ("brgconv:avx512_core", "jit:avx512_core"):
        assert cost(1, impl, "acdb") == pytest.approx(cost(16, impl, "acdb"), rel=0.1)
        assert cost(1, impl, "acdb") < cost(1, "x64:gemm:jit", "abcd") < 5 * cost(1, impl, "acdb")


def test_pytorch_deconvolves_into_channels_last() -> None:
    """2 to 384 channels, 6x6, stride 2, from 16x16: 1.3 ms into rows, 0.6 into channels-last."""
    node = Node("deconv", "deconvolution", Deconv.make(2, 2, pad_l=2), (TensorType((1, 384, 32, 32), DataType.F32),))

    def cost(tag: str) -> float:
        src, dst = MemoryDesc((1, 2, 16, 16), "f32", tag=tag), MemoryDesc((1, 384, 32, 32), "f32", tag=tag)
        operands = {"src": src, "weights": MemoryDesc((384, 2, 6, 6), "f32")}
        return COSTS.node(node, Candidate("", "torch", operands, (dst,), handle=ReferenceImplementation("torch")))

    assert 1.5 < cost("abcd") / cost("acdb") < 3


def test_a_pooling_by_plain_loops_takes_longer_in_bf16() -> None:
    """RAFT's correlations, 1280 images of one channel: 4.8 ms in f32 by oneDNN, 12.7 in bf16, 3 by PyTorch."""

    def cost(impl: str, dtype: DataType, handle: object = None) -> float:
        src, dst = MemoryDesc((1280, 1, 32, 40), dtype), MemoryDesc((1280, 1, 16, 20), dtype)
        attrs = Pooling.make("avg_include_padding", (2, 2), 2)
        node = Node("pool", "pooling", attrs, (TensorType(dst.dims, dtype),))
        return COSTS.node(node, Candidate("", impl, {"src": src}, (dst,), handle=handle))

    f32, bf16 = (cost("simple_nchw:any", dtype) for dtype in (DataType.F32, DataType.BF16))
    assert 2 * f32 < bf16 < 4 * f32
    assert cost("torch", DataType.BF16, ReferenceImplementation("torch")) < bf16 / 2


def test_neighbours_are_gathered_one_by_one_unless_channels_are_innermost() -> None:
    """With one price for all formats, two images were interpolated row by row, in 8 times the time."""

    def seconds(channels: int, tag: str, alg: str = "linear") -> float:
        src, dst = (MemoryDesc((1, channels, *size), "f32", tag=tag) for size in ((56, 56), (112, 112)))
        node = Node("up", "resampling", Resampling(alg, (112, 112)), (TensorType(dst.dims),))
        return COSTS.node(node, Candidate("onednn", "jit:avx2", {"src": src}, (dst,)))

    assert seconds(64, "abcd") > 5 * seconds(64, "acdb") == 5 * seconds(64, "aBcd8b")
    assert seconds(64, "abcd") > 3 * seconds(64, "abcd", "nearest")
    assert seconds(1, "acdb") == pytest.approx(seconds(8, "acdb"), rel=0.1)  # a vector of 8 for one channel


def test_gradients_of_convolutions_apply_post_ops_slowly() -> None:
    """64 to 64 channels, 2x2, to 112x112 (one core): 0.9 ms, 31.6 with a ReLU, 54 with a product behind it."""
    src, dst = MemoryDesc((1, 64, 56, 56), "f32", tag="acdb"), MemoryDesc((1, 64, 112, 112), "f32", tag="acdb")
    weights = MemoryDesc((64, 64, 2, 2), "f32", tag="acdb")
    relu, product = PostOp("eltwise", Eltwise("relu")), PostOp("binary", Binary("mul"), "post_op_0")

    def cost(*post_ops: PostOp) -> float:
        dims = TensorType(dst.dims, DataType.F32)
        node = Node("deconv", "deconvolution", Deconv.make(2, strides=2), (dims,), post_ops=post_ops)
        operands = {"src": src, "weights": weights, "post_op_0": dst}
        return COSTS.node(node, Candidate("", "conv:any+brgconv_strided:avx512_core", operands, (dst,)))

    assert 5 * cost() < cost(relu) < cost(product)


@pytest.mark.parametrize("impl", ["gemm:jit", "x64:gemm:jit"])
def test_a_general_product_applies_post_ops_element_by_element(impl: str) -> None:
    """A grouped convolution with a PReLU took 5 ms by oneDNN's general product, 0.03 ms without it (DiCENet)."""
    slopes = MemoryDesc((1, 64, 1, 1), "f32")

    def tail(name: str, *post_ops: PostOp) -> float:
        node, candidate = conv(64, 28, name, "acdb")
        more = {one.operand: slopes for one in post_ops if one.operand is not None}
        alone = COSTS.node(node, candidate)
        return (
            COSTS.node(node.with_(post_ops=post_ops), replace(candidate, operands={**candidate.operands, **more}))
            - alone
        )

    prelu, relu = PostOp("prelu", Prelu(), "post_op_0"), PostOp("eltwise", Eltwise("relu"))
    tanh, residual = PostOp("eltwise", Eltwise("tanh")), PostOp("sum", Sum((1.0,)), "post_op_0")
    costs = [tail(impl, one) for one in (residual, relu, tanh, prelu)]
    assert costs == sorted(costs)
    assert costs[-1] > 20 * tail("jit:avx512_core", prelu) and costs[-1] > 64 * 28 * 28 * 40e-9


@pytest.mark.parametrize("model", ["mobilenet_v2", "shufflenet_v2", "unet"])
def test_every_step_of_a_network_has_a_price(model: str) -> None:
    (shot,) = snapshots(load(model))
    for node in shot.graph.nodes():
        if node.choice is None or node.is_boundary:
            continue
        candidate = Candidate(
            node.choice.target, node.choice.impl, node.choice.operands, node.descs, handle=node.choice.handle
        )
        cost = COSTS.node(node, candidate)
        assert isfinite(cost) and cost >= 0, node.label
        assert (cost > 0) == (node.choice.target != "view"), node.label


def test_efficiencies_are_shares() -> None:
    for impl in ("brgconv:avx2", "jit:avx512_core", "x64:gemm:jit", "ref:any", "jit_dw:avx2", "", "new:thing"):
        assert 0 < efficiency(impl) < 1.5


def test_gradients_of_depthwise_convolutions_have_one_fast_kernel():
    """In bf16 the others, first in oneDNN's list for strides, take thirty times as long and more."""
    for other in ("brgconv_strided:avx512_core_bf16", "jit_bf16:avx512_core_bf16"):
        assert efficiency(other, 2) < efficiency("jit_dw:avx512_core_bf16", 2) / 30
        assert efficiency(other, 0) > 0.7


def test_matrices_do_not_read_while_they_multiply() -> None:
    """A product of few rows takes the time of its weights and that of its operations, one after the other."""
    costs = ModelCosts(Peaks({DataType.F32: 1e11, DataType.BF16: 1e12}, {1 << 30: 2e10}, 1e11, 1e-6), 100 << 20)
    rows, depth, columns = 64, 768, 3072
    types = {"src": TensorType((rows, depth), "bf16"), "weights": TensorType((depth, columns), "bf16")}
    formats = {name: MemoryDesc(t.dims, t.dtype) for name, t in types.items()}
    node = Node("product", "matmul", MatMul(), (TensorType((rows, columns), "bf16"),))

    def seconds(impl: str) -> float:
        return costs.node(node, Candidate("onednn", impl, formats, (MemoryDesc((rows, columns), "bf16"),)))

    read = depth * columns * 2 / 2e10
    multiplied = 2.0 * rows * depth * columns / 1e12
    assert seconds("brg:avx512_core_amx") > read + multiplied
    assert seconds("convolution:jit_1x1:avx512_core_amx") > seconds("convolution:brgconv_1x1:avx512_core_amx")


@pytest.mark.parametrize("dtype", ["bf16", "u8"])
def test_functions_are_computed_in_f32_whatever_the_products_are(dtype: str) -> None:
    costs = ModelCosts(Peaks({DataType.F32: 1e11, DataType(dtype): 1e13}, {1 << 30: 2e10}, 1e11, 1e-6), 1 << 20)
    dims = (1, 64, 56, 56)
    formats = {"src": MemoryDesc(dims, dtype, tag="acdb"), "weights": MemoryDesc((64, 64, 1, 1), dtype)}
    dst = MemoryDesc(dims, dtype, tag="acdb")
    gelu = (PostOp("eltwise", Eltwise("gelu_erf")),)
    plain = Node("plain", "convolution", Conv.make(2), (TensorType(dims, dtype),))
    how = Candidate("onednn", "brgconv_1x1:avx512_core_amx", formats, (dst,))
    added = costs.node(plain.with_(post_ops=gelu), how) - costs.node(plain, how)
    in_f32 = {name: desc.with_dtype("f32") for name, desc in formats.items()}
    slow = Candidate("onednn", "brgconv_1x1:avx512_core", in_f32, (dst.with_dtype("f32"),))
    alone = costs.node(plain.with_(post_ops=gelu), slow) - costs.node(plain, slow)
    assert added == pytest.approx(alone, rel=0.5)


def test_pytorch_walks_across_tensors_of_other_orders() -> None:
    dims = (1, 196, 768)
    node = Node("product", "binary", Binary("mul"), (TensorType(dims, "bf16"),))
    rows, columns = MemoryDesc(dims, "bf16"), MemoryDesc(dims, "bf16", tag="acb")

    def seconds(second: MemoryDesc) -> float:
        handle = SimpleNamespace(by_operators=True)
        return COSTS.node(node, Candidate("pytorch", "torch", {"src": rows, "src_1": second}, (rows,), handle=handle))

    assert seconds(columns) > 3 * seconds(rows)


def test_rows_that_are_not_looked_up_cost_nothing() -> None:
    """BERT's table of 94 MB was a fifth of its costs, for the 128 rows of a sentence."""
    net = fp.compile(torch.nn.Embedding(200_000, 64), (torch.zeros(1, 16, dtype=torch.int64),), deterministic=True)
    (cost,) = (node.choice.cost for node in net.graph.nodes() if not node.is_boundary)
    assert 0 < cost < 1e-4


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_simple_layer_normalization_is_far_slower(dtype: str) -> None:
    dims = (1, 196, 768)
    node = Node("norm", "layer_normalization", LayerNorm(), (TensorType(dims, dtype),))
    formats = {"src": MemoryDesc(dims, dtype), "scale": MemoryDesc((768,)), "shift": MemoryDesc((768,))}

    def seconds(impl: str) -> float:
        return COSTS.node(node, Candidate("onednn", impl, formats, (formats["src"],)))

    assert seconds("simple:any") > 20 * seconds("jit:uni")
