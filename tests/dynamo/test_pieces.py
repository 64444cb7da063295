"""Graphs in pieces: caches that grow or are written in place, random numbers, and plans between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by

pytestmark = pytest.mark.usefixtures("always")

OPTIONS = {"tune": "model", "confirm": False}


def compiled(model: Callable, **how) -> tuple[Callable, list]:
    regions: list = []
    return torch.compile(model, backend=regions_by(options_of(None, OPTIONS), regions.append), **how), regions


def plans(regions: list) -> int:
    return sum(outcome.net is not None for one in regions for outcome in one.outcomes)


class Step(nn.Module):
    """A decoder's step: one token attends to a cache of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.cat([cache, self.key(x)])
        return self.out(torch.softmax(x @ cache.t(), -1) @ cache), cache


def test_a_cache_that_grows_needs_no_plan_for_each_length():
    model = Step()
    run, regions = compiled(model, dynamic=True)
    cache = other = torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(1, 16)
            got, cache = run(x, cache)
            expected, other = model(x, other)
            torch.testing.assert_close(got, expected)
    assert plans(regions) == 2  # before and behind the cache


def write_row(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache.index_copy_(0, place, row)


def write_window(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache[2:3] = row


def write_item(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache[2] = row[0]


def write_all(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache.copy_(row.expand(5, 16))


def write_where_it_was_read(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache.add_(row * cache.sum())


def write_other_type(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> None:
    cache.copy_(cache.double() + row)


@pytest.mark.parametrize(
    "write", [write_row, write_window, write_item, write_all, write_where_it_was_read, write_other_type]
)
def test_a_cache_is_written_in_place(write):
    linear = nn.Linear(16, 16)

    def step(x, cache, place):
        write(cache, linear(x), place)
        return torch.softmax(x @ cache.t(), -1) @ cache

    run, _ = compiled(step)
    cache = torch.randn(5, 16)
    other = cache.clone()
    with torch.no_grad():
        for place in range(3):
            x, index = torch.randn(1, 16), torch.tensor([place])
            torch.testing.assert_close(run(x, cache, index), step(x, other, index), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(cache, other, rtol=1e-3, atol=1e-3)


def test_one_row_is_written_not_the_whole_cache():
    linear = nn.Linear(16, 16)

    def step(x, cache, place):
        cache.index_copy_(0, place, linear(x))
        return x @ cache.t()

    run, regions = compiled(step)
    with torch.no_grad():
        run(torch.randn(1, 16), torch.randn(5, 16), torch.tensor([1]))
    calls = [str(node.target) for one in regions for node in one.module.graph.nodes if node.op == "call_function"]
    assert "aten.index_copy_.default" in calls
    assert "aten.copy_.default" not in calls
    assert "aten.index_copy.default" not in calls


def test_pieces_that_are_not_faster_run_as_they_were_captured(monkeypatch):
    monkeypatch.setattr(region, "compare", lambda ours, theirs: (False, (2.0, 1.0)))
    linear = nn.Linear(16, 16)

    def step(x, cache):
        cache.add_(1)
        return F.dropout(linear(x), 0.5) @ cache.t()

    run, regions = compiled(step)
    cache, other = torch.zeros(5, 16), torch.zeros(5, 16)
    with torch.no_grad():
        for call in range(3):
            if call:
                monkeypatch.setattr(region.InPyTorch, "__call__", lambda self, args: pytest.fail("a piece was run"))
            results = []
            for function, written in ((run, cache), (step, other)):
                torch.manual_seed(call)
                results.append(function(torch.ones(1, 16), written))
            assert torch.equal(*results)
            assert torch.equal(cache, other)
    assert len(regions) > 1


def test_random_numbers_are_drawn_by_pytorch_in_their_order():
    linear = nn.Linear(16, 16)

    def noisy(x):
        first = torch.rand_like(x)
        y = F.relu(linear(x)) @ x.t()
        return y + torch.rand_like(y), first, torch.rand(3)

    run, regions = compiled(noisy)
    results = []
    for call in (run, noisy):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(call(torch.ones(4, 16)))
    torch.testing.assert_close(*results)
    assert plans(regions) > 0


def test_rare_shapes_run_in_pytorch():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run, regions = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (*range(2, 12), 11, 11):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x))
    assert plans(regions) == region._FIRST_SHAPES + 1  # the last was met three times
    assert "5 shapes were met less than 3 times" in regions[0].outcomes[-1].reason


def test_a_graph_that_only_writes_gets_sizes_that_no_call_reads():
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(0.5)

    run, _ = compiled(step, dynamic=True)
    for size in (3, 5):
        x = torch.zeros(size, 2)
        with torch.no_grad():
            run(x)
        assert x.eq(0.5).all()


def test_statistics_of_another_type_than_promised_pass_their_check():
    x = torch.randn(2, 17, 8).bfloat16()
    with torch.no_grad():
        got = compiled(F.instance_norm)[0](x)
    torch.testing.assert_close(got, F.instance_norm(x), rtol=2e-2, atol=2e-2)
