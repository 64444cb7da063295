"""Tables of embeddings as codes: one for an embedding and a head that shares it, by each door."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import FmtpropError, InputError
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS

OPTIONS = {"tune": "model", "confirm": False}
TOKENS = torch.tensor([[3, 511, 7]])


class Scaled(nn.Embedding):
    """As some models' embeddings are."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


class Tied(nn.Module):
    def __init__(self, kind: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.small = kind(512, 128), nn.Embedding(3, 128)
        self.up, self.head = nn.Linear(128, 128), nn.Linear(128, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.small(tokens % 3)
        return self.head(hidden + self.up(hidden))


def with_decoded(module: Tied, weights: str | None, embeddings: str) -> Tied:
    module = copy.deepcopy(module)
    for layer, name in ((module.embedding, embeddings), (module.up, weights)):
        if name is not None:
            codes, scales = encoded(layer.weight, BITS[name], 128)
            layer.weight.data = decoded(MatMulNBits(BITS[name], 128), {"weights": codes, "scales": scales}, 128)
    return module


def results_of(door: str, module: nn.Module, **options: object) -> torch.Tensor:
    torch._dynamo.reset()
    given = {**options, **OPTIONS}
    with torch.no_grad():
        if door == "compile":
            return fp.compile(module, (TOKENS,), **given)(TOKENS)
        if door == "optimize":
            return fp.optimize(copy.deepcopy(module), **given)(TOKENS)
        return torch.compile(module, backend="fmtprop", options=given)(TOKENS)


@pytest.mark.parametrize(
    ("door", "weights", "embeddings", "kind"),
    [
        ("compile", None, "int8", nn.Embedding),
        ("compile", "int8", "int4", Scaled),
        ("optimize", "int4", "int8", Scaled),
        ("optimize", None, "int4", nn.Embedding),
        ("backend", "int4", "int8", nn.Embedding),
    ],
)
def test_results_are_those_of_the_decoded_table(door, weights, embeddings, kind):
    module = Tied(kind).eval()
    with torch.no_grad():
        expected = with_decoded(module, weights, embeddings)(TOKENS)
    got = results_of(door, module, weights=weights, embeddings=embeddings)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_embedding_and_its_head_read_one_table(dtype):
    net = fp.compile(Tied().eval().to(dtype), (TOKENS,), embeddings="int8", **OPTIONS)
    ops = [step.node.op for step in net.plan.steps]
    assert ops.count("gather_nbits") == 1 and ops.count("matmul_nbits") == 1
    held = sum(tensor.nbytes for tensor in net.plan.constants if tensor.nbytes >= 512 * 128)
    assert 512 * 128 <= held <= 512 * 132 + 4 * 128 * 128
    with pytest.raises(InputError, match=r"index out of range.*input \w+ holds 3 to 512"):
        net(TOKENS + (TOKENS == 511))


def test_a_module_keeps_one_table_and_frees_the_other():
    model = fp.optimize(Tied(Scaled).eval(), embeddings="int8", **OPTIONS)
    assert model.head.codes is model.embedding.codes and type(model.up) is nn.Linear
    assert isinstance(model.embedding, Scaled) and type(model.small) is nn.Embedding
    assert torch.equal(model.embedding.weight, model.head.weight)
    assert not [name for name, one in model.named_parameters() if one.shape[0] == 512]


def test_tables_that_stay():
    model = Tied().eval()
    model.embedding.max_norm = 1.0  # rows that are read are changed
    model.up.weight.data[3, 5] = torch.inf
    fp.optimize(model, weights="int8", embeddings="int8", **OPTIONS)
    assert type(model.embedding) is nn.Embedding and type(model.up) is nn.Linear
    infinite = Tied().eval()
    infinite.embedding.weight.data[3, 5] = torch.inf
    steps = fp.compile(infinite, (TOKENS,), embeddings="int8", **OPTIONS).plan.steps
    assert not [step for step in steps if "nbits" in step.node.op]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"embeddings": "int2"},
            "The 'embeddings' parameter of compile must be one of None, 'int8', 'int4'. Got 'int2'",
        ),
        ({"embeddings": "int8", "verify": "full"}, "own weights: with embeddings='int8', use 'on'"),
        ({"embeddings": "int8", "training": True}, "embeddings='int8' is for inference"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(FmtpropError, match=message):
        fp.compile(Tied().eval(), (TOKENS,), **given)
