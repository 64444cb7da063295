"""Tokens a second of a language model with few bits, beside llama.cpp, OpenVINO and PyTorch: one program at a time.

``python -m benchmarks.bench_decoders --weights int8 int4 --context 128 1024 --batch 1 8`` writes a seeded Llama-like
model of 1.1 billion parameters to a folder in each program's own form: safetensors in bf16, GGUF (Q8_0, Q4_0, BF16),
and OpenVINO's IR with NNCF's compressed weights. All forms have the same weights; each program rounds them in its own
way. It needs transformers, torchao, gguf, llama-cpp-python, openvino and nncf, or `--vs` without theirs.

A turn is a process: it loads the model, reads a prompt, and then times one-token steps, whose tokens are given. It
ends before the next one starts, since the memory does not hold all programs. Logits of the last step must be near those
of PyTorch in f32. Bytes that a step reads are those of the codes, scales and cache; their share is of the best
bandwidth of the same minutes: PyTorch's sum of a large tensor, a product of one row, before and after the turns.

The targets: at most 1.0 of the best other's time at batch 1, 0.8 at batch 8, and 85 % of the bandwidth. A missed target
does not change the exit code, which is 1 where logits are wrong or a program failed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.bench_transformers import read_bytes_per_second
from benchmarks.common import headline, table, tell, warn_if_busy, write_json
from benchmarks.decoders import CONTENDERS, OURS, SIZES, WRITERS, model_of
from fmtprop.bench import Environment
from fmtprop.runtime.process import use_threads

TARGETS = {1: 1.0, 8: 0.8}
BANDWIDTH_TARGET = 0.85

#: largest distance of the logits from PyTorch's in f32, over their length. Weights of few bits are other weights, and
#: many layers of random ones multiply the difference: all programs' int4 logits are at 0.7, those of another network at
#: 1.4. Our own codes are known, so our logits are compared with PyTorch's of the decoded weights, too.
TOLERANCES = {"bf16": 0.1, "int8": 0.15, "int4": 0.9}

#: most that our logits may differ from PyTorch's in f32, both with our codes' numbers, over what PyTorch's in bf16 do
MOST_OF_PYTORCH = 2.0

#: bytes of a number of a matrix, as fmtprop stores it: codes, and a scale of f32 for 128 of them
NBYTES = {"bf16": 2.0, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128}

#: untimed steps before the timed ones
WARMUP = 4


def prepare(folder: Path, layers: int, weights: Sequence[str], names: Sequence[str]) -> None:
    """Write the forms that are missing, each in a process that ends: they need 10 GB while they work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        torch.manual_seed(0)
        config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers}, bos_token_id=1, eos_token_id=2)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    for kind, (name, (suffix, _)) in product(weights, WRITERS.items()):
        if name in names and not (folder / f"{kind}.{suffix}").exists():
            _run(["--write", name, "--folder", str(folder), "--weights", kind])


# ---------------------------------------------------------------- turns


