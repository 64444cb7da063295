"""Attention of few queries becomes one node; other products of a softmax stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fmtprop
from fmtprop import dnnl

BATCH, HEADS, WIDTH = 2, 4, 32

BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="this CPU has no bf16")


def repeated(x, count):
    """Repeat each head, as models of transformers do."""
    n, heads, tokens, width = x.shape
    return x[:, :, None].expand(n, heads, count, tokens, width).reshape(n, heads * count, tokens, width)


class Step(nn.Module):
    """Heads of tokens attend to the keys and values of earlier tokens, and to their own."""

    def __init__(self, groups=HEADS, mask=None, join=True, scale=WIDTH**-0.5, repeats=True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups, self.mask, self.join, self.scale, self.repeats = groups, mask, join, scale, repeats
        self.q, self.k, self.v = (nn.Linear(16, n * WIDTH) for n in (HEADS, groups, groups))

    def heads(self, x, layer, count):
        return layer(x).view(*x.shape[:2], count, WIDTH).transpose(1, 2)

    def keys_and_values(self, x, keys, values):
        new = self.heads(x, self.k, self.groups), self.heads(x, self.v, self.groups)
        return [torch.cat(pair, 2) for pair in zip((keys, values), new, strict=True)] if self.join else (keys, values)

    def forward(self, x, keys, values):
        keys, values = self.keys_and_values(x, keys, values)
        if self.groups != HEADS and self.repeats:
            keys, values = (repeated(t, HEADS // self.groups) for t in (keys, values))
        mask = None if self.mask is None else self.mask(x.shape[1], keys.shape[2])
        how = {"scale": self.scale, "enable_gqa": not self.repeats}
        return F.scaled_dot_product_attention(self.heads(x, self.q, HEADS), keys, values, mask, **how)


def inputs(tokens=1, past=20, groups=HEADS):
    torch.manual_seed(1)
    return (torch.randn(BATCH, tokens, 16), *torch.randn(2, BATCH, groups, past, WIDTH))


def compiled(module, tensors, **options):
    net = fmtprop.compile(module.eval(), tensors, **options)
    return net, net(*tensors), module(*tensors)


def found(net):
    return [node for node in net.graph.nodes() if node.op == "attention"]


def causal(queries, keys):
    return torch.zeros(queries, keys).masked_fill(torch.ones(queries, keys).tril(keys - queries) == 0, -torch.inf)


STEPS = {
    "one token": (Step(), inputs()),
    "three tokens": (Step(mask=causal), inputs(3)),
    "no earlier tokens": (Step(join=False), inputs()),
    "heads share keys": (Step(groups=2), inputs(groups=2)),
    "padding": (Step(mask=lambda q, k: torch.arange(k).ge(3).log()[None, None, None]), inputs()),
    "a mask of each head": (Step(mask=lambda q, k: torch.arange(HEADS * k).view(HEADS, 1, k) / 50), inputs()),
    "several tokens of a group": (Step(groups=2, mask=causal), inputs(2, groups=2)),
    "tokens of a group before the cache": (Step(groups=2, mask=causal, join=False), inputs(5, groups=2)),
    "heads that PyTorch lets share keys": (Step(groups=2, repeats=False), inputs(groups=2)),
    "several tokens and a mask for heads that share keys": (
        Step(groups=1, mask=causal, repeats=False),
        inputs(3, groups=1),
    ),
    "a mask of each head of a group": (
        Step(groups=2, mask=lambda q, k: torch.arange(HEADS * k).view(HEADS, 1, k) / 50),
        inputs(groups=2),
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("policy", ["optimal", "propagate", "plain"])
def test_a_step_is_one_node(name, policy):
    net, got, expected = compiled(*STEPS[name], policy=policy)
    (node,) = found(net)
    assert {"softmax", "concat"}.isdisjoint(one.op for one in net.graph.nodes())
    assert node.choice.impl.startswith("attention_rows")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


OTHERS = {"more tokens": (Step(mask=causal), inputs(17))}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    net, got, expected = compiled(*OTHERS[name], policy="plain")
    assert not found(net)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_keys_that_are_returned_are_read_in_parts():
    class Returned(Step):
        def forward(self, x, keys, values):
            return super().forward(x, keys, values), *self.keys_and_values(x, keys, values)

    net, got, expected = compiled(Returned(), inputs())
    assert len(found(net)) == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("policy", ["optimal", "plain"])
def test_a_query_without_visible_keys_has_the_result_0(groups, policy):
    class Hidden(Step):
        def forward(self, x, keys, values, mask):
            self.mask = lambda queries, count: mask
            return super().forward(x, keys, values)

    mask = torch.zeros(BATCH, 1, 1, 21)
    mask[0, ..., 3:] = mask[1] = -torch.inf
    net, got, expected = compiled(Hidden(groups), (*inputs(groups=groups), mask), policy=policy)
    assert not expected[1].any()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (node,) = found(net)
    assert node.choice.impl.startswith("attention_rows")
    assert {"softmax", "reduction", "binary", "eltwise"}.isdisjoint(one.op for one in net.graph.nodes())
    lowest = torch.full_like(mask, torch.finfo(torch.float32).min)  # hides nothing where all keys have it
    given = (*inputs(groups=groups), lowest)
    torch.testing.assert_close(net(*given), Hidden(groups).eval()(*given), rtol=1e-5, atol=1e-5)


def test_a_mask_of_zeros_is_not_added():
    net, *_ = compiled(Step(mask=lambda q, k: torch.zeros(q, k)), inputs())
    assert not any(name.startswith("mask") for name in net.graph.inputs(found(net)[0].name))


def test_exact_special_values_are_those_of_pytorch():
    x, keys, values = inputs()
    keys[0, 0, 3, 5], values[1, 2, 4, 6] = torch.inf, torch.nan
    module = Step()
    net = fmtprop.compile(module.eval(), (x, keys, values), special_values="exact")
    torch.testing.assert_close(net(x, keys, values), module(x, keys, values), rtol=1e-5, atol=1e-5, equal_nan=True)


@BF16
def test_the_callers_keys_are_read_as_they_are():
    net, got, expected = compiled(Step(), inputs(), dtype="bf16")
    (node,) = found(net)
    assert {net.graph.type_of(value).dtype.value for value in net.graph.inputs(node.name).values()} == {"f32"}
    assert (got - expected).abs().max() <= 3e-2 * expected.abs().max()


def quantized(x):
    """Return codes, and a scale for each token of a head."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales


