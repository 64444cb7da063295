"""Images per second: streams side by side against one run after the other, and against OpenVINO's throughput mode.

``python -m benchmarks.bench_throughput resnet50 mobilenet_v2`` compares, with the same number of threads in all:
fmtprop with a single-thread stream for each, fmtprop with one run on all threads (latency), OpenVINO with its
THROUGHPUT hint and OpenVINO for latency; and fmtprop with one stream on one thread. Each has a process of its own; in
each round everyone has one turn, a stretch of images, in a new random order. Ratios are taken within a round, and their
quartiles over the rounds are the spread. A contender whose outputs are wrong has no figures. A missed target does not
change the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.common import add_options, headline, table, tell, warn_if_busy, write_json
from benchmarks.models import Model
from fmtprop.api import Options, compile_graph
from fmtprop.bench import Benchmark, Quartiles, compare_outputs
from fmtprop.bench.environment import Environment
from fmtprop.bench.peers import OpenVINO, export_onnx, require
from fmtprop.bench.processes import Prepared, interleave_processes
from fmtprop.capture import GraphModule
from fmtprop.errors import FmtpropError
from fmtprop.report import TOLERANCES

__all__ = ["STREAMS", "contenders", "main", "rates", "render"]

STREAMS, LATENCY, SINGLE = "fmtprop streams", "fmtprop latency", "fmtprop 1 stream"
PEER, PEER_LATENCY = "openvino throughput", "openvino latency"

#: model -> at least this many times OpenVINO's images per second
TARGETS = {"resnet50": 1.0, "mobilenet_v2": 1.0}


def contenders(model: str, images: int, threads: int) -> dict[str, Callable[[], Prepared]]:
    """Return everyone, by name, to be prepared in a process each; a run is a stretch of images."""
    return {
        STREAMS: partial(compiled_streams, model, images, threads, threads),
        LATENCY: partial(compiled_streams, model, images, threads, None),
        SINGLE: partial(compiled_streams, model, images, threads, 1),
        PEER: partial(_openvino_throughput, model, images, threads),
        PEER_LATENCY: partial(_openvino_latency, model, images, threads),
    }


def _prepared(
    model: str, run_all: Callable[[list[list[torch.Tensor]]], list[Any]], images: int, versions: dict[str, str]
) -> Prepared:
    """Compare the outputs for two inputs, in order, then time the first input again and again."""
    module, inputs = GraphModule(Model(model).graph()), Model(model).inputs()
    pair = [inputs, [x.flip(-1) for x in inputs]]
    with torch.inference_mode():
        expected = [module(*one) for one in pair]
    agreement = compare_outputs(run_all(pair), expected, TOLERANCES["f32"])
    return Prepared(lambda: run_all([inputs] * images), agreement, versions)


def compiled_streams(model: str, images: int, threads: int, streams: int | None) -> Prepared:
    torch.set_num_threads(threads)
    graph = Model(model).graph()
    graph.structure = ""
    net = compile_graph(graph, Options())
    if streams is None:
        return _prepared(model, lambda items: [net(*item) for item in items], images, {"torch": torch.__version__})
    pool = net.throughput(streams)  # ends with the process
    return _prepared(
        model, lambda items: list(pool.map(*zip(*items, strict=True))), images, {"torch": torch.__version__}
    )


def _openvino_throughput(model: str, images: int, threads: int) -> Prepared:
    peer = OpenVINO()
    ov, versions = require("openvino", peer.name), peer.versions()
    core = ov.Core()
    config = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(str(_onnx(model))), "CPU", config)
    queue = ov.AsyncInferQueue(compiled)
    results: dict[int, Any] = {}
    # like everyone's, the outputs are the caller's: the request's own memory is overwritten by the next image
    queue.set_callback(lambda request, k: results.update({k: [o.data.copy() for o in request.output_tensors]}))

    def run_all(items: list[list[torch.Tensor]]) -> list[Any]:
        results.clear()
        for index, item in enumerate(items):
            queue.start_async([tensor.numpy() for tensor in item], index, share_inputs=True)
        queue.wait_all()
        return [[torch.from_numpy(array) for array in results[index]] for index in range(len(items))]

    return _prepared(model, run_all, images, versions)


def _openvino_latency(model: str, images: int, threads: int) -> Prepared:
    peer = OpenVINO(onnx=_onnx(model))
    run = peer.prepare(GraphModule(Model(model).graph()), Model(model).inputs(), threads)
    return _prepared(model, lambda items: [run(*item) for item in items], images, peer.versions())


def _onnx(model: str) -> Any:
    """Return the model's ONNX file, which is made when it is first asked for."""
    path = Model(model).onnx
    if path is None:
        raise FmtpropError(f"{model}: OpenVINO is given built-in models only; choose one of those")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        export_onnx(GraphModule(Model(model).graph()), Model(model).inputs(), path)
    return path


def rates(benchmark: Benchmark, images: int) -> dict[str, tuple[Quartiles, Quartiles | None]]:
    """Return images per second by name, and how many times the peer's they are, for all that were timed."""
    found = {}
    for entry in benchmark.entries:
        if entry.milliseconds:
            found[entry.name] = (Quartiles.of([images * 1e3 / ms for ms in entry.milliseconds]), entry.speedup)
    return found


def render(model: str, benchmark: Benchmark, images: int) -> str:
    """Return the table of a model and what is wrong."""
    rows = []
    for name, (rate, ratio) in rates(benchmark, images).items():
        compared = f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio is not None else ""
        verdict = ""
        if name == STREAMS and ratio is not None and model in TARGETS:
            verdict = f"≥ {TARGETS[model]:g}: {'met' if ratio.median >= TARGETS[model] else 'MISSED'}"
        rows.append([name, f"{rate.median:.1f}", f"[{rate.low:.1f}, {rate.high:.1f}]", compared, verdict])
    columns = ["", "images/s", "quartiles", f"× {PEER}", "target"]
    return "\n".join([table(model, columns, rows), *(f"{model}: {text}" for text in benchmark.failures)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_throughput", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50", "mobilenet_v2"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=40, help="images of a turn (default: 40)")
    options = parser.parse_args(arguments)
    if options.images < 1:
        parser.error(f"--images is {options.images}, must be at least 1")
    environment = Environment.capture(options.threads)
    warn_if_busy(os.getloadavg()[0])
    results: dict[str, Benchmark] = {}
    for model in options.models:
        results[model] = interleave_processes(
            contenders(model, options.images, options.threads),
            reference=PEER,
            rounds=options.rounds,
            repeats=1,
            warmup=1,
            threads=options.threads,
            progress=lambda what, done, total, model=model: tell(f"{model}: {what} {done}/{total}"),
        )
    tell("")
    print(headline(environment))
    for model, benchmark in results.items():
        print("", render(model, benchmark, options.images), sep="\n")
    rows = [{"model": model, "images": options.images, **one.to_dict()} for model, one in results.items()]
    write_json(options.json, {"environment": asdict(environment), "results": rows})
    return int(any(not e.agreement.passed for one in results.values() for e in one.entries if e.agreement.ran))


if __name__ == "__main__":
    sys.exit(main())
