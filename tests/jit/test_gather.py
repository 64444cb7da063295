"""Rows of a table by their indices, copied by machine code."""

from __future__ import annotations

import pytest
import torch

from fmtprop.jit import GatherKernel, offered
from tests.jit.work import statuses


def work_of(table, indices, dst, threads=2, from_end=False):
    item = table.element_size()
    sizes = (indices.numel(), table.shape[0], table.shape[1] * item, table.stride(0) * item, indices.element_size())
    work = offered(GatherKernel(*sizes, from_end)).work(threads)
    for name, tensor in {"src_0": table, "src_1": indices, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    return work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 64, 770])
def test_rows_of_any_type_and_width(dtype, index, width):
    table = (torch.randn(50, width + 5) * 9).to(dtype)[:, :width]
    indices = torch.tensor([0, 49, 7, 7, 31], dtype=index)
    dst = torch.full((6, width), 5, dtype=dtype)
    assert statuses(work_of(table, indices, dst)) == [0, 0]
    assert torch.equal(dst[:5], table[indices.long()]) and (dst[5] == 5).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_an_index_from_the_end(index):
    table, indices, dst = torch.randn(50, 3), torch.tensor([-1, 0, -50, 49, -7], dtype=index), torch.empty(5, 3)
    assert statuses(work_of(table, indices, dst, from_end=True)) == [0, 0]
    assert torch.equal(dst, table[indices.long()])
    for outside in (50, -51, 2**31 - 1, -(2**31)):
        indices[3] = outside
        assert statuses(work_of(table, indices, dst.fill_(5.0), from_end=True)) == [1] and (dst == 5).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("outside", [-1, 50, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 2])
def test_an_index_outside_stops_before_anything_is_written(index, outside, place):
    indices = torch.tensor([1, 2, 3], dtype=index)
    indices[place] = outside
    dst = torch.full((3, 8), 5.0)
    assert statuses(work_of(torch.randn(50, 8), indices, dst)) == [1] and (dst == 5).all()


def test_no_index_and_no_number_have_no_kernel():
    assert offered(GatherKernel(0, 5, 8, 8, 8)) is None
    assert offered(GatherKernel(1, 5, 0, 8, 8)) is None
