"""Products of a few rows with matrices of codes, and their decoding, against PyTorch on decoded numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fmtprop import dnnl
from fmtprop.jit import DecodeKernel, GatherNBitsKernel, NBitsKernel, unavailable
from fmtprop.jit.isa import AVX512
from fmtprop.jit.kernel import isa
from fmtprop.jit.nbits import most_rows, unit
from fmtprop.layout import DataType
from fmtprop.ops import GatherNBits
from fmtprop.ops.gather_nbits import reference as reference_gathered
from fmtprop.ops.matmul_nbits import DecodeNBits, MatMulNBits, decoded, encoded, reference_decoded
from tests.jit.work import statuses

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

NEEDS_BF16 = pytest.mark.skipif(not dnnl.lib().includes("avx512_core_bf16"), reason="kernels have no bf16 on this CPU")
GUARD = 1234.5


def codes_of(bits, outputs, depth, group, *, zero_points):
    generator = torch.Generator().manual_seed(bits + depth)
    kind, low, high = (torch.uint8, 0, 256) if bits == 4 else (torch.int8, -128, 128)
    tensors = {
        "weights": torch.randint(low, high, (outputs, depth * bits // 8), generator=generator, dtype=torch.int32).to(
            kind
        ),
        "scales": torch.randn(outputs, depth // group, generator=generator),
    }
    if zero_points:
        tensors["zero_points"] = torch.randint(-3, 17, (outputs, depth // group), generator=generator).float()
    return tensors


def run(kernel, tensors, threads=2):
    work = kernel.work(threads)
    for name, tensor in tensors.items():
        work.point[name](tensor.data_ptr())
    work.run()


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "depth"), [(16, 96), (32, 96), (128, 256), (96, 288), (512, 1024), (2048, 2048)])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11, 16])
def test_products_are_those_of_the_decoded_matrix(rows, group, depth, bits, zero_points):
    if rows > most_rows(isa()):
        pytest.skip("this CPU has too few registers")
    if group < unit(isa()) and bits == 8:
        pytest.skip("a vector of 8-bit codes has one scale")
    outputs = 3 * isa().lanes + 5
    tensors = codes_of(bits, outputs, depth, group, zero_points=zero_points)
    src = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1))
    block = torch.full((rows, outputs + 3), GUARD)
    kernel = NBitsKernel(
        *(outputs, depth, bits, group, DataType.F32, DataType.F32, zero_points),
        rows=rows,
        row_steps=(("src", depth), ("dst", outputs + 3)),
    )
    assert kernel.is_offered
    run(kernel, {**tensors, "src": src, "dst": block})
    expected = src.double() @ decoded(MatMulNBits(bits, group), tensors, depth).double().t()
    assert (block[:, :outputs] - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (block[:, outputs:] == GUARD).all()


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 3e38, 2.0**-120])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_any_numbers_gives_what_the_decoded_matrix_gives(bits, zero_points, number):
    tensors, src = codes_of(bits, 40, 256, 64, zero_points=zero_points), torch.zeros(1, 256)
    tensors["scales"] *= 1e-3
    src[0, 70], dst = number, torch.empty(1, 40)
    run(NBitsKernel(40, 256, bits, 64, DataType.F32, DataType.F32, zero_points), {**tensors, "src": src, "dst": dst})
    expected = src @ decoded(MatMulNBits(bits, 64), tensors, 256).t()
    torch.testing.assert_close(dst, expected, rtol=1e-6, atol=0.0, equal_nan=True)


@NEEDS_BF16
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_in_bf16(bits):
    tensors = codes_of(bits, 40, 128, 64, zero_points=False)
    src, dst = torch.randn(16, 128).bfloat16(), torch.empty(16, 40, dtype=torch.bfloat16)
    steps = (("src", 128), ("dst", 40))
    kernel = NBitsKernel(40, 128, bits, 64, DataType.BF16, DataType.BF16, rows=16, row_steps=steps)
    run(kernel, {**tensors, "src": src, "dst": dst})
    expected = (src.float() @ decoded(MatMulNBits(bits, 64), tensors, 128).t()).bfloat16()
    torch.testing.assert_close(dst, expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-12)


def product_of_bf16(src, tensors, bits, group, **more):
    (rows, depth), outputs = src.shape, tensors["scales"].shape[0]
    dst, steps = torch.full((rows, outputs + 1), GUARD), (("src", depth), ("dst", outputs + 1))
    kernel = NBitsKernel(
        *(outputs, depth, bits, group, DataType.BF16, DataType.F32, "zero_points" in tensors),
        rows=rows,
        row_steps=steps,
        **more,
    )
    run(kernel, {**tensors, "src": src, "dst": dst})
    assert (dst[:, outputs:] == GUARD).all()
    return kernel, dst[:, :outputs]


@NEEDS_BF16
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 16])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 384, 768])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
def test_integers_in_place_of_bf16_rows_lose_less_than_bf16(zero_points, bits, group, rows):
    tensors = codes_of(bits, 37, 768, group, zero_points=zero_points)
    src = torch.randn(rows, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    src[:, : min(group, 256)] = 0.0
    src[0, 300], src[-1, 301] = 1e20, 2.0**-130
    kernel, made = product_of_bf16(src, tensors, bits, group)
    matrix = decoded(MatMulNBits(bits, group), tensors, 768).double()
    # of the numbers that share a scale, half of the last place of the largest
    share = max(group, kernel.part)
    lost = src.double().abs().view(rows, -1, share).amax(-1) @ matrix.abs().view(37, -1, share).sum(-1).t() * 2.0**-15
    assert kernel.part and ((made - src.double() @ matrix.t()).abs() <= lost).all()


@NEEDS_BF16
@pytest.mark.parametrize("bits", [4, 8])
def test_special_values_reach_the_outputs_of_their_row(bits):
    tensors, src = codes_of(bits, 32, 256, 128, zero_points=False), torch.ones(2, 3, 256).bfloat16()
    src[0, 0, 5], src[1, 1, 200] = torch.nan, torch.inf
    for rows in src:
        _, made = product_of_bf16(rows, tensors, bits, 128)
        special = ~rows.isfinite().all(-1)
        assert torch.equal(made.isfinite().all(-1), ~special) and not made[special].isfinite().any()
        exact, made = product_of_bf16(rows, tensors, bits, 128, is_exact=True)
        expected = rows.float() @ decoded(MatMulNBits(bits, 128), tensors, 256).t()
        assert not exact.part
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=NEEDS_BF16)])
@pytest.mark.parametrize("group", [16, 64])
def test_a_matrix_is_decoded_exactly(group, dtype, bits, zero_points):
    if group < unit(isa()) and bits == 8:
        pytest.skip("a vector of 8-bit codes has one scale")
    tensors = codes_of(bits, 7, 192, group, zero_points=zero_points)
    kernel = DecodeKernel(7, 192, bits, group, DataType(dtype), zero_points)
    assert kernel.is_offered
    dst = torch.full((8, 192), GUARD, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    guard = dst[7].clone()
    run(kernel, {**tensors, "dst": dst})
    assert torch.equal(dst[:7], reference_decoded(DecodeNBits(bits, group, 192, dtype), tensors)[0])
    assert torch.equal(dst[7], guard)


@pytest.mark.skipif(isa() is not AVX512, reason="needs AVX-512")
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=NEEDS_BF16)])
def test_a_matrix_is_decoded_into_blocks(dtype, group, bits, zero_points):
    tensors = codes_of(bits, 128, 192, group, zero_points=zero_points)
    kernel = DecodeKernel(128, 192, bits, group, DataType(dtype), zero_points, is_blocked=True)
    assert kernel.is_offered and not replace(kernel, outputs=96).is_offered
    dst = torch.full((129, 192), GUARD, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    guard = dst[128].clone()
    run(kernel, {**tensors, "dst": dst})
    pairs = 2 if dtype == "bf16" else 1
    made = dst[:128].view(2, -1, 16, 64, pairs).permute(0, 3, 1, 2, 4).reshape(128, 192)
    assert torch.equal(made, reference_decoded(DecodeNBits(bits, group, 192, dtype), tensors)[0])
    assert torch.equal(dst[128], guard)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("dtype", "index"), [("f32", torch.int64), pytest.param("bf16", torch.int32, marks=NEEDS_BF16)]
)
def test_rows_are_decoded_by_their_indices(dtype, index, bits, zero_points):
    tensors, indices = codes_of(bits, 37, 192, 64, zero_points=zero_points), torch.tensor([36, 0, 7, 7], dtype=index)
    size = indices.element_size()
    kernel = GatherNBitsKernel(37, 192, bits, 64, DataType(dtype), zero_points, count=4, index_nbytes=size)
    assert kernel.is_offered and not replace(kernel, count=0).is_offered
    dst = torch.full((5, 192), GUARD, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    guard = dst[4].clone()
    run(kernel, {**tensors, "indices": indices, "dst": dst})
    attrs = GatherNBits(bits, 64, 192, dtype)
    assert torch.equal(dst[:4], reference_gathered(attrs, {**tensors, "indices": indices})[0])
    assert torch.equal(dst[4], guard)


@pytest.mark.parametrize("outside", [-1, 37])
def test_an_index_without_a_row_stops_before_anything_is_written(outside):
    tensors = codes_of(8, 37, 192, 64, zero_points=False)
    work = GatherNBitsKernel(37, 192, 8, 64, DataType.F32, count=3).work(2)
    dst, indices = torch.full((3, 192), GUARD), torch.tensor([1, outside, 3])
    for name, tensor in {**tensors, "indices": indices, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    assert statuses(work) == [1] and (dst == GUARD).all()


def test_kernels_are_offered_for_whole_groups_and_few_rows():
    few = {"rows": 1, "row_steps": ()}
    offered = [
        NBitsKernel(64, depth, 4, group, DataType.F32, DataType.F32, **{**few, **more}).is_offered
        for depth, group, more in (
            (256, 32, {}),
            (256, 16, {}),
            (256, 24, {}),
            (240, 32, {}),
            (256, 32, {"rows": most_rows(isa())}),
            (256, 32, {"rows": most_rows(isa()) + 1}),
        )
    ]
    assert offered == [True, True, False, False, True, False] and 32 % unit(isa()) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_encoded_numbers_are_the_nearest(bits):
    weights = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    weights[0, :64], weights[1, 3] = 0.0, 1e-42
    codes, scales = encoded(weights, bits, 64)
    again = decoded(MatMulNBits(bits, 64), {"weights": codes, "scales": scales}, 128)
    # of 4 bits, the numbers whose sign is not that of the largest end a step earlier
    step = scales.abs().repeat_interleave(64, 1)
    assert ((again - weights).abs() <= (0.5 if bits == 8 else 1.0) * step + 1e-12).all()
    assert (again[0, :64] == 0).all() and torch.isfinite(again).all()
    largest = weights.view(5, 2, 64).abs().amax(-1)
    torch.testing.assert_close(again.view(5, 2, 64).abs().amax(-1), largest)
