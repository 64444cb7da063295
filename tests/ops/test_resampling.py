from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import Resampling
from fmtprop.ops.resampling import RESAMPLING
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 3, 6, 4))


def declined(*args, **kwargs):
    call = FakeCall(*args, **kwargs)
    answer = call.run()
    assert answer is not None or call.ops() == []
    return answer is None


# ---------------------------------------------------------------- shapes and reference


def test_dst_has_the_given_size():
    assert RESAMPLING.infer(Resampling("linear", (9, 8)), {"src": X}) == (TensorType((2, 3, 9, 8)),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Resampling("cubic", (2, 2)), "resampling has no algorithm 'cubic'; it has nearest, linear"),
        (lambda: Resampling("nearest", (2, 0)), "resampling size[1] is 0, but must be at least 1"),
        (lambda: Resampling("nearest", ()), "resampling has 1 to 3 spatial axes, but size=() has 0"),
    ],
)
def test_attributes_out_of_range_are_named(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


def test_a_src_of_another_rank_is_named():
    with pytest.raises(ShapeError, match="src has 4 axes but 1 spatial axes need 3"):
        RESAMPLING.infer(Resampling("linear", (9,)), {"src": X})


@pytest.mark.parametrize("size", [(6, 4), (12, 8), (9, 5), (3, 2), (2, 9)])
def test_nearest_is_torchs_exact_one(size):
    x = torch.randn(X.dims)
    (got,) = RESAMPLING.reference(Resampling("nearest", size), {"src": x})
    torch.testing.assert_close(got, F.interpolate(x, size, mode="nearest-exact"))


# ---------------------------------------------------------------- importers


@pytest.mark.parametrize("factor", [2.0, 3.0, 8.0])
def test_nearest_by_whole_factors_is_the_same_in_both(factor):
    call = check_import("aten.upsample_nearest2d.vec", X, None, [factor, factor])
    assert call.ops() == ["resampling"]


@pytest.mark.parametrize("target", ["aten.upsample_nearest2d.vec", "aten._upsample_nearest_exact2d.vec"])
def test_the_size_that_it_has_already_is_no_resampling(target):
    assert check_import(target, X, [6, 4], None).ops() == []


def test_nearest_in_its_other_forms():
    check_import("aten.upsample_nearest2d.default", X, [12, 8])
    check_import("aten.upsample_nearest2d.default", X, [12, 8], 2.0, 2.0)
    check_import("aten.upsample_nearest2d.vec", X, [12, 4], None)
    check_import("aten.upsample_nearest1d.vec", TensorType((2, 3, 5)), None, [4.0])
    check_import("aten.upsample_nearest3d.vec", TensorType((1, 3, 2, 3, 4)), None, [2.0, 2.0, 3.0])


@pytest.mark.parametrize("size", [(3, 2), (9, 4), (7, 5), (2, 4)])
def test_nearest_is_taken_where_both_read_the_same_pixels_only(size):
    ramp = torch.arange(24.0).reshape(1, 1, 6, 4)
    same = torch.equal(F.interpolate(ramp, size), F.interpolate(ramp, size, mode="nearest-exact"))
    assert declined("aten.upsample_nearest2d.vec", X, list(size), None) == (not same)


@pytest.mark.parametrize("size", [[3, 2], [9, 5], [12, 8]])
def test_exact_nearest_is_always_taken(size):
    assert check_import("aten._upsample_nearest_exact2d.vec", X, size, None).ops() == ["resampling"]


@pytest.mark.parametrize("size", [[3, 2], [9, 5], [12, 8], [6, 5], [1, 1]])
def test_linear_between_pixel_centres(size):
    check_import("aten.upsample_bilinear2d.vec", X, size, False, None)
    check_import("aten.upsample_bilinear2d.default", X, size, False)


def test_linear_in_one_and_three_dimensions():
    check_import("aten.upsample_linear1d.vec", TensorType((2, 3, 5)), None, False, [2.0])
    check_import("aten.upsample_trilinear3d.vec", TensorType((1, 3, 2, 3, 4)), [4, 5, 8], False, None)


def test_linear_between_corners_is_declined():
    assert declined("aten.upsample_bilinear2d.vec", X, [12, 8], True, None)


def test_a_factor_that_is_not_the_ratio_of_sizes_is_declined():
    # 6 * 1.3 = 7.8 becomes 7, but PyTorch steps by 1 / 1.3
    assert declined("aten.upsample_bilinear2d.vec", X, None, False, [1.3, 2.0])


def test_other_data_types_are_declined():
    assert declined("aten.upsample_nearest2d.vec", X.with_dtype("u8"), None, [2.0, 2.0])
