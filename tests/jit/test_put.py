"""Rows that machine code puts into a tensor at their indices."""

from __future__ import annotations

import pytest
import torch

from fmtprop.jit import PutKernel, offered
from tests.jit.work import statuses


def work_of(whole, index, rows, dst, threads=2):
    """Return the work for an axis of size 9 behind those of the batch."""
    axis, item = whole.shape.index(9), whole.element_size()
    batch = tuple((n, step * item) for n, step in zip(whole.shape[:axis], rows.stride(), strict=False))
    sizes = (len(index), 9, whole[(0,) * axis][0].numel() * item, batch, rows.stride(axis) * item)
    work = offered(PutKernel(*sizes, index.element_size())).work(threads)
    for name, tensor in {"src_0": whole, "src_1": index, "src_2": rows, "dst": dst}.items():
        work.point[name](tensor.data_ptr())
    return work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(9, 3), (2, 9, 5), (2, 3, 9, 16), (2, 3, 9)])
@pytest.mark.parametrize("in_place", [True, False])
def test_rows_are_put_at_their_places(dtype, index, shape, in_place):
    axis = shape.index(9)
    whole, places = (torch.randn(shape) * 9).to(dtype), torch.tensor([8, 0, 5], dtype=index)
    rows = (torch.randn(*shape[:axis], 3, *shape[axis + 1 :]) * 9).to(dtype)
    if axis == 2:  # tokens in front of heads
        rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
    expected = whole.index_copy(axis, places.long(), rows)
    dst = whole if in_place else torch.empty_like(whole)
    assert statuses(work_of(whole, places, rows, dst)) == [0, 0]
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("outside", [-1, 9, 2**31 - 1, -(2**31)])
def test_an_index_outside_stops_before_anything_is_written(index, outside):
    whole, places = torch.zeros(2, 9, 4), torch.tensor([1, outside], dtype=index)
    assert statuses(work_of(whole, places, torch.ones(2, 2, 4), whole)) == [1]
    assert not whole.any()


def test_no_index_and_no_number_have_no_kernel():
    assert offered(PutKernel(0, 9, 8, (), 8, 8)) is None
    assert offered(PutKernel(1, 9, 0, (), 8, 8)) is None
