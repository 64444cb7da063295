"""ONNX files beside the same networks from PyTorch: time and memory of loading, plans, and on request speed.

``python -m benchmarks.bench_onnx resnet50`` exports the network by both exporters of PyTorch. For each file it prints

- the time of ``fmtprop.load`` beside the creation of a session by ONNX Runtime, minima of turns in a process of its
  own, and of the first load in a process,
- the growth of the peak of the process's memory while it loads, beside the weights,
- the steps, reorders and costs of the plan beside those of the network from PyTorch.

``--race`` runs the plans in turns, each in a process of its own. The targets: loading takes at most 1.2 × as long as
ONNX Runtime, and at most the memory of the weights and 100 MB; plans are within 2 %.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_memory import MB, parse_status
from benchmarks.common import add_options, add_race_options, headline, table, tell, tell_turns, warn_if_busy, write_json
from benchmarks.models import TEN, Model, Network, model
from fmtprop.api import Options, compile_graph
from fmtprop.bench import Environment, compare_outputs
from fmtprop.bench.compare import tensors_of
from fmtprop.bench.contenders import race
from fmtprop.bench.peers import require
from fmtprop.bench.processes import Prepared, call_in_process
from fmtprop.capture import from_torch, load
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.report import TOLERANCES
from fmtprop.store import cache_directory

__all__ = ["Loading", "Planned", "export", "loading", "main", "planned", "render"]

EXPORTERS = ("torchscript", "dynamo")
MOST_TIMES_ONNXRUNTIME, ALLOWANCE, MOST_TIMES_TORCH = 1.2, 100 * MB, 1.02


@dataclass(frozen=True)
class Loading:
    """Time and memory of loading a file."""

    #: `ours`, `theirs`: seconds of ``fmtprop.load`` and of ONNX Runtime's creation of a session: the least of the turns
    ours: float
    theirs: float
    #: seconds of the first load in the process
    first: float
    #: `weights`, `grown`: bytes of the graph's constants, and growth of the peak of the process's memory in that first
    #: load
    weights: int
    grown: int


@dataclass(frozen=True)
class Planned:
    """The plan of a network."""

    #: op and implementation of each step, sorted: routes may differ in the order of independent steps
    steps: list[str]
    reorders: int
    cost: float


def _peak() -> int:
    return parse_status(Path("/proc/self/status").read_text(encoding="ascii", errors="replace"), "VmHWM")


def loading(path: Path, threads: int, rounds: int) -> Loading:
    """Load a file in this process, which should be fresh."""
    torch.set_num_threads(threads)
    ort = require("onnxruntime", "onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    require("onnx", "onnx")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = _peak()
    first, graph = _seconds(partial(load, path))
    grown = _peak() - before
    weights = sum(node.results[0].nbytes for node in graph.nodes() if node.op == "constant")
    del graph
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        ours = _seconds(partial(load, path))[0]
        theirs = _seconds(partial(ort.InferenceSession, str(path), options, providers=["CPUExecutionProvider"]))[0]
        times.append((ours, theirs))
    return Loading(min(ours for ours, _ in times), min(theirs for _, theirs in times), first, weights, grown)


def _seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def planned(graph: Callable[[], Graph], options: Options, threads: int) -> Planned:
    """Choose a plan in this process by costs alone, since times of close plans differ from race to race."""
    torch.set_num_threads(threads)
    plan = compile_graph(graph(), replace(options, confirm=False)).plan
    choices = [(step.node.op, step.node.choice) for step in plan.steps]
    steps = sorted(f"{op} {choice.target}:{choice.impl}" for op, choice in choices if choice is not None)
    return Planned(steps, len(plan.reorders), sum(choice.cost for _, choice in choices if choice is not None))


def export(model: Model | Network, exporter: str, path: Path) -> None:
    """Write the ONNX file of a network; for a process of its own."""
    module = model.module()
    if module is None:
        raise FmtpropError(f"{model}: a graph file has no module to export")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporters' own
        newer = {"dynamo": True, "external_data": False, "verbose": False}
        chosen = newer if exporter == "dynamo" else {"dynamo": False}
        torch.onnx.export(module(), tuple(model.inputs()), str(unfinished), **chosen)
    unfinished.rename(path)


def _from_torch(model: Model | Network) -> Graph:
    if isinstance(model, Network):
        return model.graph()
    module = model.module()
    if module is None:
        return model.graph()
    return from_torch(module(), tuple(model.inputs()), name=model.name)


def _prepared(graph: Callable[[], Graph], model: Model | Network, options: Options, threads: int) -> Prepared:
    """Run in a contender's process: compile, compare."""
    torch.set_num_threads(threads)
    inputs, module = model.inputs(), model.module()
    if module is None:
        raise FmtpropError(f"{model}: a graph file has no module to compare with")
    with torch.inference_mode():
        expected = tensors_of(module()(*inputs))
    run = partial(compile_graph(graph(), options), *inputs)
    return Prepared(run, compare_outputs(tensors_of(run()), expected, TOLERANCES[options.dtype]))


