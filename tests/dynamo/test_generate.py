"""``model.generate`` of transformers: the same greedy tokens as eager, with a handful of plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from fmtprop.dynamo.backend import options_of, regions_by

pytestmark = pytest.mark.usefixtures("always")

transformers = pytest.importorskip("transformers")

VOCABULARY, TOKENS = 61, 8

#: plans that a model may take: prefill, and before and behind each layer's cache in a step, for two kinds of shape
MOST_PLANS = 12


def decoder(name: str) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64, eos_token_id=None, **sizes
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def named(name: str, head: str = "ForCausalLM", **sizes: object) -> nn.Module:
    """Make a model whose configuration has names of sizes of its own."""
    config = getattr(transformers, f"{name}Config")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None}
    return getattr(transformers, f"{name}{head}")(config(vocab_size=VOCABULARY, **tokens, **sizes))


#: further families: recurrent states, experts, sliding windows, ALiBi, encoders with decoders
_SIDES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4))}
_SEQ2SEQ = {**_SIDES, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gemma2": partial(decoder, "Gemma2"),
    "mixtral": partial(decoder, "Mixtral"),
    "phi": partial(decoder, "Phi"),
    "gpt_neox": partial(decoder, "GPTNeoX"),
    "falcon": partial(named, "Falcon", hidden_size=16, num_hidden_layers=1, num_attention_heads=4),
    "bloom": partial(named, "Bloom", hidden_size=16, n_layer=1, n_head=4),
    "mamba": partial(named, "Mamba", hidden_size=16, num_hidden_layers=1, state_size=4),
    "rwkv": partial(named, "Rwkv", hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, context_length=64),
    "bart": partial(named, "Bart", "ForConditionalGeneration", max_position_embeddings=64, **_SEQ2SEQ),
}


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=None, **sizes))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 1, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes, **tokens))


def whisper() -> nn.Module:
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{what}": n for side in sides for what, n in (("layers", 1), ("attention_heads", 4))}
    sizes |= {f"{side}_ffn_dim": 32 for side in sides}
    sizes |= {"d_model": 16, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8}
    tokens = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    silent = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(vocab_size=VOCABULARY, **sizes, **tokens, **silent)
    return transformers.WhisperForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # of Mamba
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # of BLOOM
@pytest.mark.parametrize(
    ("make", "cache"),
    [
        pytest.param(gpt2, "dynamic", id="gpt2-dynamic"),
        pytest.param(partial(decoder, "Llama"), "static", id="llama-static"),
        *(
            pytest.param(make, cache, id=f"{name}-{cache}", marks=pytest.mark.slow)
            for name, make in (
                ("qwen2", partial(decoder, "Qwen2")),
                ("mistral", partial(decoder, "Mistral")),
                ("t5", t5),
                ("whisper", whisper),
                *FAMILIES.items(),
            )
            for cache in ("dynamic", "static")
        ),
        pytest.param(gpt2, "static", id="gpt2-static", marks=pytest.mark.slow),
        pytest.param(partial(decoder, "Llama"), "dynamic", id="llama-dynamic", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_eager(make: Callable[[], nn.Module], cache: str):
    torch.manual_seed(0)
    model = make().eval()
    given = {"input_ids": torch.randint(2, VOCABULARY, (1, 5))}
    how = {"max_new_tokens": TOKENS, "do_sample": False}
    if make is whisper:
        given, how = {"input_features": torch.randn(1, 8, 32)}, {**how, "return_timestamps": False}
    if cache == "static":
        how["cache_implementation"] = cache
    expected = model.generate(**given, **how)
    regions: list = []
    model.compile(backend=regions_by(options_of(None, {"tune": "model", "confirm": False}), regions.append))
    for _ in range(2):
        assert torch.equal(model.generate(**given, **how), expected)
    plans = [outcome for one in regions for outcome in one.outcomes if outcome.net is not None]
    assert 0 < len(plans) <= MOST_PLANS


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_static_cache_is_written_in_place_and_never_copied():
    torch.manual_seed(0)
    model = decoder("Llama").eval()
    regions: list = []
    caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    run = torch.compile(
        model, backend=regions_by(options_of(None, {"tune": "model", "confirm": False}), regions.append)
    )
    with torch.no_grad():
        for start, tokens in ((0, 5), (5, 1), (6, 1)):
            given = {"input_ids": torch.randint(2, VOCABULARY, (1, tokens))}
            given |= {"cache_position": torch.arange(start, start + tokens)}
            expected = model(**given, past_key_values=caches[0]).logits
            places = [tensor.data_ptr() for tensor in (caches[1].layers[0].keys, caches[1].layers[0].values) if start]
            torch.testing.assert_close(run(**given, past_key_values=caches[1]).logits, expected, rtol=1e-3, atol=1e-4)
            kept = [tensor.data_ptr() for tensor in (caches[1].layers[0].keys, caches[1].layers[0].values) if start]
            assert kept == places
            if not start:
                regions.clear()  # of prefill, which makes the cache
    torch.testing.assert_close(caches[1].layers[0].keys, caches[0].layers[0].keys)
    calls = [node for one in regions for node in one.module.graph.nodes if node.op == "call_function"]
    # the counter of tokens is copied
    names = [str(node.target) for node in calls if "copy" in str(node.target) and node.meta["val"].numel() > 1]
    assert names.count("aten.index_copy_.default") == 2  # keys and values
    assert not {"aten.copy_.default", "aten.index_copy.default"} & set(names)
