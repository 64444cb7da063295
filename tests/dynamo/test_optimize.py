"""``fp.optimize``: the model itself, its forward pass compiled."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import FmtpropError, InputError
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded

OPTIONS = {"tune": "model", "confirm": False}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 128).eval()


def test_without_codes_the_parameters_stay():
    model, x = layer(), torch.randn(3, 256)
    plain, expected = model.weight, model(x)
    assert fp.optimize(model, **OPTIONS) is model
    assert model.weight is plain and list(model.state_dict()) == ["weight", "bias"]
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_layers_have_codes_and_plans_read_them_in_place(weights):
    model, x, bits = layer(), torch.randn(3, 256), {"int8": 8, "int4": 4}[weights]
    given = dict(zip(("weights", "scales"), encoded(model.weight, bits, 128), strict=True))
    numbers = decoded(MatMulNBits(bits, 128), given, 256)
    expected = nn.functional.linear(x, numbers, model.bias)
    assert fp.optimize(model, weights=weights, **OPTIONS) is model
    assert list(model.state_dict()) == ["bias", "codes", "scales"] and torch.equal(model.weight, numbers)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # not counted as a change, and no plan has a copy
        model.codes.data.fill_(model.codes[0, 0])
    torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias), rtol=1e-4, atol=1e-4)
    del model.forward
    torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias), rtol=1e-4, atol=1e-4)


def test_weights_of_linear_layers_are_freed_and_shared_codes_made_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up, self.head = nn.Embedding(256, 128), nn.Linear(128, 128), nn.Linear(128, 256)
            self.again, self.small, self.infinite = nn.Linear(128, 128), nn.Linear(128, 3), nn.Linear(128, 128)
            self.head.weight, self.again.weight = self.embedding.weight, self.up.weight
            self.infinite.weight.data[3, 5] = torch.inf

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(torch.tanh(self.up(self.embedding(tokens)))))

    model, tokens = Tied().eval(), torch.tensor([[3, 5, 7]])
    freed, embedding = weakref.ref(model.up.weight), model.embedding.weight
    fp.optimize(model, weights="int8", **OPTIONS)
    assert freed() is None and model.embedding.weight is embedding and model.up.codes is model.again.codes
    assert type(model.small) is type(model.infinite) is nn.Linear
    expected = Tied.forward(model, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)


def test_codes_are_a_part_of_the_state():
    first, x = fp.optimize(layer(), weights="int4", **OPTIONS), torch.randn(2, 256)
    second = fp.optimize(nn.Linear(256, 128).eval(), weights="int4", **OPTIONS)
    second(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        second.load_state_dict({**first.state_dict(), "codes": first.codes[:, :64]})


def test_a_part_of_a_model_is_optimized():
    model, x = nn.Sequential(layer(), nn.ReLU()), torch.randn(2, 256)
    with torch.no_grad():
        expected = model(x)
        fp.optimize(model[0], **OPTIONS)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("gpt2", {}, "optimize takes a torch.nn.Module, got str"),
        (nn.Linear(2, 2), {}, "the model is in training mode: call model.eval"),
        (layer(), {"weights": "int3"}, "must be one of None, 'int8', 'int4'. Got 'int3'"),
        (layer(), {"weight": "int4"}, "has no option 'weight'"),
    ],
)
def test_what_is_refused(model, options, message):
    with pytest.raises(FmtpropError, match=message):
        fp.optimize(model, **options)


def test_a_second_call_names_the_first():
    model = fp.optimize(layer(), weights="int8", **OPTIONS)
    with pytest.raises(InputError, match=r"was optimized before, with .*'weights': 'int8'.*del model.forward"):
        fp.optimize(model)