def render(name: str, loads: dict[str, Loading], plans: dict[str, Planned]) -> str:
    """Return the tables of one network."""
    rows = []
    for exporter, one in loads.items():
        verdicts = (one.ours <= MOST_TIMES_ONNXRUNTIME * one.theirs, one.grown <= one.weights + ALLOWANCE)
        times = [f"{1e3 * one.ours:.0f}", f"{1e3 * one.theirs:.0f}", f"{one.ours / one.theirs:.2f}", f"{one.first:.2f}"]
        sizes = [f"{one.weights / MB:.0f}", f"{one.grown / MB:.0f}"]
        rows.append([exporter, *times, *sizes, ", ".join("met" if met else "MISSED" for met in verdicts)])
    columns = ["file", "load, ms", "ONNX Runtime, ms", "ratio", "first, s", "weights, MB", "peak, MB", "time, memory"]
    lines = [table(f"{name}: loading", columns, rows)] if rows else []
    rows = []
    ours = plans["torch"]
    for route, plan in plans.items():
        ratio = plan.cost / ours.cost
        different = len(_difference(plan.steps, ours.steps)) + len(_difference(ours.steps, plan.steps))
        verdict = "" if route == "torch" else "met" if ratio <= MOST_TIMES_TORCH else "MISSED"
        rows.append([
            route, str(len(plan.steps)), str(plan.reorders), f"{1e3 * plan.cost:.3f}", f"{ratio:.3f}", str(different),
            verdict,
        ])  # fmt: skip
    lines.append(table(f"{name}: plans", ["route", "steps", "reorders", "cost, ms", "ratio", "other steps", ""], rows))
    return "\n".join(lines)


def _difference(some: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return what is in the first sequence and, so many times, not in the second."""
    left = list(others)
    return [one for one in some if one not in left or left.remove(one) is not None]


def _measure(one: Model | Network, given: argparse.Namespace, options: Options) -> dict[str, Any]:
    files = {
        name: cache_directory() / "benchmarks" / "onnx" / f"{one.name}-{name}-{torch.__version__}.onnx"
        for name in given.exporters
    }
    for name, path in files.items():
        if not path.exists():
            tell(f"{one}: {name} exports")
            call_in_process(f"{one}, {name}", partial(export, one, name, path))
    loads = {}
    for name, path in files.items():
        tell(f"{one}: loading {name}'s file")
        loads[name] = call_in_process(f"{one}, {name}", partial(loading, path, given.threads, given.turns))
    routes: dict[str, Callable[[], Graph]] = {"torch": partial(_from_torch, one)}
    routes |= {name: partial(load, path) for name, path in files.items()}
    plans = {}
    for name, route in routes.items():
        tell(f"{one}: compiling from {name}")
        plans[name] = call_in_process(f"{one}, {name}", partial(planned, route, options, given.threads))
    tell("")
    print(render(str(one), loads, plans), flush=True)
    if given.steps:
        for name, plan in plans.items():
            ours = plans["torch"].steps
            lines = [f"  {name}: only {step}" for step in _difference(plan.steps, ours)]
            lines += [f"  {name}: without {step}" for step in _difference(ours, plan.steps)]
            print(*lines, sep="\n")
    record = {"model": str(one), "loads": {n: asdict(v) for n, v in loads.items()}}
    return record | {"plans": {n: asdict(v) for n, v in plans.items()}} | _race(one, routes, given, options)


def _race(
    one: Model | Network, routes: dict[str, Callable[[], Graph]], given: argparse.Namespace, options: Options
) -> dict[str, Any]:
    """Run the plans in turns, and print the times."""
    if not given.race:
        return {}
    benchmark = race(
        one.graph(),
        [],
        reference="torch",
        threads=given.threads,
        rounds=given.rounds,
        repeats=given.repeats,
        seed=given.seed,
        inputs=one.inputs(),
        module=one.module(),
        others={name: partial(_prepared, route, one, options, given.threads) for name, route in routes.items()},
        progress=partial(tell_turns, one),
    )
    tell("")
    times = {entry.name: entry.latency for entry in benchmark.entries if entry.latency is not None}
    rows = [
        [name, f"{at.median:.2f}", f"{at.low:.2f} – {at.high:.2f}", f"{at.median / times['torch'].median:.3f}"]
        for name, at in times.items()
    ]
    title = f"{one}: {given.rounds} rounds of {given.repeats} runs"
    print(table(title, ["route", "ms", "IQR", "ratio"], rows), flush=True)
    print(*(f"{e.name}: {e.agreement.message}" for e in benchmark.entries if not e.agreement.passed), sep="\n")
    return {"race": {name: asdict(latency) for name, latency in times.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_onnx", description=str(__doc__).splitlines()[0])
    add_options(parser, TEN)
    add_race_options(parser, Options.tune)
    parser.add_argument("--exporters", nargs="+", default=list(EXPORTERS), choices=EXPORTERS)
    parser.add_argument("--turns", type=int, default=7, help="loads of each file (default: 7)")
    parser.add_argument("--steps", action="store_true", help="print the steps that only one route has")
    parser.add_argument("--race", action="store_true", help="run the plans in turns, too")
    given = parser.parse_args(arguments)
    options = Options(dtype=given.dtype, tune=given.tune, confirm=given.race)
    warn_if_busy(os.getloadavg()[0])
    print(headline(Environment.capture(given.threads, {})), flush=True)
    records, failed = [], False
    for name in given.models:
        try:
            records.append(_measure(model(name), given, options))
        except FmtpropError as error:
            print(f"\n{name}: {error}", file=sys.stderr)
            failed = True
            continue
        write_json(given.json, records)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
