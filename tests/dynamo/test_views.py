"""Results that are views: they share memory, with the strides and the offsets that PyTorch gives them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import combinations

import pytest
import torch
from torch import nn

from fmtprop.dynamo.backend import options_of, regions_by

pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture
def always_trained(monkeypatch) -> None:
    monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", lambda *sides: (True, (1.0, 2.0)))


LINEAR = nn.Linear(5, 5).requires_grad_(False)


def part_of_an_input(x):
    return x.chunk(2, 0)[1], LINEAR(x)


def part_that_is_read(x):
    part = x[1:]
    return part, LINEAR(part)


def input_in_another_shape(x):
    return x, x.view(-1), x.t()[::2], LINEAR(x)


def parts_of_a_result(x):
    y = LINEAR(x)
    return y[1:], y.t(), y


def parts_of_a_hidden_result(x):
    y = LINEAR(x).relu()
    return y[1:], y[:, ::2]


def part_of_one_result(x):
    return LINEAR(x)[:, 1:4], LINEAR(x + 1)


def split(x):
    return (*LINEAR(x).split(x.shape[0] // 2), x * 2)


def changed_input(x):
    return x.add_(1)[1:], LINEAR(x)


def copies_of_an_input(x):
    return x.clone(), x.clone(), x.t().contiguous(), x.contiguous(), LINEAR(x)


def copies_of_a_weight(x):
    return LINEAR.weight.clone(), LINEAR.weight.clone(), LINEAR(x)


def copies_of_a_result(x):
    y = LINEAR(x)
    return y.clone(), y, y.clone(), y.relu().clone()


def copy_of_a_changed_input(x):
    old = x.clone()
    return old, LINEAR(x.mul_(2)), x.t().clone()


def shared(tensors) -> list[bool]:
    return [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in combinations(tensors, 2)]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        *(part_of_an_input, part_that_is_read, input_in_another_shape, parts_of_a_result),
        *(parts_of_a_hidden_result, part_of_one_result, split, changed_input, copies_of_an_input),
        *(copies_of_a_weight, copies_of_a_result, copy_of_a_changed_input),
    ],
)
def test_views_are_those_of_pytorch(function: Callable, dynamic: bool):
    regions: list = []
    how = {"tune": "model", "confirm": False}
    run = torch.compile(function, backend=regions_by(options_of(None, how), regions.append), dynamic=dynamic)
    with torch.no_grad():
        for rows in (4, 6):
            x = torch.randn(rows, 5)
            other = x.clone()
            got, expected = run(x), function(other)
            torch.testing.assert_close(got, expected)
            layouts = [[(one.stride(), one.storage_offset()) for one in results] for results in (got, expected)]
            assert layouts[0] == layouts[1]
            assert shared([x, *got]) == shared([other, *expected])
            got[0].add_(1), expected[0].add_(1)
            torch.testing.assert_close((x, *got), (other, *expected))
    assert any(outcome.net is not None for one in regions for outcome in one.outcomes)


@pytest.mark.parametrize(
    "function",
    [
        *(copies_of_an_input, copies_of_a_weight, copies_of_a_result, parts_of_a_result),
        *(parts_of_a_hidden_result, part_of_one_result, split),
    ],
)
@pytest.mark.usefixtures("always_trained")
def test_views_and_copies_in_training_are_those_of_pytorch(function: Callable):
    run = torch.compile(function, backend="fmtprop", options={"tune": "model", "confirm": False})
    for x in (torch.randn(4, 5), torch.randn(5, 4).t(), torch.randn(4, 5)):
        x.requires_grad_()
        got, expected = run(x), function(x)
        torch.testing.assert_close(got, expected)
        layouts = [[(one.stride(), one.storage_offset()) for one in results] for results in (got, expected)]
        assert layouts[0] == layouts[1]
        assert shared([x, *got]) == shared([x, *expected])
        gradients = [torch.autograd.grad(sum(one.sin().sum() for one in r), x)[0] for r in (got, expected)]
        torch.testing.assert_close(*gradients)


def test_types_follow_the_default_type():
    def function(x):
        return x / 2, LINEAR(x.float())

    found = []
    for dtype in (torch.float32, torch.float64):
        torch._dynamo.reset()
        torch.set_default_dtype(dtype)
        try:
            found.append(torch.compile(function, backend="fmtprop")(torch.arange(5))[0].dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]
