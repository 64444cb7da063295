"""Cases of transformers make modules and inputs that fit, and the verdicts follow the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import bench_transformers
from benchmarks.bench_transformers import CASES, Result, read_nbytes
from fmtprop.bench import Agreement, Benchmark, Entry, Environment, Quartiles

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}


def test_a_step_continues_the_tokens_of_its_cache():
    transformers = pytest.importorskip("transformers")
    case = replace(CASES["llama-step128"], settings=SMALL, cached=5)
    module = case.module()
    token, *cache = case.inputs(module)
    assert len(cache) == 4 and cache[0].shape == (1, 4, 5, 8)
    known = module.body(token.repeat(1, 5), past_key_values=transformers.DynamicCache(), use_cache=True)
    pairs = [one for layer in known.past_key_values.layers for one in (layer.keys, layer.values)]
    whole = module.body(token.repeat(1, 6)).logits[:, -1:]
    assert (module(token, *pairs) - whole).abs().max() < 1e-5


def test_a_step_reads_all_weights_but_the_embedding():
    pytest.importorskip("transformers")
    case = replace(CASES["llama-step128"], settings=SMALL, cached=5)
    module = case.module()
    inputs = case.inputs(module)
    weights, cached = 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 50 * 32, 2 * 2 * 5 * 32
    assert read_nbytes(module, inputs, "f32") == 4 * weights + 4 * cached
    assert read_nbytes(module, inputs, "bf16") == 2 * weights + 4 * cached


@pytest.mark.parametrize(("bits", "name"), [(4, "int4"), (8, "int8")])
def test_codes_of_a_step_are_rounded_once(bits, name):
    pytest.importorskip("transformers")
    case = replace(CASES["llama-step128"], settings={**SMALL, "hidden_size": 128, "intermediate_size": 256}, cached=5)
    module = case.rounded(bits)
    for before, after in zip(case.module().parameters(), module.parameters(), strict=True):
        assert (before - after).abs().max() <= 0.01
    weights, scales = 2 * (4 * 128 * 128 + 3 * 128 * 256) + 50 * 128, 5 * 128 * 4
    cached = 2 * 2 * 5 * 128 * 4
    assert read_nbytes(module, case.inputs(module), name) == weights * bits // 8 + weights // 32 + scales + cached


def test_verdicts_are_about_the_best_other_and_the_bandwidth():
    agreed = Agreement(True, 1e-6, 1e-3)
    times = {"fmtprop": 10.0, "torch": 15.0, "inductor": 8.0}
    entries = tuple(
        Entry(name, agreed, (ms,), Quartiles(ms, ms, ms), Quartiles(*(10 / ms,) * 3)) for name, ms in times.items()
    )
    result = Result("gpt2-step128", "f32", Benchmark("fmtprop", 1, 1, 0, entries, Environment("", (), 4, 2, {})), 10**8)
    assert result.ratio == pytest.approx(1.25)
    text = bench_transformers.render([result], lambda: 2e10)
    assert "100.0" in text and "10.0" in text  # tokens and GB a second
    assert "none above 1.0: MISSED, 1.25" in text and "85% of 20.0 GB/s in steps: MISSED, 50%" in text


def test_without_arguments_all_but_the_large_model_are_measured(capsys):
    assert bench_transformers.parse([]).cases == [name for name in CASES if not name.startswith("llama1b")]
    with pytest.raises(SystemExit):
        bench_transformers.parse(["lenet"])
    assert "no case 'lenet'; there are bert-1x32" in capsys.readouterr().err
