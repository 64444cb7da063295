from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fmtprop.errors import ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops import Pooling
from fmtprop.ops.pooling import ALGORITHMS, POOLING, uniform_windows
from tests.ops.fake_call import FakeCall, check_import

IMAGES = {1: TensorType((2, 3, 11)), 2: TensorType((2, 3, 10, 9)), 3: TensorType((1, 3, 7, 6, 8))}


# ---------------------------------------------------------------- shapes


def test_dst_has_the_window_positions():
    src = {"src": TensorType((1, 64, 112, 112))}
    assert POOLING.infer(Pooling.make("max", (3, 3), 2, pad_l=1), src)[0].dims == (1, 64, 56, 56)
    assert POOLING.infer(Pooling.make("max", (3, 3), 2, pad_l=0, pad_r=1), src)[0].dims == (1, 64, 56, 56)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pooling.make("median", (2, 2)), "pooling has no algorithm 'median'; it has max, avg_include_padding"),
        (lambda: Pooling.make("max", (0, 2)), "pooling kernel[0] is 0, but must be at least 1"),
        (lambda: Pooling.make("max", (2,), pad_l=2), "padding 2 on spatial axis 0 must be smaller than the window, 2"),
        (lambda: Pooling.make("max", (2,), -1), "pooling strides[0] is -1, but must be at least 1"),
    ],
)
def test_attributes_out_of_range_are_named(make, message):
    with pytest.raises(ShapeError) as error:
        make()
    assert message in str(error.value)


def test_sources_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match=r"src has 3 axes but 2 spatial axes need 4"):
        POOLING.infer(Pooling.make("max", (2, 2)), {"src": TensorType((3, 8, 8))})
    with pytest.raises(ShapeError, match=r"src axis 3 has 2 elements and padding 0\+0, but the window covers 3"):
        POOLING.infer(Pooling.make("max", (3, 3)), {"src": TensorType((1, 3, 8, 2))})


# ---------------------------------------------------------------- reference


def test_the_two_averages_differ_at_the_border_only():
    x = torch.rand(1, 2, 6, 6)
    for alg, counted in (("avg_include_padding", True), ("avg_exclude_padding", False)):
        (got,) = POOLING.reference(Pooling.make(alg, (3, 3), 2, pad_l=1), {"src": x})
        torch.testing.assert_close(got, F.avg_pool2d(x, 3, 2, 1, count_include_pad=counted))


@pytest.mark.parametrize("left", [0, 99_999])
def test_a_window_far_larger_than_the_source_takes_no_memory(left):
    x, window = torch.randn(2, 3, 5, 9).double(), 100_000
    attrs = [Pooling(alg, (window, 2), (1, 3), (0, 0), (left, 0), (window - 5, 0)) for alg in ALGORITHMS]
    if left:
        attrs = [replace(one, strides=(2 * window, 3)) for one in attrs]
        x = x[:, :, :1]
    seen = x.unfold(3, 2, 3)
    expected = {"max": seen.amax((2, 4)), "avg_exclude_padding": seen.mean((2, 4))}
    expected["avg_include_padding"] = seen.sum((2, 4)) / (2 * window)
    for one in attrs:
        (got,) = POOLING.reference(one, {"src": x})
        torch.testing.assert_close(got, expected[one.alg][:, :, None])


def test_the_maximum_of_integers():
    x = torch.randint(-9, 0, (1, 2, 6, 6))
    (got,) = POOLING.reference(Pooling.make("max", (3, 3), 2, pad_l=1), {"src": x})
    assert torch.equal(got, F.max_pool2d(x.double(), 3, 2, 1).long())


# ---------------------------------------------------------------- importers


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    "settings", [([3], [2], [1], [1]), ([2], [2], [0], [1]), ([3], [2], [1], [2]), ([2], [3], [1], [1])]
)
def test_maximum(spatial, ceil, settings):
    kernel, stride, padding, dilation = (value * spatial for value in settings)
    for target in (f"aten.max_pool{spatial}d.default", f"aten.max_pool{spatial}d_with_indices.default"):
        if target == "aten.max_pool1d_with_indices.default":
            continue  # no CPU kernel answers for fake tensors
        call = check_import(target, IMAGES[spatial], kernel, stride, padding, dilation, ceil)
        assert call.ops() == ["pooling"]


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_average(spatial, ceil, counted, padding):
    # 3 by 2 leaves a remainder of the even axes only: ceil_mode adds positions
    args = (IMAGES[spatial], [3] * spatial, [2] * spatial, [padding] * spatial, ceil, counted)
    call = FakeCall(f"aten.avg_pool{spatial}d.default", *args)
    if call.run() is None:
        assert ceil and counted and padding and spatial > 1
        assert call.ops() == []
    else:
        check_import(f"aten.avg_pool{spatial}d.default", *args)


