"""Rotary embeddings: every spelling becomes one step, other computations stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop
from fmtprop import dnnl

HEADS, WIDTH = 3, 16


def half_turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def sliced(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def of_a_part(x, cos, sin):
    part, rest = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    cos, sin = cos[..., : WIDTH // 2], sin[..., : WIDTH // 2]
    return torch.cat((part * cos + half_turned(part) * sin, rest), dim=-1)


def neighbours_turned(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def neighbours_of_a_part(x, cos, sin):
    part, rest = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    cos, sin = cos[..., : WIDTH // 2], sin[..., : WIDTH // 2]
    return torch.cat((part * cos + neighbours_turned(part) * sin, rest), dim=-1)


def with_joined_neighbours(x):
    return torch.cat((-x[..., 1::2].unsqueeze(-1), x[..., ::2].unsqueeze(-1)), dim=-1).flatten(-2)


#: spelling of the embedding; of neighbours
SPELLINGS = {
    "llama": lambda x, cos, sin: x * cos + half_turned(x) * sin,
    "slices": lambda x, cos, sin: cos * x + sin * sliced(x),
    "the other way round": lambda x, cos, sin: half_turned(x) * sin + x * cos,
    "a part of each row": of_a_part,
    "gptj": lambda x, cos, sin: x * cos + neighbours_turned(x) * sin,
    "roformer": lambda x, cos, sin: neighbours_turned(x) * sin + x * cos,
    "neighbours by a concat": lambda x, cos, sin: x * cos + with_joined_neighbours(x) * sin,
    "neighbours in a part of each row": neighbours_of_a_part,
}

#: computations that look like it
OTHERS = {
    "difference": lambda x, cos, sin: x * cos - half_turned(x) * sin,
    "first half negated": lambda x, cos, sin: x * cos + torch.cat((x.chunk(2, -1)[1], -x.chunk(2, -1)[0]), -1) * sin,
    "halves not exchanged": lambda x, cos, sin: x * cos + torch.cat((-x.chunk(2, -1)[0], x.chunk(2, -1)[1]), -1) * sin,
    "other tensor": lambda x, cos, sin: (x + 1.0) * cos + half_turned(x) * sin,
    "evens negated": lambda x, cos, sin: x * cos + torch.stack((-x[..., ::2], x[..., 1::2]), dim=-1).flatten(-2) * sin,
    "neighbours across rows": lambda x, cos, sin: (
        x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-2).flatten(-2) * sin
    ),
    "neighbours of another tensor": lambda x, cos, sin: x * cos + neighbours_turned(x + 1.0) * sin,
    "every fourth number": lambda x, cos, sin: (
        x[..., :8] * cos[..., :8] + torch.stack((-x[..., 1::4], x[..., ::4]), dim=-1).flatten(-2) * sin[..., :8]
    ),
    "other axis": lambda x, cos, sin: x * cos + torch.cat((-x.flip(2), x), 2)[:, :, : x.shape[2]] * sin,
    "one angle a row": lambda x, cos, sin: x * cos[..., :1] + half_turned(x) * sin[..., :1],
    "turned has a reader": lambda x, cos, sin: (turned := half_turned(x)) + (x * cos + turned * sin).relu(),
}


class Turned(nn.Module):
    """A linear layer and an embedding of its heads, with angles that are constants or inputs."""

    def __init__(self, function, tokens: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(8, HEADS * WIDTH)
        angles = torch.outer(torch.arange(tokens), 10000 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x, cos=None, sin=None):
        cos, sin = (self.cos, self.sin) if cos is None else (cos, sin)
        heads = self.layer(x).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        return self.function(heads, cos[None, None], sin[None, None])


def compiled(function, *angles, tokens=5, **options):
    module, x = Turned(function, tokens).eval(), torch.randn(2, tokens, 8)
    net = fmtprop.compile(module, (x, *angles), **options)
    return net, net(x, *angles), module(x, *angles)


def ops(net):
    return [node.op for node in net.graph.nodes()]


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize(("policy", "tokens"), [("optimal", 1), ("propagate", 20)])  # a stack of many is another concat
def test_each_spelling_is_one_step(name, policy, tokens):
    net, got, expected = compiled(SPELLINGS[name], tokens=tokens, policy=policy)
    assert ops(net).count("rotary_embedding") == 1 and not {"binary", "eltwise"} & set(ops(net))
    (node,) = (node for node in net.graph.nodes() if node.op == "rotary_embedding")
    assert node.attrs.interleaved == ("neighbours" in name or name in ("gptj", "roformer"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_another_computation_stays(name):
    net, got, expected = compiled(OTHERS[name], policy="propagate")
    assert "rotary_embedding" not in ops(net)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_angles_may_be_inputs():
    net, got, expected = compiled(SPELLINGS["llama"], *torch.randn(2, 5, WIDTH))
    assert "rotary_embedding" in ops(net)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_bf16_is_turned_in_f32(name):
    net, got, expected = compiled(SPELLINGS[name], dtype="bf16")
    (node,) = (node for node in net.graph.nodes() if node.op == "rotary_embedding")
    dtypes = {name: net.graph.type_of(value).dtype.value for name, value in net.graph.inputs(node.name).items()}
    assert dtypes == {"src": "bf16", "cos": "f32", "sin": "f32"}
    assert (got - expected).abs().max() <= 3e-2 * expected.abs().max()


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_module_in_bf16_has_its_angles_in_f32(name):
    module, x = Turned(SPELLINGS[name]).eval().bfloat16(), torch.randn(2, 5, 8).bfloat16()
    cos, sin = torch.randn(2, 5, WIDTH).bfloat16()
    net = fmtprop.compile(module, (x, cos, sin))
    (node,) = (node for node in net.graph.nodes() if node.op == "rotary_embedding")
    dtypes = {name: net.graph.type_of(value).dtype.value for name, value in net.graph.inputs(node.name).items()}
    assert dtypes == {"src": "bf16", "cos": "f32", "sin": "f32"}
    exact = Turned(SPELLINGS[name]).eval().bfloat16().float()(x.float(), cos.float(), sin.float())
    errors = [(got.float() - exact).abs().max() / exact.abs().max() for got in (net(x, cos, sin), module(x, cos, sin))]
    assert errors[0] <= max(1.5 * errors[1], 1e-2)
