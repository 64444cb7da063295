"""The cost of a call of a captured graph that is a plan, against a backend that only makes results.

``python -m benchmarks.bench_region`` compiles stacks of convolution, batch normalization and ReLU with
``torch.compile(backend="fmtprop")`` and compares their outputs with PyTorch's. Then it compiles them again with
primitives that do nothing (:func:`benchmarks.bench_overhead.nothing`), and with a backend whose calls do nothing but
make an uninitialised result, as the last operator of PyTorch would. Both have the same guards of TorchDynamo in front
of them. The difference is ours: changes of weights are looked for, inputs are checked, results are made, memories are
pointed at them. It grows with the parameters (each is looked at), not with the steps.

Calls take turns, and their processor time is counted, in one thread. A missed target does not change the exit code.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from benchmarks.bench_overhead import nothing
from benchmarks.common import headline, table, tell, write_json
from fmtprop import dnnl
from fmtprop.api import Options
from fmtprop.bench import Agreement, Environment, Quartiles, compare_outputs
from fmtprop.bench.contenders import contender
from fmtprop.bench.interleave import take_turns, uncollected
from fmtprop.bench.processes import call_in_process
from fmtprop.dynamo.backend import regions_by
from fmtprop.errors import FmtpropError
from fmtprop.report import TOLERANCES

__all__ = ["Overhead", "main"]

#: microseconds that a small region may add
TARGET = 15.0

#: the target is one of small regions
_FEW_TENSORS = 30


@dataclass(frozen=True)
class Overhead:
    """Cost of a call of one stack."""

    #: `layers`, `tensors`, `steps`: layers, their parameters and buffers, and steps of the plan
    layers: int
    tensors: int
    steps: int
    #: `other`, `ours`, `added`: microseconds of a call of the other backend and of ours, and the difference round by
    #: round; ``None`` if the outputs are wrong
    other: Quartiles | None
    ours: Quartiles | None
    added: Quartiles | None
    agreement: Agreement

    @property
    def met(self) -> bool | None:
        """Whether a small region adds at most the target; ``None`` without a figure, or for a large one."""
        if self.added is None or self.tensors > _FEW_TENSORS:
            return None
        return self.added.median <= TARGET


def stack(layers: int) -> nn.Module:
    """Return a stack of small layers, in eval mode."""
    torch.manual_seed(0)
    parts = ((nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*(one for part in parts for one in part)).eval()


def measure(layers: int, rounds: int, repeats: int) -> Overhead:
    """Measure one stack in this process."""
    torch.set_num_threads(1)
    module, x = stack(layers), torch.randn(1, 8, 64, 64)
    tensors = len([*module.parameters(), *module.buffers()])
    regions: list[Any] = []
    with torch.no_grad():
        expected = module(x)
        outputs = torch.compile(module, backend=regions_by(Options(tune="model"), regions.append))(x)
        agreement = compare_outputs(outputs, expected, TOLERANCES["f32"])
        net = regions[0].outcomes[0].net
        if net is None:
            raise FmtpropError(f"PyTorch runs a stack of {layers} layers: {regions[0].outcomes[0].reason}")
        if not agreement.passed:
            return Overhead(layers, tensors, len(net.plan.steps), None, None, None, agreement)
        torch._dynamo.reset()
        options = Options(tune="model", confirm=False, verify="off")
        with mock.patch.object(dnnl, "hot_execute", nothing()):
            ours = torch.compile(module, backend=regions_by(options, regions.append))
            ours(x)  # the calls are built in the first run, and kept

        def makes_results(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            return lambda *args: (expected.new_empty(expected.shape),)

        other = torch.compile(stack(layers), backend=makes_results)
        other(x)
        turns = {"other": partial(_turn, other, x, repeats), "ours": partial(_turn, ours, x, repeats)}
        with uncollected():
            times = take_turns(turns, rounds, seed=0)
    added = [mine - theirs for mine, theirs in zip(times["ours"], times["other"], strict=True)]
    figures = map(Quartiles.of, (times["other"], times["ours"], added))
    return Overhead(layers, tensors, len(net.plan.steps), *figures, agreement)


def _turn(run: Callable[..., Any], x: torch.Tensor, repeats: int) -> float:
    """Return the microseconds of processor time of a call."""
    run(x)
    start = time.process_time()
    for _ in range(repeats):
        run(x)
    return (time.process_time() - start) / repeats * 1e6


def render(results: Sequence[Overhead]) -> str:
    """Return the table and what is wrong."""
    rows, wrong = [], []
    for one in results:
        if one.other is None or one.ours is None or one.added is None:
            wrong.append(f"{one.layers} layers: WRONG OUTPUTS, no figures: {one.agreement.message}")
            continue
        verdict = {True: f"<= {TARGET:.0f}: met", False: f"<= {TARGET:.0f}: MISSED", None: ""}[one.met]
        added = f"{one.added.median:.1f} [{one.added.low:.1f}, {one.added.high:.1f}]"
        counts = [str(one.layers), str(one.tensors), str(one.steps)]
        rows.append([*counts, f"{one.other.median:.1f}", f"{one.ours.median:.1f}", added, verdict])
    columns = ["layers", "tensors", "steps", "other µs", "ours µs", "added [quartiles]", "target"]
    return "\n".join([table("A call of a compiled region", columns, rows), *wrong])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_region", description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="*", type=int, default=[1, 4, 40], help="layers of each stack (1 4 40)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=500, help="calls in a turn (default: 500)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    options = parser.parse_args(arguments)
    results: list[Overhead] = []
    for layers in options.layers:
        tell(f"{layers} layers")
        results.append(call_in_process(f"{layers} layers", partial(measure, layers, options.rounds, options.repeats)))
    tell("")
    environment = Environment.capture(1, contender("fmtprop").versions())
    print(headline(environment), "", render(results), sep="\n")
    rows = [{**asdict(one), "met": one.met} for one in results]
    write_json(options.json, {"environment": asdict(environment), "results": rows})
    return int(not all(one.agreement.passed for one in results))


if __name__ == "__main__":
    sys.exit(main())
