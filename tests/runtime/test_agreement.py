"""How far an answer is from the right one: numbers, whole numbers, NaN and infinity."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from fmtprop.ir.node import PostOp
from fmtprop.ir.types import TensorType
from fmtprop.ops import Binary, Eltwise
from fmtprop.runtime.agreement import (
    ShownRounding,
    error_of_numbers,
    error_of_output,
    error_of_rounded,
    relative_error,
    rounding_of,
)
from tests.targets.nodes import node_of

CASES = [
    # got, expected, both errors: strict, and of the numbers alone
    ([1.0, 2.5], [1.0, 2.0], 0.25, 0.25),
    ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
    ([0.0, 1e-3], [0.0, 0.0], 1e-3, 1e-3),  # nothing to be relative to
    ([1.0, 5.0, 2.0], [1.0, nan, 2.0], inf, 0.0),
    ([1.0, 0.0, 2.5], [1.0, nan, 2.0], inf, 0.25),
    ([nan, 5.0, 2.0], [1.0, nan, 2.0], inf, inf),
    ([nan, 2.0], [1.0, 2.0], inf, inf),
    ([inf, 2.0], [1.0, 2.0], inf, inf),
    ([1.0, nan], [1.0, nan], 0.0, 0.0),
    ([1.0, inf], [1.0, inf], 0.0, 0.0),
    ([1.0, -inf], [1.0, inf], inf, 0.0),
    ([1.0, 3.4028234e38], [1.0, inf], inf, 0.0),
    ([0.0], [nan], inf, 0.0),
    ([nan], [nan], 0.0, 0.0),
    ([], [], 0.0, 0.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("got", "expected", "strict", "of_numbers"), CASES)
def test_errors(got, expected, strict, of_numbers, dtype):
    pair = torch.tensor(got, dtype=dtype), torch.tensor(expected, dtype=dtype)
    assert relative_error(*pair) == pytest.approx(strict)
    assert error_of_numbers(*pair) == pytest.approx(of_numbers)


@pytest.mark.parametrize("error", [relative_error, error_of_numbers])
def test_whole_numbers_and_truth_values_agree_or_do_not(error):
    assert error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert error(torch.tensor([1, 3]), torch.tensor([1, 2])) == inf
    assert error(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])) == 0.0
    assert error(torch.tensor([True]), torch.tensor([False])) == inf


def test_few_labels_of_a_bf16_model_may_differ_and_images_by_steps():
    labels, image = torch.arange(100), torch.arange(200, 250, dtype=torch.uint8)
    assert error_of_output(torch.where(labels == 7, 90, labels), labels, "bf16") == 0.01
    assert error_of_output(image + 1, image, "bf16") == pytest.approx(1 / 249)
    assert error_of_output(image + 1, image, "f32") == inf
    assert error_of_output(labels[:5], labels, "bf16") == inf
    assert error_of_output(torch.tensor([True]), torch.tensor([False]), "bf16") == 1.0


@pytest.mark.parametrize("error", [relative_error, error_of_numbers])
def test_other_shapes_never_agree(error):
    assert error(torch.zeros(2, 1), torch.zeros(1, 2)) == inf
    assert error(torch.zeros(0), torch.zeros(1)) == inf


def test_differences_are_told_in_a_type_that_has_the_digits():
    one, next_one = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)
    assert relative_error(next_one, one) == 2**-7
    assert relative_error(one, torch.tensor([1.0 + 1e-12], dtype=torch.float64)) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("error", [relative_error, error_of_numbers])
@pytest.mark.parametrize("place", [(0, 0), (2047, 1023), (999, 5)])
def test_one_wrong_number_among_many_is_seen(error, place):
    expected = torch.ones(2048, 1024)
    got = expected.clone()
    assert error(got, expected) == 0.0
    got[place] = 1.5
    assert error(got, expected) == 0.5
    got[place] = nan
    assert error(got, expected) == inf


def test_gradients_do_not_matter():
    assert relative_error(torch.ones(2, requires_grad=True), torch.ones(2)) == 0.0


def test_no_error_has_no_sign():
    assert (
        str(error_of_numbers(torch.zeros(3), torch.zeros(3))) == str(error_of_numbers(*[torch.ones(2, 3)] * 2)) == "0.0"
    )


@pytest.mark.parametrize("step", [1.0, 0.03])
def test_numbers_may_be_rounded_to_the_neighbour_and_no_farther(step):
    small, large = torch.arange(2000.0) % 100, 10_000.0 + torch.arange(2000.0)
    one, few = torch.zeros(2000), torch.zeros(2000)
    one[7], few[:40] = 1.0, 1.0

    def error(got, expected):
        return error_of_rounded(got * step, expected * step, ShownRounding(step))

    assert error(small + one, small) == error(large + few, large) == 0.0
    assert error(small + few, small) == pytest.approx(1 / 99, rel=1e-4)
    assert error(large + 2 * one, large) == pytest.approx(2 / 11_999, rel=1e-2)
    assert error(small + 0.3 * one, small) == pytest.approx(0.3 / 99, rel=1e-4)
    assert error(small[1:], small) == torch.inf


def rounding(*tails):
    types = {"src": TensorType((2,), "f32")}
    forms = (("binary", Binary("add")) if one == ("add",) else ("eltwise", Eltwise(*one)) for one in tails)
    return rounding_of(node_of("eltwise", Eltwise("relu"), types, [PostOp(op, attrs) for op, attrs in forms]))


def test_a_step_is_known_where_only_a_range_and_a_factor_follow():
    assert rounding(("round",)) == rounding(("round",), ("add",)) == ShownRounding(1.0)
    found = rounding(("linear", 33.3), ("round",), ("clip", -100.0, 155.0), ("linear", 0.03))
    assert found == pytest.approx(ShownRounding(0.03)) and rounding(("relu",)) is None
    assert rounding(("round",), ("linear", 4.0), ("round",)) == ShownRounding(1.0, 5)


def test_a_function_behind_a_rounding_may_differ_by_what_it_makes_of_a_step():
    found = rounding(("round",), ("linear", 0.25), ("gelu_erf",))
    assert 0.25 < found.step < 0.3 and not found.is_grid
    expected = torch.nn.functional.gelu((torch.arange(2000.0) % 100 - 50) / 4)
    one, few = torch.zeros(2000), torch.zeros(2000)
    one[7], few[:40] = found.step, found.step
    assert error_of_rounded(expected + 0.6 * one, expected, found) == 0.0
    assert error_of_rounded(expected + 1.1 * one, expected, found) > 0.01, "more than a step"
    assert error_of_rounded(expected + 0.6 * few, expected, found) > 0.01, "in too many places"
    assert error_of_rounded(expected + nan * one, expected, found) == inf
