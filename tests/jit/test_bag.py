"""Embedding bags by machine code, against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fmtprop.jit import BagKernel, offered
from fmtprop.layout import DataType
from tests.jit.work import statuses as statuses_of


def statuses(dst, table, indices, offsets, factors=None, threads=2, **how):
    """Make the calls until one fails; return their statuses."""
    sizes = indices.numel(), offsets.numel(), *table.shape, table.stride(0) * table.element_size()
    dtype = DataType.from_any(str(table.dtype).removeprefix("torch."))
    kernel = BagKernel(*sizes, indices.element_size(), dtype, has_factors=factors is not None, **how)
    work = offered(kernel).work(threads)
    tensors = {"table": table, "indices": indices, "offsets": offsets, "factors": factors, "dst": dst}
    for name, tensor in tensors.items():
        if tensor is not None:
            work.point[name](tensor.data_ptr())
    return statuses_of(work)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "factors"])
@pytest.mark.parametrize("columns", [1, 5, 8, 17, 64, 300])
def test_bags_of_any_mode_and_width(isa, columns, mode, index):
    torch.manual_seed(0)
    table = torch.randn(20, columns + 3)[:, :columns]
    table[7], table[8, 0] = torch.inf, torch.nan
    indices, offsets = torch.randint(0, 20, (40,), dtype=index), torch.tensor([0, 0, 3, 3, 4, 11, 40], dtype=index)
    indices[3], indices[5] = 2, 8  # one bag has nothing but the index that is left out; NaN is its first in another
    factors = torch.rand(40) if mode == "factors" else None
    mode = "sum" if mode == "factors" else mode
    for padding in (-1, 2):
        dst = torch.full((7, columns), 5.0)
        assert statuses(dst, table, indices, offsets, factors, mode=mode, padding=padding, has_last=True) == [0, 0]
        how = {"mode": mode, "padding_idx": padding if padding >= 0 else None, "include_last_offset": True}
        wanted = F.embedding_bag(indices, table.contiguous(), offsets, per_sample_weights=factors, **how)
        torch.testing.assert_close(dst[:6], wanted, equal_nan=True, rtol=1e-6, atol=1e-6)
        assert (dst[6] == 5).all()


@pytest.mark.parametrize("columns", [3, 16, 40])
def test_bags_in_bf16_are_rounded_once(columns):
    table, indices, offsets = torch.randn(20, columns).bfloat16(), torch.randint(0, 20, (40,)), torch.arange(0, 40, 8)
    if not offered(BagKernel(40, 5, 20, columns, columns * 2, 8, DataType.BF16)):
        pytest.skip("this CPU has no kernels in bf16")
    dst = torch.empty(5, columns, dtype=torch.bfloat16)
    assert statuses(dst, table, indices, offsets, mode="mean") == [0, 0]
    wanted = F.embedding_bag(indices, table.float(), offsets, mode="mean")
    torch.testing.assert_close(dst, wanted.bfloat16())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_numbers_outside_stop_before_anything_is_written(index):
    table, dst = torch.randn(20, 8), torch.full((3, 8), 5.0)

    def of(indices, offsets, **how):
        return statuses(dst, table, torch.tensor(indices, dtype=index), torch.tensor(offsets, dtype=index), **how)

    for wrong in ([1, 2, -1, 3], [20, 1, 2, 3], [1, 2, 3, -(2**31)]):
        assert of(wrong, [0, 2, 2]) == [1]
    for wrong in ([1, 2, 3], [0, 3, 2], [0, 2, 5], [0, -1, 2]):
        assert of([1, 2, 3, 4], wrong) == [2]
    assert (dst == 5).all()
    assert of([1, 2, 3, 99], [0, 1, 1, 3], has_last=True) == [0, 0]  # the last one is in no bag


def test_no_bag_and_no_number_have_no_kernel():
    assert offered(BagKernel(4, 0, 5, 8, 32, 8)) is None
    assert offered(BagKernel(4, 1, 5, 8, 32, 8, has_last=True)) is None
    assert offered(BagKernel(4, 2, 5, 0, 32, 8)) is None


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_a_large_table_are_fetched_ahead(isa, index):
    table, indices = torch.randn(3000, 100), torch.randint(0, 3000, (90,), dtype=index)
    for offsets in (torch.arange(0, 90, 30, dtype=index), torch.arange(90, dtype=index)):
        dst = torch.empty(len(offsets), 100)
        assert statuses(dst, table, indices, offsets) == [0, 0]
        torch.testing.assert_close(dst, F.embedding_bag(indices, table, offsets, mode="sum"), rtol=1e-6, atol=1e-6)
