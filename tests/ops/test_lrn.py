from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import Lrn
from fmtprop.ops.lrn import LRN


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("dims", [(2, 7, 9), (2, 7, 4, 5), (1, 7, 3, 4, 2)])
def test_across_channels_is_torchs(size, dims):
    x = torch.randn(dims)
    (got,) = LRN.reference(Lrn("across_channels", size, 0.5, 0.75, 2.0), {"src": x})
    torch.testing.assert_close(got, F.local_response_norm(x, size, 0.5, 0.75, 2.0))


def test_within_channel_averages_a_square_of_zero_padded_neighbours():
    x = torch.randn(2, 3, 5, 6)
    mean = F.avg_pool2d(x * x, 3, 1, 1, count_include_pad=True)
    (got,) = LRN.reference(Lrn("within_channel", 3, 0.5, 0.75, 2.0), {"src": x})
    torch.testing.assert_close(got, x / (2.0 + 0.5 * mean) ** 0.75)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lrn("between"), "lrn has no algorithm 'between'; it has across_channels, within_channel"),
        (lambda: Lrn(size=4), "lrn size is 4, but must be odd and at least 1"),
    ],
)
def test_attributes_out_of_range_are_named(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


def test_src_of_another_rank_is_named():
    assert LRN.infer(Lrn(), {"src": TensorType((2, 3, 4))}) == (TensorType((2, 3, 4)),)
    with pytest.raises(ShapeError, match=r"src has 2 axes but lrn takes 3 to 5: \[N, C, …\]"):
        LRN.infer(Lrn(), {"src": TensorType((2, 3))})