class Codes(Step):
    """Earlier keys and values are codes with scales; `decode` makes numbers of them."""

    def __init__(self, decode, **how) -> None:
        super().__init__(**how)
        self.decode = decode

    def forward(self, x, keys, key_scales, values, value_scales):
        return super().forward(x, self.decode(keys, key_scales, x), self.decode(values, value_scales, x))


def coded(x, *caches):
    return (x, *(tensor for cache in caches for tensor in quantized(cache)))


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=BF16)])
def test_keys_that_are_codes_are_read_as_codes(join, groups, dtype):
    type_ = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    module = Codes(lambda codes, scales, x: codes.to(x.dtype) * scales, groups=groups, join=join).to(type_)
    net, got, expected = compiled(module, coded(*(tensor.to(type_) for tensor in inputs(groups=groups))))
    (node,) = found(net)
    read = {name: net.graph.type_of(value).dtype.value for name, value in net.graph.inputs(node.name).items()}
    assert {name for name, one in read.items() if one == "s8"} == (
        {"past_key", "past_value"} if join else {"key", "value"}
    )
    assert node.choice.impl.startswith("attention_rows")
    tolerance = {"f32": 1e-5, "bf16": 2e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "decode",
    [
        lambda codes, scales, x: codes.to(x.dtype) * scales[..., :1, :],  # one for all tokens
        lambda codes, scales, x: codes.to(x.dtype) * scales.expand_as(codes),  # one for each number
        lambda codes, scales, x: codes.to(x.dtype) + scales,
        lambda codes, scales, x: codes.to(torch.int16).to(x.dtype) * scales,
        lambda codes, scales, x: codes.abs().to(x.dtype) * scales,
    ],
)
def test_other_numbers_of_codes_are_right(decode):
    _, got, expected = compiled(Codes(decode), coded(*inputs()))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@BF16
def test_codes_of_a_lowered_model_are_read_as_codes():
    module = Codes(lambda codes, scales, x: codes.to(x.dtype) * scales)
    net, got, expected = compiled(module, coded(*inputs()), dtype="bf16")
    assert {"s8"} < {net.graph.type_of(value).dtype.value for value in net.graph.inputs(found(net)[0].name).values()}
    assert (got - expected).abs().max() <= 3e-2 * expected.abs().max()
