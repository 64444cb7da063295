"""Caches that grow in place: the same numbers as PyTorch's, whoever continues which cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from fmtprop.dynamo import caches
from fmtprop.dynamo.backend import backend, options_of, regions_by
from fmtprop.errors import UnsupportedOpError

pytestmark = pytest.mark.usefixtures("always")


class Step(nn.Module):
    """A decoder's step: one token attends to a cache of keys, head by head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new, query = (y.view(1, -1, 2, 8).transpose(1, 2) for y in (self.key(x), x))
        cache = torch.cat([cache, new], dim=-2)
        weights = torch.softmax(query @ cache.transpose(2, 3), -1)
        heads = (weights @ cache).transpose(1, 2).reshape(1, -1, 16)
        return self.out(heads), cache


def compiled(model: nn.Module) -> Callable:
    how = options_of(None, {"tune": "model", "confirm": False})
    return torch.compile(model, backend=regions_by(how, lambda region: None, grow=True), dynamic=True)


def token(number: int) -> torch.Tensor:
    return torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(number))


def test_only_new_elements_are_written(monkeypatch):
    monkeypatch.setattr(caches, "ROOM", 4)
    monkeypatch.setattr(caches, "ROOM_SHARE", 0.0)
    model = Step()
    run = compiled(model)
    cache = other = torch.randn(1, 2, 3, 8)
    places = []
    with torch.no_grad():
        for number in range(10):
            got, cache = run(token(number), cache)
            expected, other = model(token(number), other)
            torch.testing.assert_close((got, cache), (expected, other))
            places.append(cache.data_ptr())
    moves = sum(a != b for a, b in pairwise(places))
    assert moves == 2  # four tokens fit behind the first cache, four behind the next


def test_two_continuations_of_one_cache_keep_apart():
    model = Step()
    run = compiled(model)
    with torch.no_grad():
        _, past = run(token(0), torch.randn(1, 2, 3, 8))
        kept = past.clone()
        branches = [[past, past.clone()] for _ in range(2)]
        for number in range(1, 4):
            for place, branch in enumerate(branches):
                x = token(10 * number + place)
                (got, branch[0]), (expected, branch[1]) = run(x, branch[0]), model(x, branch[1])
                torch.testing.assert_close((got, branch[0]), (expected, branch[1]))
        for branch in branches:
            torch.testing.assert_close(*branch)
        assert torch.equal(past, kept)
        assert past.data_ptr() == branches[0][0].data_ptr() != branches[1][0].data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache[:, :, :3],  # tokens that were refused
        lambda cache: cache[:, :, 1:],  # a window
        lambda cache: cache.index_select(0, torch.tensor([0])),  # another beam
        lambda cache: cache.contiguous(),
        lambda cache: cache.mul_(2),
        lambda cache: setattr(cache, "data", cache.data + 1) or cache,
    ],
)
def test_a_changed_cache_is_grown_as_it_is(change):
    model = Step()
    run = compiled(model)
    with torch.no_grad():
        _, cache = run(token(0), torch.randn(1, 2, 3, 8))
        for number in range(1, 3):
            cache = change(cache)
            got, expected = run(token(number), cache), model(token(number), cache.clone())
            torch.testing.assert_close(got, expected)
            cache = got[1]


def test_modes_do_not_share_memory():
    model = Step()
    run = compiled(model)
    with torch.inference_mode():
        _, cache = run(token(0), torch.randn(1, 2, 3, 8))
    with torch.no_grad():
        torch.testing.assert_close(run(token(1), cache), model(token(1), cache))


def test_a_wrong_value_of_the_option_is_refused():
    with pytest.raises(UnsupportedOpError, match="'grow_caches' must be True or False, got 1"):
        backend(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(1)], options={"grow_caches": 1})


class Codes(nn.Module):
    """Eight tokens of two heads as codes, each with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(1, 2, 8, 16, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(1, 2, 8, 1))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(-1, keepdim=True) / 127
        self.scales.index_copy_(2, place, scales)
        self.codes.index_copy_(2, place, (x / scales).round().to(torch.int8))
        return self.codes.to(x.dtype) * self.scales


class StepOnCodes(nn.Module):
    """A decoder's step on a static cache of codes: four heads, two of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = nn.Linear(16, 64), nn.Linear(16, 32), nn.Linear(16, 32)
        self.keys, self.values = Codes(), Codes()

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        query, key, value = (y(x).view(1, 1, -1, 16).transpose(1, 2) for y in (self.query, self.key, self.value))
        mask = torch.arange(8)[None] <= place[:, None]
        return nn.functional.scaled_dot_product_attention(
            query, self.keys(key, place), self.values(value, place), mask, enable_gqa=True
        )


def test_a_cache_of_codes_is_written_and_read_in_place():
    model, other = StepOnCodes(), StepOnCodes()
    run = compiled(model)
    codes = model.keys.codes.data_ptr()
    with torch.no_grad():
        for number in range(5):
            place = torch.tensor([number])
            torch.testing.assert_close(run(token(number), place), other(token(number), place))
    assert codes == model.keys.codes.data_ptr()
    torch.testing.assert_close(model.state_dict(), other.state_dict())
