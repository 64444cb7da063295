"""Quantized ONNX files: fmtprop, its own f32 on the same file, ONNX Runtime and OpenVINO, a process each, in turns.

``python -m benchmarks.bench_int8 resnet50 bert_base`` makes a file of each network by ONNX Runtime's static quantizer
(per channel, sources in u8 or, with ``--signed``, s8), or takes a given ``.onnx`` file. Outputs are compared first with
the file's meaning: ONNX Runtime without its optimiser. A quantized network amplifies a rounding that differs by a step,
so the error that counts is that of all numbers together, and ONNX Runtime's own optimiser has one, too: at most twice
its error, or 2 %. ``fmtprop-f32`` is the same file without roundings (``keep_float=["*"]``), compared with PyTorch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_onnx import export
from benchmarks.common import add_options, add_race_options, headline, table, tell, tell_turns, warn_if_busy, write_json
from benchmarks.models import Model, Network, model
from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench import Environment
from fmtprop.bench.compare import Agreement, tensors_of
from fmtprop.bench.interleave import Benchmark
from fmtprop.bench.peers import OnnxRuntime, OpenVINO, require
from fmtprop.bench.processes import Prepared, call_in_process, interleave_processes
from fmtprop.capture import load
from fmtprop.errors import FmtpropError
from fmtprop.store import cache_directory

__all__ = ["SIX", "file_of", "main", "quantize"]

#: what int8 is judged by
SIX = ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "bert_base", "vit_b16")

#: inputs that give the ranges of activations
_CALIBRATION_RUNS = 4

#: largest error relative to the results' norm, and in multiples of the error of ONNX Runtime's own optimiser
_ERROR, _TIMES_ITS_ERROR = 0.02, 2.0

OURS, FLOAT = "fmtprop", "fmtprop-f32"


def file_of(one: Model | Network, *, signed: bool) -> Path:
    """Return where a network's quantized file is kept, or will be."""
    kind = "s8s8" if signed else "u8s8"
    return cache_directory() / "benchmarks" / "int8" / f"{one.name}-{kind}-{torch.__version__}.onnx"


def quantize(one: Model | Network, path: Path, *, signed: bool) -> None:
    """Write the quantized file of a network; for a process of its own."""
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    real, prepared = path.with_suffix(".f32"), path.with_suffix(".prepared")
    export(one, "torchscript", real)
    quant_pre_process(str(real), str(prepared), skip_symbolic_shape=True)

    class Reader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = _feeds(prepared, one.inputs())

        def get_next(self) -> dict[str, Any] | None:
            return next(self.feeds, None)

    unfinished = path.with_suffix(".part")
    q.quantize_static(
        str(prepared),
        str(unfinished),
        Reader(),
        quant_format=q.QuantFormat.QDQ,
        per_channel=True,
        activation_type=q.QuantType.QInt8 if signed else q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8,
    )
    unfinished.rename(path)
    for file in (real, prepared):
        file.unlink()


