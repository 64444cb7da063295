"""Greedy tokens of models with codes are those of the same models with decoded weights in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded

transformers = pytest.importorskip("transformers")

OPTIONS = {"tune": "model", "confirm": False}
BITS = {"int8": 8, "int4": 4}
PROMPT, STEPS = 9, 100

#: a token whose logit is this near to the largest, as a share of it, may take its place
NEAR = 1e-4

SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
OLD = {"vocab_size": 320, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2", {**OLD, "n_embd": 256, "n_positions": 256}),
    "LlamaForCausalLM": ("Llama", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2", GROUPED),
    "GemmaForCausalLM": ("Gemma", {**GROUPED, "head_dim": 64}),
    "PhiForCausalLM": ("Phi", SIZES),
    "MixtralForCausalLM": ("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "GPTNeoXForCausalLM": ("GPTNeoX", SIZES),
    "BloomForCausalLM": ("Bloom", {**OLD, "hidden_size": 256}),
    "Phi3ForCausalLM": ("Phi3", GROUPED),
}


def decoder(name: str) -> nn.Module:
    family, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**settings)).eval()
    for one in model.parameters():  # as drawn, all tokens would be nearly as likely
        if one.ndim > 1:
            one.data.mul_(4)
    return model


def with_decoded_weights(model: nn.Module, bits: int) -> nn.Module:
    """Return a copy whose products have the numbers of codes; an embedding that shares them keeps its own."""
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for one in model.modules():
        turned = type(one).__name__ == "Conv1D"  # of transformers: [depth, outputs]
        if not isinstance(one, nn.Linear) and not turned:
            continue
        matrix = one.weight.data.t() if turned else one.weight.data
        if matrix.numel() < 1 << 14:
            continue
        codes, scales = encoded(matrix, bits, 128)
        numbers = decoded(MatMulNBits(bits, 128), {"weights": codes.contiguous(), "scales": scales}, matrix.shape[1])
        matrix.copy_(numbers)
    return model


def generated(model: nn.Module, tokens: torch.Tensor, **more: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with torch.no_grad():
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS, do_sample=False, disable_compile=True,
            return_dict_in_generate=True, output_logits=True, **more,
        )  # fmt: skip
    return made.sequences, list(made.logits)


def check(expected: tuple[torch.Tensor, list[torch.Tensor]], made: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Compare each sequence up to its end, or to its first near tie."""
    for row, (one, other) in enumerate(zip(expected[0], made[0], strict=True)):
        differs = (one != other).nonzero().flatten()
        if len(differs):
            logits = expected[1][int(differs[0]) - PROMPT][row]
            first, second = logits.topk(2).values.tolist()
            assert first - second <= NEAR * abs(first), f"token {int(differs[0])} of sequence {row}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_decoded_weights(name, weights):
    torch._dynamo.reset()
    model, tokens = decoder(name), torch.randint(5, 300, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = generated(with_decoded_weights(model, BITS[weights]), tokens, cache_implementation="static")
    fp.optimize(model, weights=weights, **OPTIONS)
    check(expected, generated(model, tokens, cache_implementation="static"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sequences", [3, 16])
def test_several_sequences(sequences):
    torch._dynamo.reset()
    model = decoder("LlamaForCausalLM")
    tokens = torch.randint(5, 300, (sequences, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = generated(with_decoded_weights(model, 4), tokens, cache_implementation="static")
    fp.optimize(model, weights="int4", **OPTIONS)
    check(expected, generated(model, tokens, cache_implementation="static"))


def cache_of_codes(layers: int) -> object:
    """Return a static cache of int8 codes with a scale for each token of a head."""
    from transformers.cache_utils import StaticLayer

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        return (x / scales).round().clamp(-127, 127).to(torch.int8), scales

    class Int8Layer(StaticLayer):
        def lazy_initialization(self, keys, values):
            super().lazy_initialization(keys.to(torch.int8), values.to(torch.int8))
            self.scales = [x.new_zeros(*x.shape[:2], self.max_cache_len, 1) for x in (keys, values)]

        def update(self, keys, values, *args, **kwargs):
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            places = torch.arange(keys.shape[-2]) + self.cumulative_length
            codes, scales = zip(*map(quantized, (keys, values)), strict=True)
            for one, new in zip(self.scales, scales, strict=True):
                one.index_copy_(2, places, new)
            return [one.to(keys.dtype) * scale for one, scale in zip(super().update(*codes), self.scales, strict=True)]

    return transformers.Cache(layers=[Int8Layer(max_cache_len=PROMPT + STEPS) for _ in range(layers)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_a_cache_of_codes(name):
    torch._dynamo.reset()
    model, tokens = decoder(name), torch.randint(5, 300, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = generated(model, tokens, past_key_values=cache_of_codes(2))
    fp.optimize(model, **OPTIONS)
    check(expected, generated(model, tokens, past_key_values=cache_of_codes(2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_assistant_proposes_tokens():
    torch._dynamo.reset()
    model, assistant = decoder("LlamaForCausalLM"), decoder("LlamaForCausalLM")
    tokens = torch.randint(5, 300, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = generated(with_decoded_weights(model, 4), tokens)
    fp.optimize(model, weights="int4", **OPTIONS)
    check(expected, generated(model, tokens, assistant_model=assistant))
