"""Latency of whole models: fmtprop beside PyTorch, ONNX Runtime and OpenVINO.

``python -m benchmarks.bench_models resnet50 --batch 1 16`` compiles the same weights for every contender, compares all
outputs with PyTorch's f32, and times those that agree, alternately and each in a process of its own
(:mod:`fmtprop.bench.processes` says why). Ratios are taken within a round; their quartiles over the rounds are the
spread. A contender whose outputs are wrong has no figures, and without fmtprop's there are no ratios. fmtprop can run
against itself: ``--vs fmtprop-propagate fmtprop-plain``.

The targets of the project are printed beside. They are aims, not tests: a missed one does not change the exit code,
which is 1 only where fmtprop's own outputs are wrong or a model could not be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.common import add_options, add_race_options, headline, table, tell, tell_turns, warn_if_busy, write_json
from benchmarks.flops import count_flops
from benchmarks.models import TEN, Model, Network, model
from benchmarks.peak import PEAK, prepare_peak
from benchmarks.targets import Result, geometric_mean, judge, judge_all
from fmtprop import dnnl
from fmtprop.api import Options
from fmtprop.bench import PEERS, Quartiles
from fmtprop.bench.contenders import REFERENCE, contender, race
from fmtprop.errors import FmtpropError

__all__ = ["main", "render", "render_all"]

DEFAULT_CONTENDERS = ("torch", "torch-channels-last", "inductor", "onnxruntime", "openvino")


def measure(model: Model | Network, arguments: argparse.Namespace, options: Options) -> Result:
    """Race all contenders on one model."""
    graph = model.graph()
    benchmark = race(
        graph,
        [contender(name, options) for name in dict.fromkeys([REFERENCE, *arguments.vs])],
        threads=arguments.threads,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        seed=arguments.seed,
        inputs=model.inputs(),
        module=model.module(),
        onnx=model.onnx,
        others={PEAK: partial(prepare_peak, options.dtype, arguments.threads)} if arguments.peak else None,
        progress=partial(tell_turns, model),
    )
    return Result(model.name, model.batch, options.dtype, count_flops(graph), benchmark)


def render(result: Result) -> str:
    """Return a table of one model, the shares of the peak, what is wrong, and the verdicts."""
    benchmark = result.benchmark
    rows = []
    for entry in benchmark.entries:
        latency = entry.latency
        if entry.name == PEAK:
            continue
        if latency is None:
            error = f"{entry.agreement.error:.0e}" if entry.agreement.ran else ""
            rows.append([entry.name, "not timed", "", "", error])
            continue
        spread = f"{latency.low:.2f} – {latency.high:.2f}"
        ratio = _quartiles(result.times_ours(entry))
        rows.append([entry.name, f"{latency.median:.2f}", spread, ratio, f"{entry.agreement.error:.0e}"])
    title = f"{result.model}, batch {result.batch}: {benchmark.rounds} rounds of {benchmark.repeats} runs"
    lines = [table(title, ["contender", "ms (median)", "IQR", "× fmtprop [quartiles]", "error"], rows)]
    lines += [f"{entry.name}: {entry.agreement.message}" for entry in benchmark.entries if not entry.agreement.passed]
    if result.best_peer is not None:
        lines.append(f"best peer: {result.best_peer.name}")
    if result.peak is not None:
        share = _quartiles(result.share_of_peak) or "not measured"
        lines.append(
            f"peak {result.peak / 1e9:.0f} GFLOP/s; {result.flops / 1e9:.2f} GFLOP a run; fmtprop's share: {share}"
        )
    return "\n".join([*lines, *map(str, judge(result))])


def render_all(results: Sequence[Result]) -> str:
    """Return a table of all models of one batch: ratios to every contender and to the best peer, and their means."""
    names = [entry.name for entry in results[0].benchmark.entries if entry.name not in (REFERENCE, PEAK)]
    rows = []
    for result in results:
        ours, best = result.benchmark[REFERENCE].latency, result.best_peer
        cells = [_median(result.times_ours(result.benchmark[name])) for name in names]
        peers = [_median(result.times_ours(best)), best.name] if best else ["", ""]
        rows.append([result.model, f"{ours.median:.2f}" if ours else "", *cells, *peers])
    means = [_median(geometric_mean(results, name)) for name in names]
    rows.append(["geometric mean", "", *means, _median(geometric_mean(results)), ""])
    title = f"batch {results[0].batch}, {results[0].dtype}: times in multiples of fmtprop's"
    verdict = judge_all(results)
    text = table(title, ["model", "fmtprop, ms", *names, "best", "peer"], rows)
    return f"{text}\n{verdict}" if verdict else text


def _median(figures: Quartiles | None) -> str:
    return "" if figures is None else f"{figures.median:.2f}"


def _quartiles(figures: Quartiles | None) -> str:
    return "" if figures is None else f"{figures.median:.2f} [{figures.low:.2f}, {figures.high:.2f}]"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_models", description=__doc__.splitlines()[0])
    add_options(parser, TEN)
    add_race_options(parser, Options.tune)
    known = f"of {REFERENCE}-VALUE (a policy, tune or dtype), {', '.join(PEERS)}"
    parser.add_argument("--vs", nargs="+", default=list(DEFAULT_CONTENDERS), metavar="NAME", help=known)
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="batch sizes (default: 1)")
    parser.add_argument("--policy", default=Options.policy, help="fmtprop's policy (default: %(default)s)")
    parser.add_argument("--peak", action="store_true", help="race oneDNN's best kernel too; print shares of its speed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parsed = _parse(arguments)
    try:
        options = Options(dtype=parsed.dtype, policy=parsed.policy, tune=parsed.tune)
        for name in parsed.vs:
            contender(name, options)  # a misspelt name is found before minutes of measurement
        models = [[model(name, batch) for name in parsed.models] for batch in parsed.batch]
    except FmtpropError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dtype == "bf16" and not dnnl.supports("bf16"):
        print(f"skipped: oneDNN has no bf16 on this CPU ({dnnl.lib().isa})")
        return 0
    warn_if_busy(os.getloadavg()[0])
    failed, records, shown = False, [], ""
    for group in models:
        results = []
        for one in group:
            try:
                result = measure(one, parsed, options)
            except FmtpropError as error:
                print(f"\n{one}: {error}", file=sys.stderr)
                failed = True
                continue
            tell("")
            head = headline(result.benchmark.environment)
            print("" if head == shown else f"{head}\n", render(result), sep="\n", flush=True)
            shown = head
            failed |= not result.benchmark[REFERENCE].agreement.passed
            results.append(result)
            records.append(_record(result))
            write_json(parsed.json, records)  # after each model: hours of figures survive the last one's failure
        if len(results) > 1:
            print(f"\n{render_all(results)}", flush=True)
    return int(failed)


def _record(result: Result) -> dict[str, Any]:
    best = result.best_peer
    verdicts = [{"target": verdict.wording, "met": verdict.met} for verdict in judge(result)]
    return {
        "model": result.model,
        "batch": result.batch,
        "dtype": result.dtype,
        "flops": result.flops,
        "peak_flops": result.peak,
        "best_peer": best.name if best else None,
        **result.benchmark.to_dict(),
        "targets": verdicts,
    }


if __name__ == "__main__":
    sys.exit(main())
