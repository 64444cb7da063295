"""Buckets: calls are padded to a few sizes, and a model that padding changes is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import fmtprop as fp
from fmtprop.errors import InputError, UnsupportedOpError

SOON = 60

TOKENS = Dim("tokens", min=2, max=64)


class Masked(nn.Module):
    """Attention that a mask keeps from padding, and a mean over tokens that may read it."""

    def __init__(self, *, reads_padding: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(20, 16), nn.Linear(16, 5)
        self.reads_padding = reads_padding

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        y = nn.functional.scaled_dot_product_attention(x, x, x, mask[:, None, :])
        mean = y.mean(1) if self.reads_padding else (y * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"tokens": self.out(y), "mean": mean}


def call(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 20, (2, tokens)), torch.ones(2, tokens, dtype=torch.bool)


def compiled(model: nn.Module, **options) -> fp.DynamicModel:
    shapes = {"ids": {1: TOKENS}, "mask": {1: TOKENS}}
    return fp.compile(model.eval(), call(6), dynamic_shapes=shapes, tune="model", confirm=False, **options)


def test_calls_are_padded_to_the_next_bucket():
    model = Masked()
    net = compiled(model, buckets={"ids": {1: (16, 8)}})
    for tokens in (5, 9, 8, 7, 16, 2):
        given = call(tokens)
        torch.testing.assert_close(net(*given), model(*given), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.submit(*given).result(SOON), model(*given), rtol=1e-4, atol=1e-5)
    assert [ids for ids, _ in net.shapes] == [(2, 16), (2, 8)]
    given = call(20)  # larger than all
    torch.testing.assert_close(net(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert net.shapes[-1][0] == (2, 20)
    net.close()


def test_a_model_that_padding_changes_is_refused():
    net = compiled(Masked(reads_padding=True), buckets={"ids": {1: (8,)}})
    net(*call(8))
    with pytest.raises(InputError, match=r"result 1 differs by .* padded with zeros .* takes no buckets"):
        net(*call(5))


def test_rows_of_a_batch_are_padded():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    rows = {0: Dim("rows", min=1, max=99)}
    net = fp.compile(model, torch.ones(4, 6), dynamic_shapes=(rows,), buckets={"input": {0: (4, 32)}}, tune="model")
    for count in (1, 3, 4, 5, 31):
        x = torch.randn(count, 6)
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    assert net.shapes == [((4, 6),), ((32, 6),)]
    with pytest.raises(InputError, match="compile without buckets"):
        net(torch.randn(3, 6), out=torch.empty(3, 3))
    with pytest.raises(InputError, match="input axis 0: got 100"):
        net(torch.randn(100, 6))
    with pytest.raises(InputError, match="input axis 1: got 7"):
        net(torch.randn(3, 7))


class Counted(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.shape[0]


@pytest.mark.parametrize(
    ("model", "buckets", "error", "message"),
    [
        (nn.ReLU(), {"x": {0: (8,)}}, InputError, "there is no input 'x'; the inputs are input"),
        (nn.ReLU(), {"input": {1: (8,)}}, InputError, "axis 1: dynamic_shapes does not mark it"),
        (nn.ReLU(), {"input": {2: (8,)}}, InputError, "axis 2: dynamic_shapes does not mark it"),
        (nn.ReLU(), {"input": {0: (0,)}}, InputError, "sizes must be positive numbers, got 0"),
        (nn.ReLU(), [8], InputError, r"buckets must map inputs to axes, such as .*, got \[8\]"),
        (nn.ReLU(), {"input": (8,)}, InputError, r"input input must map axes to sizes, .* got \(8,\)"),
        (nn.ReLU(), {"input": {0: 8}}, InputError, "axis 0: sizes must be a tuple of numbers, got 8"),
        (nn.ReLU(), {"input": {"rows": (8,)}}, InputError, "axis rows: dynamic_shapes does not mark it"),
        (Counted(), {"x": {0: (8,)}}, UnsupportedOpError, "returns a size"),
    ],
)
def test_wrong_buckets_are_refused(model, buckets, error, message):
    with pytest.raises(error, match=message):
        fp.compile(model, torch.ones(4, 6), dynamic_shapes=({0: Dim("rows", max=99)},), buckets=buckets, tune="model")


def test_buckets_need_sizes_that_change():
    with pytest.raises(UnsupportedOpError, match="give dynamic_shapes, too"):
        fp.compile(nn.ReLU(), torch.ones(4, 6), buckets={"input": {0: (8,)}})
