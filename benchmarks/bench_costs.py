"""How true costs are: what the model and the measurement say about the steps of a plan, and what they take in it.

``python -m benchmarks.bench_costs resnet50 mobilenet_v2 efficientnet_b0`` compiles each model with the policy
`propagate` in a process of its own, in an empty cache directory. For its oneDNN steps it prints the sum of the roofline
model's costs, of the measured ones (each distinct primitive timed alone, as it runs in a plan) and of the times in the
running plan (median of a profile), with Spearman's rank correlation between them, step by step. ``--steps`` adds a
table by op and implementation. The three are taken one after the other: on a machine that is busy, or changes its
clock, the sums differ by that too; the ranks hardly do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr

from benchmarks.common import add_options, headline, table, tell, write_json
from fmtprop import dnnl
from fmtprop.api import Options, compile_graph
from fmtprop.bench import Environment
from fmtprop.bench.processes import call_in_process
from fmtprop.capture import load
from fmtprop.errors import FmtpropError
from fmtprop.passes.target import Candidate
from fmtprop.runtime.plan import Step
from fmtprop.tuning import TunedCosts, Tuning, costs_for

__all__ = ["Calibration", "Row", "calibrate", "main"]


@dataclass(frozen=True)
class Row:
    """One step."""

    op: str
    impl: str
    #: `plan`, `measured`, `model`: seconds in the running plan, alone, and by the model
    plan: float
    measured: float
    model: float


@dataclass(frozen=True)
class Calibration:
    """The steps of one model."""

    model: str
    rows: tuple[Row, ...]
    tuning: Tuning

    def total(self, field: str) -> float:
        """Return a column's sum in seconds."""
        return sum(getattr(row, field) for row in self.rows)

    def rank(self, one: str, other: str) -> float:
        """Return the rank correlation of two columns."""
        columns = ([getattr(row, field) for row in self.rows] for field in (one, other))
        return float(spearmanr(*columns).statistic)


def calibrate(model: str, threads: int, repeats: int, budget: float | None) -> Calibration:
    """Compile one model in this process, and compare its costs.

    `model`: a built-in graph or a file.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ, FMTPROP_CACHE_DIR=directory):
        net = compile_graph(load(model), Options(policy="propagate"))
        weights = net.plan.constant_nbytes
        modelled = costs_for("model", weights_nbytes=weights)
        measured = costs_for("measure", weights_nbytes=weights, budget=budget)
        steps = [step for step in net.plan.steps if step.target == "onednn"]
        work = [(step.node, _candidate(step)) for step in steps if step.node.op != "reorder"]
        measured.prepare(work, [_formats(step) for step in steps if step.node.op == "reorder"])
        seconds = dict(zip(map(id, net.plan.steps), net.profile(repeats=repeats), strict=True))
        rows = tuple(
            Row(step.node.op, _candidate(step).impl, seconds[id(step)], _cost(measured, step), _cost(modelled, step))
            for step in steps
        )
    return Calibration(model, rows, measured.tuning)


def _candidate(step: Step) -> Candidate:
    """Return what was chosen, with the formats in which it really runs."""
    choice = step.node.choice
    operands = {name: access.desc for name, access in step.operands.items()}
    return Candidate(choice.target, choice.impl, operands, step.node.descs, handle=choice.handle)


def _formats(step: Step) -> Any:
    return step.operands["src"].desc, step.node.descs[0]


def _cost(costs: TunedCosts, step: Step) -> float:
    if step.node.op == "reorder":
        return costs.reorder(*_formats(step)) or 0.0
    return costs.node(step.node, _candidate(step))


def render(results: Sequence[Calibration], steps: bool) -> str:
    """Return the tables."""
    rows = []
    for one in results:
        sums = [f"{one.total(field) * 1e3:.2f}" for field in ("plan", "measured", "model")]
        ranks = [f"{one.rank(*pair):.3f}" for pair in (("measured", "plan"), ("model", "plan"), ("model", "measured"))]
        rows.append([one.model, str(len(one.rows)), *sums, *ranks, f"{one.tuning.seconds:.1f}"])
    columns = ["model", "steps", "in plan ms", "measured ms", "model ms"]
    columns += ["rank measured/plan", "model/plan", "model/measured", "measuring s"]
    parts = [table("Costs against times", columns, rows)]
    for one in results if steps else ():
        groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in one.rows:
            groups[row.op, row.impl].append(row)
        lines = [
            [f"{op} {impl}", str(len(some)), *(f"{sum(getattr(row, f) for row in some) * 1e6:.0f}" for f in _FIELDS)]
            for (op, impl), some in sorted(groups.items(), key=lambda item: -sum(row.plan for row in item[1]))
        ]
        parts += ["", table(one.model, ["what", "steps", "in plan µs", "measured µs", "model µs"], lines)]
    return "\n".join(parts)


_FIELDS = ("plan", "measured", "model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_costs", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50", "mobilenet_v2", "efficientnet_b0"])
    parser.add_argument("--repeats", type=int, default=30, help="profiled runs (default: 30)")
    parser.add_argument("--budget", type=float, help="seconds for measuring a model (default: no limit)")
    parser.add_argument("--steps", action="store_true", help="also a table by op and implementation")
    options = parser.parse_args(arguments)
    results: list[Calibration] = []
    failed = False
    for model in options.models:
        tell(model)
        try:
            job = partial(calibrate, model, options.threads, options.repeats, options.budget)
            results.append(call_in_process(model, job))
        except FmtpropError as error:
            print(f"\n{error}", file=sys.stderr)
            failed = True
    tell("")
    environment = Environment.capture(options.threads, {"oneDNN": ".".join(map(str, dnnl.lib().version))})
    print(headline(environment), "", render(results, options.steps), sep="\n")
    write_json(options.json, {"environment": asdict(environment), "results": [asdict(one) for one in results]})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