def tokens_of(batch: int, context: int, steps: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the seeded prompts [batch, context], and the tokens of the steps [batch, steps]."""
    found = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (batch, context + steps))
    return found[:, :context], found[:, context:]


def work(options: argparse.Namespace) -> None:
    """Run one turn in this process; write its milliseconds and the last logits."""
    use_threads(options.threads)
    (weights,), (context,), (batch,) = options.weights, options.context, options.batch
    most = context + WARMUP + options.steps
    prompt, rest = tokens_of(batch, context, WARMUP + options.steps)
    if options.turn == "reference":
        both = np.concatenate([prompt, rest], 1)
        logits = last_logits(model_of(options.folder).float(), both)
        exact, rounded = (last_logits(decoded(model_of(options.folder), weights).to(dtype), both) for dtype in TYPES)
        np.savez(options.folder / "own.npz", wanted=exact, allowed=MOST_OF_PYTORCH * distance(rounded, exact))
        times: list[float] = []
    else:
        step = CONTENDERS[options.turn](options.folder, weights, most, options.threads)
        step(prompt)
        times = []
        for at in range(rest.shape[1]):
            start = perf_counter()
            logits = step(rest[:, at : at + 1])
            times.append((perf_counter() - start) * 1e3)
    np.save(options.folder / "logits.npy", logits)
    print(json.dumps(times[WARMUP:]))


#: the types in which PyTorch computes with decoded weights: the reference, and what is compared with it
TYPES = (torch.float32, torch.bfloat16)


def decoded(model: Any, weights: str) -> Any:
    """Return a model in f32 with the numbers of our codes."""
    from fmtprop.dynamo.coded_layers import keep_codes

    coded = copy.deepcopy(model)
    keep_codes(coded, None if weights == "bf16" else weights)
    for name, layer in model.float().named_modules():
        if isinstance(layer, torch.nn.Linear):
            own = coded.get_submodule(name)
            own.dtype = torch.float32  # kernels decode in f32
            layer.weight.data = own.weight.detach().float()
    return model


def last_logits(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logits behind the last token of each sequence."""
    with torch.inference_mode():
        rows = [model(one[None], logits_to_keep=1).logits[:, -1].float() for one in torch.from_numpy(tokens)]
    return torch.cat(rows).numpy()


def distance(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """Return the distance of logits over the length of those that are right."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def _run(arguments: Sequence[str]) -> list[float]:
    """Call this program in a process of its own; return the times that it prints last."""
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_decoders", *arguments], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise RuntimeError("\n".join((made.stderr or made.stdout).strip().splitlines()[-3:]))
    lines = made.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("[") else []


def read_nbytes(layers: int, weights: str, context: int, batch: int) -> float:
    """Return the bytes that a step reads: matrices, and keys and values in bf16."""
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    pair = hidden // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    numbers = layers * (2 * hidden * hidden + 2 * hidden * pair + 3 * hidden * inner) + hidden * SIZES["vocab_size"]
    return numbers * NBYTES[weights] + layers * batch * context * 2 * pair * 2


def measure(options: argparse.Namespace, weights: str, context: int, batch: int) -> dict[str, Any]:
    """Run all turns of a case, and return its figures."""
    given = [
        "--folder", str(options.folder), "--weights", weights, "--context", str(context), "--batch", str(batch),
        "--threads", str(options.threads), "--steps", str(options.steps),
    ]  # fmt: skip
    _run([*given, "--turn", "reference"])
    wanted, own = np.load(options.folder / "logits.npy"), np.load(options.folder / "own.npz")
    times: dict[str, list[float]] = {}
    failures, errors = {}, {}
    bandwidth = read_bytes_per_second()
    for turn, name in product(range(options.rounds), options.vs):
        if name in failures:
            continue
        tell(f"{weights}, {context} tokens, batch {batch}: {name}, turn {turn + 1}")
        try:
            times.setdefault(name, []).append(median(_run([*given, "--turn", name])))
        except RuntimeError as error:
            failures[name] = str(error)
            continue
        got = np.load(options.folder / "logits.npy")
        errors[name] = distance(got, wanted)
        if not errors[name] <= TOLERANCES[weights]:
            failures[name] = f"logits differ by {errors[name]:.2f} from PyTorch's, more than {TOLERANCES[weights]}"
        off, allowed = distance(got, own["wanted"]), float(own["allowed"])
        if name == OURS and not off <= allowed:
            failures[name] = f"logits differ by {off:.3f} from PyTorch's of the same codes, more than {allowed:.3f}"
    case = {"weights": weights, "context": context, "batch": batch}
    bandwidth = max(bandwidth, read_bytes_per_second())
    return {**case, "ms": times, "errors": errors, "failures": failures, "bandwidth": bandwidth}


def render(figures: dict[str, Any], layers: int) -> str:
    """Return the table of a case and its verdict."""
    weights, context, batch = figures["weights"], figures["context"], figures["batch"]
    nbytes = read_nbytes(layers, weights, context, batch)
    good = {name: median(ms) for name, ms in figures["ms"].items() if name not in figures["failures"]}
    ours = good.get(OURS)
    rows = [
        [
            name,
            f"{ms:.1f}",
            f"{batch * 1e3 / ms:.1f}",
            f"{ms / ours:.2f}" if ours else "",
            f"{figures['errors'][name]:.3f}",
            f"{nbytes / ms / 1e6:.1f}" if name == OURS else "",
        ]
        for name, ms in good.items()
    ]
    columns = ["", "ms", "tokens/s", "its time", "error", "GB/s"]
    title = f"{weights}, {context} tokens before, batch {batch}: {nbytes / 1e6:.0f} MB a step"
    lines = [table(title, columns, rows), *(f"{name} failed: {text}" for name, text in figures["failures"].items())]
    if ours:
        rate = nbytes / ours * 1e3
        bandwidth = max(figures["bandwidth"], rate)  # a step may be what reads fastest
        share = rate / bandwidth
        word = "met" if share >= BANDWIDTH_TARGET else "MISSED"
        lines.append(f"target {BANDWIDTH_TARGET:.0%} of {bandwidth / 1e9:.1f} GB/s: {word}, {share:.0%}")
    others = [ms for name, ms in good.items() if name != OURS]
    if ours and others:
        target = TARGETS.get(batch, TARGETS[8])
        word = "met" if ours / min(others) <= target else "MISSED"
        lines.append(f"target {target} of the best other's time: {word}, {ours / min(others):.2f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_decoders", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--weights", nargs="+", choices=tuple(TOLERANCES), default=["int8", "int4"])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024], help="tokens before the steps")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="sequences")
    parser.add_argument("--vs", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS), help="programs")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24, help="timed steps of a turn (default: 24)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every program (default: 3)")
    parser.add_argument("--folder", type=Path, help="where the model is, or is written (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    parser.add_argument("--turn", choices=("reference", *CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--write", choices=tuple(WRITERS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = parse(arguments)
    if options.write:
        WRITERS[options.write][1](options.folder, options.weights[0])
        return 0
    if options.turn:
        work(options)
        return 0
    warn_if_busy(os.getloadavg()[0])
    use_threads(options.threads)
    print(headline(Environment.capture(options.threads)))
    with TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        prepare(options.folder, options.layers, options.weights, options.vs)
        found = []
        for weights, context, batch in product(options.weights, options.context, options.batch):
            found.append(measure(options, weights, context, batch))
            print(render(found[-1], options.layers), flush=True)
            write_json(options.json, found)
    return int(any(one["failures"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
