"""Torch tensors in memory of a plan."""

import pytest
import torch

from fmtprop.layout import MemoryDesc
from fmtprop.targets.memory import view


@pytest.mark.parametrize(
    "desc",
    [
        MemoryDesc((2, 3, 4), "f32"),
        MemoryDesc((2, 3, 4), "f32", tag="acb"),
        MemoryDesc((2, 3, 4), "bf16").submemory((2, 1, 3), (0, 1, 1)),
        MemoryDesc((), "s64"),
    ],
    ids=str,
)
def test_a_view_has_a_storage_of_its_own_bytes(desc):
    """Some of PyTorch's operators copy the storage of an operand, which must not be the whole arena."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    found = view(memory, desc, start=64)
    assert tuple(found.shape) == desc.dims
    reached = 1 + sum((size - 1) * stride for size, stride in zip(desc.dims, desc.strides, strict=True))
    assert found.untyped_storage().nbytes() == reached * desc.dtype.nbytes
    found.fill_(1)
    first = int(memory.nonzero()[0])
    assert 0 <= first - 64 - desc.offset0 * desc.dtype.nbytes < desc.dtype.nbytes


def test_no_elements_need_no_memory():
    assert view(torch.zeros(0, dtype=torch.uint8), MemoryDesc((2, 0), "f32")).shape == (2, 0)