def test_ceil_mode_that_adds_to_counted_padding_is_declined():
    call = FakeCall("aten.avg_pool2d.default", TensorType((1, 2, 6, 6)), [3, 3], [2, 2], [1, 1], True, True)
    assert call.run() is None
    assert call.ops() == []


def test_ceil_mode_never_starts_a_window_in_the_right_padding():
    call = check_import("aten.max_pool2d.default", TensorType((1, 2, 5, 5)), [2, 2], [2, 2], [1, 1], [1, 1], True)
    assert call.graph.nodes()[-1].results[0].dims == (1, 2, 3, 3)


def test_the_default_stride_is_the_kernel():
    call = check_import("aten.max_pool2d.default", IMAGES[2], [2, 3])
    assert call.graph.nodes()[-1].attrs.strides == (2, 3)


def test_windows_of_one_element_are_no_pooling():
    assert check_import("aten.adaptive_avg_pool2d.default", IMAGES[2], [10, 9]).ops() == []
    assert check_import("aten.adaptive_max_pool1d.default", IMAGES[1], [11]).ops() == []
    assert check_import("aten.max_pool2d.default", IMAGES[2], [1, 1]).ops() == []
    assert check_import("aten.max_pool2d.default", IMAGES[2], [1, 1], [2, 2]).ops() == ["pooling"]


def test_a_missing_batch_axis():
    call = check_import("aten.max_pool2d.default", TensorType((3, 8, 8)), [2, 2])
    assert call.ops() == ["reshape", "pooling", "reshape"]


def test_a_divisor_of_the_users_is_declined():
    call = FakeCall("aten.avg_pool2d.default", IMAGES[2], [2, 2], divisor_override=3)
    assert call.run() is None
    assert call.ops() == []


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize(("spatial", "size"), [(1, [1]), (2, [5, 3]), (2, [1, 1]), (3, [1, 2, 4]), (2, [1, 4])])
def test_adaptive_pooling_with_equal_windows(kind, spatial, size):
    assert check_import(f"aten.adaptive_{kind}_pool{spatial}d.default", IMAGES[spatial], size).ops() == ["pooling"]


@pytest.mark.parametrize("size", [[4, 9], [20, 9]])
def test_adaptive_pooling_with_unequal_windows_is_declined(size):
    call = FakeCall("aten.adaptive_avg_pool2d.default", IMAGES[2], size)
    assert call.run() is None
    assert call.ops() == []


def test_uniform_windows_are_those_of_torch():
    for size in range(1, 30):
        for count in range(1, 30):
            ramp = torch.arange(float(size)).reshape(1, 1, size)
            wanted = F.adaptive_avg_pool1d(ramp, count)
            window = uniform_windows(size, count)
            if window is not None:
                torch.testing.assert_close(F.avg_pool1d(ramp, *window), wanted)
            elif count <= size:
                assert size % count, f"{size} to {count} is uniform"


# ---------------------------------------------------------------- mean


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("src", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_the_mean_over_all_spatial_axes_is_a_pooling(src, keep):
    call = check_import("aten.mean.dim", TensorType(src), list(range(-1, 1 - len(src), -1)), keep)
    assert call.ops() == (["pooling"] if keep else ["pooling", "reshape"])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("src", "axes"), [((2, 3, 4, 5), [1]), ((2, 3, 4), [-1]), ((2, 3, 4, 5), [1, 2, 3]), ((3, 4), [])]
)
def test_other_means_are_reductions(src, axes, keep):
    call = check_import("aten.mean.dim", TensorType(src), axes, keep)
    assert call.ops() == (["reduction"] if keep else ["reduction", "reshape"])


def test_a_mean_in_another_data_type_is_declined():
    call = FakeCall("aten.mean.dim", TensorType((2, 3, 4, 5)), [2, 3], dtype=torch.float64)
    assert call.run() is None


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("spatial", [2, 3])
@pytest.mark.parametrize("is_last", [False, True])
def test_pytorchs_operator_is_right_in_the_memory_that_it_is_given(alg, spatial, is_last):
    attrs = Pooling(
        alg,
        (3, 1, 2)[-spatial:],
        (2, 3, 1)[-spatial:],
        (0,) * spatial,
        pad_l=(1, 0, 1)[-spatial:],
        pad_r=(1, 0, 1)[-spatial:],
    )
    src = torch.randn(4, 16, 4, 7, 5)[(slice(None),) * 2 + (0,) * (3 - spatial)]
    (expected,) = POOLING.reference(attrs, {"src": src})
    memory_format = (torch.channels_last, torch.channels_last_3d)[spatial - 2] if is_last else torch.contiguous_format
    memory = torch.empty_like(expected).contiguous(memory_format=memory_format)
    call = POOLING.pytorch.operator(attrs, {"src": src}, [memory.detach()])  # whoever changes strides changes its own
    if call is not None:
        call()
        torch.testing.assert_close(memory, expected)
    assert (call is None) == (spatial == 3 and is_last and alg != "max")