def _feeds(path: Path, example: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    ort = require("onnxruntime", "onnxruntime")
    names = [one.name for one in ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()]
    for seed in range(_CALIBRATION_RUNS):
        generator = torch.Generator().manual_seed(seed)
        drawn = (_another(tensor, generator) for tensor in example)
        yield {name: tensor.numpy() for name, tensor in zip(names, drawn, strict=True)}


def _another(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other numbers of a tensor's kind: tokens stay tokens."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator)
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)


def _expected(path: Path, inputs: Sequence[torch.Tensor], *, optimised: bool) -> list[torch.Tensor]:
    ort = require("onnxruntime", "onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimised:  # its optimiser rounds elsewhere
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {one.name: tensor.numpy() for one, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feed)]


def _error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm, the worst of all results."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


def _prepared(
    name: str, path: Path, inputs: list[torch.Tensor], expected: list[torch.Tensor], limit: float, options: Options
) -> Prepared:
    """Run in a contender's process: compile, compare."""
    threads = torch.get_num_threads()
    run: Callable[..., Any]
    if name.startswith(OURS):
        run = compile_graph(load(path), options)
    else:
        peer = {"onnxruntime": OnnxRuntime, "openvino": OpenVINO}[name](onnx=path)
        run = peer.prepare(torch.nn.Identity(), inputs, threads)
    error = _error(tensors_of(run(*inputs)), expected)
    message = "" if error <= limit else f"the results' error is {error:.2g} of their norm, must be at most {limit:.2g}"
    return Prepared(partial(run, *inputs), Agreement(error <= limit, error, limit, message))


def _within(threads: int, *arguments: Any) -> Prepared:
    torch.set_num_threads(threads)
    return _prepared(*arguments)


def _race(path: Path, inputs: list[torch.Tensor], given: argparse.Namespace) -> Benchmark:
    expected = _expected(path, inputs, optimised=False)
    limit = max(_ERROR, _TIMES_ITS_ERROR * _error(_expected(path, inputs, optimised=True), expected))
    ours = Options(dtype=given.dtype, tune=given.tune)
    options = {name: replace(ours, keep_float=["*"]) if name == FLOAT else ours for name in given.entrants}
    floats = compile_graph(load(path), Options(target="mkldnn", keep_float=["*"]))(*inputs)
    wanted = {name: (tensors_of(floats), _ERROR) if name == FLOAT else (expected, limit) for name in options}
    prepares = {
        name: partial(_within, given.threads, name, path, inputs, *wanted[name], one) for name, one in options.items()
    }
    return interleave_processes(
        prepares,
        reference=OURS,
        rounds=given.rounds,
        repeats=given.repeats,
        seed=given.seed,
        threads=given.threads,
        progress=partial(tell_turns, path.stem),
    )


def _rows(benchmark: Benchmark) -> list[list[str]]:
    rows, ours = [], benchmark[OURS].latency
    for entry in benchmark.entries:
        at, times = entry.latency, ["", "", ""]
        if at is not None and ours is not None:
            times = [f"{at.median:.2f}", f"{at.low:.2f} – {at.high:.2f}", f"{ours.median / at.median:.2f}"]
        rows.append([entry.name, *times, f"{entry.agreement.error:.1e}", entry.agreement.message])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_int8", description=str(__doc__).splitlines()[0])
    add_options(parser, SIX)
    add_race_options(parser, Options.tune)
    entrants = (OURS, FLOAT, "onnxruntime", "openvino")
    parser.add_argument("--entrants", nargs="+", default=list(entrants), choices=entrants)
    parser.add_argument("--signed", action="store_true", help="sources are s8, not u8")
    parser.add_argument("--make", action="store_true", help="only make the files")
    given = parser.parse_args(arguments)
    warn_if_busy(os.getloadavg()[0])
    torch.set_num_threads(given.threads)
    print(headline(Environment.capture(given.threads, {})), flush=True)
    records, ratios, failed = [], [], False
    for name in given.models:
        path = Path(name)
        try:
            if path.suffix == ".onnx":
                inputs = random_inputs(load(path))
            else:
                one = model(name)
                path, inputs = file_of(one, signed=given.signed), one.inputs()
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    tell(f"{one}: quantizing")
                    call_in_process(name, partial(quantize, one, path, signed=given.signed))
            if given.make:
                continue
            benchmark = _race(path, inputs, given)
        except FmtpropError as error:
            print(f"\n{name}: {error}", file=sys.stderr)
            failed = True
            continue
        tell("")
        print(table(path.stem, ["", "ms", "IQR", "ours / it", "error", ""], _rows(benchmark)), flush=True)
        times = {entry.name: entry.latency.median for entry in benchmark.entries if entry.latency is not None}
        peers = [time for each, time in times.items() if not each.startswith(OURS)]
        if peers:
            ratios.append(times[OURS] / min(peers))
        failed = failed or not all(entry.agreement.passed for entry in benchmark.entries if entry.name.startswith(OURS))
        records.append({"file": path.stem, "entries": [asdict(entry) for entry in benchmark.entries]})
        write_json(given.json, records)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"time over the best other runtime: {', '.join(f'{r:.2f}' for r in ratios)}; geometric mean {mean:.2f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
