"""Latency of whole models: fmtprop beside PyTorch, ONNX Runtime and OpenVINO.

``python -m benchmarks.bench_models resnet50 --batch 1 4`` compiles the same weights for every contender, compares all
outputs with PyTorch's f32, and times those that agree, alternately and each in a process of its own
(:mod:`fmtprop.bench.processes` says why). Ratios are taken within a round; their quartiles over the rounds are the
spread. A contender whose outputs are wrong has no figures, and without fmtprop's there are no ratios.

The targets of the project are printed beside. They are aims, not tests: a missed one does not change the exit code,
which is 1 only where fmtprop's own outputs are wrong or a model could not be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.common import add_options, batched, headline, table, tell, warn_if_busy, write_json
from fmtprop.bench import Benchmark, Entry, Quartiles
from fmtprop.bench.contenders import OURS, REFERENCE, contender, race_in_processes
from fmtprop.bench.peers import PEERS
from fmtprop.errors import FmtpropError

__all__ = ["TARGETS", "Target", "Verdict", "judge", "main", "times_ours"]

DEFAULT_CONTENDERS = ("torch", "torch-channels-last", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Target:
    """What fmtprop's latency should be, relative to a peer's.

    Parameters
    ----------
    model : str
        The built-in graph.
    batch : int
        Images at a time.
    peer : str
        The contender.
    factor : float
        fmtprop's time is to be at most this multiple of the peer's.
    wording : str
        As the project states it.
    """

    model: str
    batch: int
    peer: str
    factor: float
    wording: str


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met.

    Parameters
    ----------
    target : Target
        The target.
    measured : Quartiles or None
        fmtprop's time over the peer's, round by round; ``None`` if one of them has no figures.
    """

    target: Target
    measured: Quartiles | None

    @property
    def met(self) -> bool | None:
        """Whether the median is within the target; ``None`` if there is none."""
        return None if self.measured is None else self.measured.median <= self.target.factor

    def __str__(self) -> str:
        if self.measured is None:
            return f"target {self.target.wording}: not measured"
        word = "met" if self.met else "MISSED"
        spread = f"[{self.measured.low:.3f}, {self.measured.high:.3f}]"
        return f"target {self.target.wording}: {word}, fmtprop takes {self.measured.median:.3f} {spread} × its time"


TARGETS = (
    Target("resnet50", 1, "openvino", 1.15, "at most 1.15 × OpenVINO"),
    Target("resnet50", 1, "onnxruntime", 1.1, "at most 1.1 × ONNX Runtime"),
    Target("resnet50", 1, "torch", 1 / 1.4, "at least 1.4 × faster than torch eager"),
)


def times_ours(benchmark: Benchmark, entry: Entry) -> Quartiles | None:
    """Return a contender's time in multiples of fmtprop's, over the rounds.

    Parameters
    ----------
    benchmark : Benchmark
        Where fmtprop's figures are.
    entry : Entry
        The contender.

    Returns
    -------
    Quartiles or None
        ``None`` unless both agreed with PyTorch and were timed.
    """
    ours = benchmark[REFERENCE]
    if not (ours.agreement.passed and entry.agreement.passed and ours.milliseconds and entry.milliseconds):
        return None
    return Quartiles.of([theirs / own for theirs, own in zip(entry.milliseconds, ours.milliseconds, strict=True)])


def judge(model: str, batch: int, benchmark: Benchmark) -> list[Verdict]:
    """Compare a benchmark with the targets for its model.

    Parameters
    ----------
    model : str
        The built-in graph.
    batch : int
        Images at a time.
    benchmark : Benchmark
        The result.

    Returns
    -------
    list of Verdict
        One for each target whose peer took part.
    """
    entries = {entry.name: entry for entry in benchmark.entries}
    # an entry's speed-up is fmtprop's time over its own: what the targets are about
    return [
        Verdict(target, entries[target.peer].speedup)
        for target in TARGETS
        if (target.model, target.batch) == (model, batch) and target.peer in entries
    ]


def render(model: str, batch: int, benchmark: Benchmark) -> str:
    """Return one model's table, the reasons of absences, and the verdicts."""
    rows = []
    for entry in benchmark.entries:
        if entry.latency is None:
            rows.append([entry.name, "not timed", "", "", f"{entry.agreement.error:.0e}"])
            continue
        spread = entry.latency.high - entry.latency.low
        ratio = times_ours(benchmark, entry)
        error = f"{entry.agreement.error:.0e}"
        rows.append([entry.name, f"{entry.latency.median:.3f}", f"{spread:.3f}", _quartiles(ratio), error])
    title = f"{model}, batch {batch}: {benchmark.rounds} rounds of {benchmark.repeats} runs"
    lines = [table(title, ["contender", "ms (median)", "IQR", "× fmtprop [quartiles]", "error"], rows)]
    lines += [f"{entry.name}: {entry.agreement.message}" for entry in benchmark.entries if not entry.agreement.passed]
    return "\n".join([*lines, *map(str, judge(model, batch, benchmark))])


def _quartiles(figures: Quartiles | None) -> str:
    return "" if figures is None else f"{figures.median:.2f} [{figures.low:.2f}, {figures.high:.2f}]"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_models", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50"])
    known = ", ".join([*(name for name in OURS if name != REFERENCE), *PEERS])
    parser.add_argument("--vs", nargs="+", default=list(DEFAULT_CONTENDERS), metavar="NAME", help=f"of {known}")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="batch sizes (default: 1)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs in a turn (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    failed, results, shown = False, [], ""
    try:
        for name in options.vs:
            contender(name)  # a misspelt name is found before minutes of measurement
    except FmtpropError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warn_if_busy(os.getloadavg()[0])
    for model in options.models:
        for batch in options.batch:
            try:
                benchmark = race_in_processes(
                    batched(model, batch),
                    options.vs,
                    threads=options.threads,
                    rounds=options.rounds,
                    repeats=options.repeats,
                    seed=options.seed,
                    progress=partial(_tell_progress, model),
                )
            except FmtpropError as error:
                print(f"\n{model}, batch {batch}: {error}", file=sys.stderr)
                failed = True
                continue
            tell("")
            head = headline(benchmark.environment)
            print("" if head == shown else f"{head}\n", render(model, batch, benchmark), sep="\n", flush=True)
            shown = head
            failed |= not benchmark[REFERENCE].agreement.passed
            results.append(_record(model, batch, benchmark))
            write_json(options.json, results)  # after each model: hours of figures survive the last one's failure
    return int(failed)


def _tell_progress(model: str, what: str, done: int, total: int) -> None:
    tell(f"{model}: {what} ({done} of {total} turns)")


def _record(model: str, batch: int, benchmark: Benchmark) -> dict[str, object]:
    verdicts = [{"target": verdict.target.wording, "met": verdict.met} for verdict in judge(model, batch, benchmark)]
    return {"model": model, "batch": batch, **benchmark.to_dict(), "targets": verdicts}


if __name__ == "__main__":
    sys.exit(main())
