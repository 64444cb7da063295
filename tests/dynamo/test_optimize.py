"""``fp.optimize``: the model itself, its forward pass compiled."""

from __future__ import annotations

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


def test_the_model_itself_is_returned_and_computes_with_codes():
    model, x = layer(), torch.randn(3, 256)
    plain = model.weight.clone()
    assert fp.optimize(model, weights="int4", **OPTIONS) is model
    given = dict(zip(("weights", "scales"), encoded(model.weight, 4, 128), strict=True))
    expected = nn.functional.linear(x, decoded(MatMulNBits(4, 128), given, 256), model.bias)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.weight, plain) and list(model.state_dict()) == ["weight", "bias"]
        del model.forward
        torch.testing.assert_close(model(x), nn.functional.linear(x, plain, model.bias))


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
