"""Latency of transformers: encoders, vision, and decoders' prefill and one-token steps, f32 and bf16.

``python -m benchmarks.bench_transformers gpt2-step1024 --dtype f32 bf16`` gives every case and contender a process, and
compares outputs with PyTorch's f32 before anything is timed. Contenders take turns (:mod:`fmtprop.bench.processes`).
A one-token step takes its keys and values as inputs and returns logits. Its share of the memory bandwidth is that of
its weights, keys and values, each read once; a sum of a large tensor and a product of one row tell the bandwidth. In
int8 and int4, products have codes as weights, and all contenders' weights are the numbers that these codes stand for.

The targets: at most 0.9 of the best other's time in geometric mean, none above 1.0; steps at 85 % of the bandwidth. A
missed target does not change the exit code, which is 1 where outputs are wrong or a contender failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import fmtprop as fp
from benchmarks.common import headline, table, tell_turns, warn_if_busy, write_json
from fmtprop import dnnl
from fmtprop.api import Options, from_torch
from fmtprop.bench import Benchmark
from fmtprop.bench.contenders import REFERENCE as OURS
from fmtprop.bench.contenders import contender, race
from fmtprop.errors import FmtpropError
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS
from fmtprop.runtime.process import use_threads

__all__ = ["CASES", "Case", "main"]

#: the contenders by precision; ONNX Runtime has no bf16 on a CPU
CONTENDERS = {
    "f32": ("torch", "inductor", "openvino", "onnxruntime"),
    "bf16": ("torch-bf16", "inductor-bf16", "openvino-bf16"),
    "int8": ("torch", "openvino"),
    "int4": ("torch", "openvino"),
}
TARGET, BANDWIDTH_TARGET = 0.9, 0.85

#: bytes of a tensor that no cache holds, and how often it is read
_LARGE_NBYTES, _LARGE_WIDTH, _READS = 256 << 20, 4096, 20

#: neighbours that share a scale, as of the pass that makes codes; the model of which all steps are asked for
GROUP, LARGE = 128, "llama1b"

_GPT2 = {"n_positions": 2048}
#: 1.1 billion parameters
_LARGE_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
_LLAMA = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


class Network(nn.Module):
    """A network of transformers that takes and returns plain tensors.

    `steps`: whether the first input is one token, and the others are keys and values of each layer.
    """

    def __init__(self, body: nn.Module, steps: bool) -> None:
        super().__init__()
        self.body, self.steps = body, steps

    def forward(self, first: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        """Return the first result."""
        if not self.steps:
            return self.body(first, return_dict=False)[0]
        from transformers import DynamicCache

        known = DynamicCache()
        for layer, pair in enumerate(zip(cache[::2], cache[1::2], strict=True)):
            known.update(*pair, layer)
        return self.body(first, past_key_values=known, use_cache=True, return_dict=False)[0]


@dataclass(frozen=True)
class Case:
    """A network and its inputs."""

    model: str
    config: str
    settings: dict[str, object]
    batch: int = 1
    #: tokens of a sequence; 0 for an image
    tokens: int = 0
    cached: int = 0

    def module(self) -> nn.Module:
        """Return the network with seeded weights."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        return Network(getattr(transformers, self.model)(config), bool(self.cached)).eval().requires_grad_(False)

    def rounded(self, bits: int) -> nn.Module:
        """Return the network with the weights of products rounded to codes."""
        module = self.module()
        for one in module.modules():
            if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D":  # of transformers: [depth, outputs]
                matrix = one.weight if isinstance(one, nn.Linear) else one.weight.t()
                codes, scales = encoded(matrix, bits, GROUP)
                tensors = {"weights": codes.contiguous(), "scales": scales}
                matrix.copy_(decoded(MatMulNBits(bits, GROUP), tensors, matrix.shape[1]))
        return module

    def inputs(self, module: nn.Module) -> tuple[torch.Tensor, ...]:
        """Return seeded inputs."""
        generator = torch.Generator().manual_seed(0)
        if not self.tokens:
            return (torch.randn(self.batch, 3, 224, 224, generator=generator),)
        config = module.body.config
        first = torch.randint(config.vocab_size, (self.batch, self.tokens), generator=generator)
        heads = config.num_attention_heads
        pair = (self.batch, getattr(config, "num_key_value_heads", heads), self.cached, config.hidden_size // heads)
        count = 2 * config.num_hidden_layers if self.cached else 0
        return (first, *(torch.randn(pair, generator=generator) for _ in range(count)))


def read_nbytes(module: nn.Module, inputs: Sequence[torch.Tensor], dtype: str) -> int:
    """Return the bytes that a step reads: weights in its data type, and the caller's keys and values as they are.

    Of an embedding, it reads one row.
    """
    embedded = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    output = module.body.get_output_embeddings()
    weights = {*module.parameters()} - (embedded - {output.weight})
    cache = sum(one.nbytes for one in inputs[1:])
    if dtype in BITS:
        codes = sum(one.numel() for one in weights if one.ndim == 2)
        return (
            cache + codes * BITS[dtype] // 8 + codes // GROUP * 4 + sum(one.nbytes for one in weights if one.ndim < 2)
        )
    return cache + sum(one.numel() for one in weights) * (4 if dtype == "f32" else 2)


def _cases() -> dict[str, Case]:
    bert, gpt2 = ("BertModel", "BertConfig", {}), ("GPT2LMHeadModel", "GPT2Config", _GPT2)
    llama = ("LlamaForCausalLM", "LlamaConfig", _LLAMA)
    cases = {f"bert-{n}x{tokens}": Case(*bert, n, tokens) for n in (1, 8) for tokens in (32, 128, 512)}
    cases["vit"] = Case("ViTForImageClassification", "ViTConfig", {"num_labels": 1000})
    cases["swin"] = Case("SwinForImageClassification", "SwinConfig", {"num_labels": 1000})
    cases["gpt2-prefill128"] = Case(*gpt2, 1, 128)
    large = ("LlamaForCausalLM", "LlamaConfig", _LARGE_LLAMA)
    for name, model in (("gpt2", gpt2), ("llama", llama), (LARGE, large)):
        for cached in (128, 1024):
            cases[f"{name}-step{cached}"] = Case(*model, 1, 1, cached)
    return cases


#: name -> case
CASES = _cases()
#: the large model takes minutes
_DEFAULT = [name for name in CASES if not name.startswith(LARGE)]


def read_bytes_per_second() -> float:
    """Return the bandwidth at which all threads together read memory: of PyTorch's sum, or of a product of one row.

    Which of the two reads faster depends on the machine (27 and 37 GB/s on a Zen 4).
    """
    matrix, row = nn.Linear(_LARGE_WIDTH, _LARGE_NBYTES // 4 // _LARGE_WIDTH, bias=False), torch.ones(1, _LARGE_WIDTH)
    multiply, best = fp.compile(matrix, row, confirm=False, tune="model"), math.inf
    for _ in range(_READS):
        for read in (matrix.weight.detach().sum, partial(multiply, row)):
            start = perf_counter()
            read()
            best = min(best, perf_counter() - start)
    return _LARGE_NBYTES / best


@dataclass(frozen=True)
class Result:
    """The times of a case in a precision."""

    name: str
    dtype: str
    benchmark: Benchmark
    nbytes: int = 0
    batch: int = 1

    @property
    def ratio(self) -> float | None:
        """Our time over the best other's; None where one of the two is missing."""
        others = [one.latency.median for one in self.benchmark.entries if one.name != OURS and one.latency is not None]
        own = self.benchmark[OURS].latency
        return own.median / min(others) if others and own is not None else None


def measure(name: str, dtype: str, options: argparse.Namespace) -> Result:
    """Race the contenders of a case."""
    case = CASES[name]
    bits = BITS.get(dtype)
    make = case.module if bits is None else partial(case.rounded, bits)
    module = make()
    inputs = case.inputs(module)
    nbytes = read_nbytes(module, inputs, dtype) if case.cached else 0
    graph = from_torch(module, inputs)
    del module
    how = Options(tune=options.tune, **({"dtype": dtype} if bits is None else {"weights": dtype}))
    others = [one for one in options.vs or CONTENDERS[dtype] if one.endswith("bf16") == (dtype == "bf16")]
    benchmark = race(
        graph,
        [contender(one, how) for one in (OURS, *others)],
        threads=options.threads,
        rounds=options.rounds,
        repeats=options.repeats,
        inputs=inputs,
        module=make,
        progress=partial(tell_turns, f"{name}, {dtype}"),
    )
    return Result(name, dtype, benchmark, nbytes, case.batch)


def render(results: Sequence[Result], bandwidth: Callable[[], float]) -> str:
    """Return the table and the verdicts."""
    rows, failures, shares = [], [], []
    for result in results:
        for entry in result.benchmark.entries:
            if entry.latency is None:
                continue
            steps = 1e3 / entry.latency.median
            rate = result.nbytes * steps if entry.name == OURS else 0.0
            share = rate / max(bandwidth(), rate) if rate else 0.0  # a step may be what reads fastest
            shares += [share] if share else []
            of_step = [f"{result.batch * steps:.1f}"] if result.nbytes else [""]
            if share:
                of_step += f"{result.nbytes / 1e6:.0f}", f"{rate / 1e9:.1f}", f"{share:.0%}"
            speedup = "" if entry.speedup is None else f"{1 / entry.speedup.median:.2f}"
            figures = f"{entry.latency.median:.2f}", speedup, f"{entry.agreement.error:.1e}"
            named = f"{result.name}, {result.dtype}", entry.name
            rows.append([*named, *figures, *of_step, *[""] * (4 - len(of_step))])
        failures += [f"{result.name}, {result.dtype}: {text}" for text in result.benchmark.failures]
    columns = ["case", "contender", "ms", "its time", "error", "tokens/s", "MB read", "GB/s", "of the best"]
    lines = [table("one run; its time is relative to fmtprop's", columns, rows)]
    ratios = {f"{one.name}, {one.dtype}": ratio for one in results if (ratio := one.ratio) is not None}
    if ratios:
        mean, worst = math.exp(sum(map(math.log, ratios.values())) / len(ratios)), max(ratios, key=lambda n: ratios[n])
        word = "met" if mean <= TARGET and ratios[worst] <= 1 else "MISSED"
        lines.append(
            f"target {TARGET} of the best other's time, none above 1.0: {word}, {mean:.2f}; "
            f"most {ratios[worst]:.2f} ({worst})"
        )
    if shares:
        word = "met" if min(shares) >= BANDWIDTH_TARGET else "MISSED"
        lines.append(
            f"target {BANDWIDTH_TARGET:.0%} of {bandwidth() / 1e9:.1f} GB/s in steps: {word}, {min(shares):.0%}"
        )
    return "\n".join([*lines, *failures])


def _name(name: str) -> str:
    if name not in CASES:
        raise argparse.ArgumentTypeError(f"no case {name!r}; there are {', '.join(CASES)}")
    return name


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_transformers", description=(__doc__ or "").splitlines()[0]
    )
    # not choices: argparse would look for the whole default among them
    parser.add_argument("cases", nargs="*", type=_name, default=_DEFAULT, metavar="CASE")
    precisions = ["f32", "bf16"] if dnnl.supports("bf16") else ["f32"]
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=precisions,
        choices=tuple(CONTENDERS),
        help="default: the floating ones that this CPU has",
    )
    parser.add_argument("--vs", nargs="+", metavar="NAME", help="those of the precision run (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contender (default: 2)")
    parser.add_argument("--tune", default=Options.tune, help="where fmtprop's costs come from (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of every contender (default: 10)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs in a turn (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = parse(arguments)
    warn_if_busy(os.getloadavg()[0])
    use_threads(options.threads)

    bandwidth = cache(read_bytes_per_second)
    results: list[Result] = []
    failed = False
    for name in options.cases:
        for dtype in options.dtype:
            try:
                result = measure(name, dtype, options)
            except FmtpropError as error:
                print(f"\n{name}, {dtype}: {error}", file=sys.stderr)
                failed = True
                continue
            if not results:
                print(headline(result.benchmark.environment), flush=True)
            results.append(result)
            failed |= bool(result.benchmark.failures)
            print(render([result], bandwidth), flush=True)
            figures = [{"case": one.name, "dtype": one.dtype, **one.benchmark.to_dict()} for one in results]
            write_json(options.json, figures)
    if len(results) > 1:
        print("", render(results, bandwidth), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
