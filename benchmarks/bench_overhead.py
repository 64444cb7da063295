"""Python's share of a run: what a plan costs when its primitives do nothing.

``python -m benchmarks.bench_overhead resnet50`` compiles a model, checks its outputs against PyTorch's, then makes a
second model of the very same plan in which ``dnnl_primitive_execute`` is replaced by a C function that returns at
once, called through ctypes with the same arguments. What that run takes is the interpreter's: checking the inputs,
allocating the outputs, pointing memories at them, the loop and the calls' passage through ctypes. Its share of the
true run is what the target (under 2 % for ResNet-50) is about; divided by the steps it is the price of one step.
Both are timed alternately. Afterwards the outputs are checked again.

Steps of the reference target are PyTorch, not oneDNN; they run in both models and would be counted as Python, so a
plan that has some is refused. A missed target does not change the exit code.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.common import add_options, headline, table, tell, write_json
from benchmarks.models import Model
from fmtprop import dnnl
from fmtprop.api import CompiledModel, Options, compile_graph, random_inputs
from fmtprop.bench import Agreement, Environment, Quartiles, compare_outputs
from fmtprop.bench.contenders import contender
from fmtprop.bench.interleave import take_turns, time_turn, uncollected
from fmtprop.bench.processes import call_in_process
from fmtprop.capture import GraphModule
from fmtprop.errors import FmtpropError
from fmtprop.report import TOLERANCES

__all__ = ["Overhead", "hollow", "main", "nothing"]

TARGETS = {"resnet50": 0.02}


@dataclass(frozen=True)
class Overhead:
    """Python's part in the runs of one model."""

    model: str
    steps: int
    #: `run`, `python`: milliseconds of a true run and of one whose primitives do nothing; ``None`` if the outputs are
    #: wrong
    run: Quartiles | None
    python: Quartiles | None
    #: their ratio, round by round
    share: Quartiles | None
    #: comparison with PyTorch, the worse of before and after
    agreement: Agreement

    @property
    def microseconds_per_step(self) -> float | None:
        """Python's time for one step."""
        return self.python.median * 1e3 / self.steps if self.python is not None and self.steps else None

    @property
    def met(self) -> bool | None:
        """Whether the share is under the model's target; ``None`` without a target or a figure."""
        if self.share is None or self.model not in TARGETS:
            return None
        return self.share.median < TARGETS[self.model]


def nothing() -> Any:
    """Return a C function with the arguments of ``dnnl_primitive_execute`` that returns success and does nothing.

    Result: libc's ``pthread_equal``: it compares its first two arguments, a primitive and a stream, which differ, and
    ignores the rest, as a C function does with arguments in registers that it was not declared with.
    """
    function = ctypes.CDLL(None)["pthread_equal"]
    function.restype = ctypes.c_int
    return function


def hollow(net: CompiledModel) -> CompiledModel:
    """Return a model of the same plan whose primitives do nothing."""
    foreign = [step.node.label for step in net.plan.steps if step.target == "reference"]
    if foreign:
        raise FmtpropError(
            f"{net.graph.name}: {len(foreign)} steps run in PyTorch, the first is {foreign[0]}; their time cannot be "
            "told from Python's: choose a model without fallbacks"
        )
    other = CompiledModel(net.compilation)
    with mock.patch.object(dnnl, "hot_execute", nothing()):
        other.run_flat(net.random_inputs())  # the calls are built in the first run, and kept
    return other


def measure(model: str, threads: int, rounds: int, repeats: int) -> Overhead:
    """Measure one model in this process."""
    torch.set_num_threads(threads)
    graph = Model(model).graph()
    graph.structure = ""
    inputs = random_inputs(graph)
    with torch.inference_mode():
        expected = GraphModule(graph)(*inputs)
    net = compile_graph(graph, Options())
    steps, tolerance = len(net.plan.steps), TOLERANCES[net.precision]
    empty = hollow(net)
    before = compare_outputs(net.run_flat(inputs), expected, tolerance)
    if not before.passed:
        return Overhead(model, steps, None, None, None, before)
    turns = {
        # an empty run is short: more of them make a figure
        "run": partial(time_turn, net, inputs, repeats),
        "python": partial(time_turn, empty, inputs, 10 * repeats),
    }
    with uncollected():
        times = take_turns(turns, rounds, seed=0)
    after = compare_outputs(net.run_flat(inputs), expected, tolerance)
    if not after.passed:
        return Overhead(model, steps, None, None, None, after)
    share = Quartiles.of([part / whole for part, whole in zip(times["python"], times["run"], strict=True)])
    worse = max(before, after, key=lambda agreement: agreement.error)
    return Overhead(model, steps, Quartiles.of(times["run"]), Quartiles.of(times["python"]), share, worse)


def render(results: Sequence[Overhead]) -> str:
    """Return the table and what is wrong."""
    rows, wrong = [], []
    for one in results:
        if one.run is None or one.python is None or one.share is None:
            wrong.append(f"{one.model}: WRONG OUTPUTS, no figures: {one.agreement.message}")
            continue
        share = f"{one.share.median:.2%} [{one.share.low:.2%}, {one.share.high:.2%}]"
        verdict = {True: "met", False: "MISSED", None: ""}[one.met]
        target = f"< {TARGETS[one.model]:.0%}: {verdict}" if one.model in TARGETS else ""
        python = f"{one.python.median * 1e3:.1f}"
        each = f"{one.microseconds_per_step:.2f}" if one.microseconds_per_step is not None else ""
        rows.append([one.model, str(one.steps), f"{one.run.median:.3f}", python, share, each, target])
    columns = ["model", "steps", "run ms", "Python µs", "share [quartiles]", "µs per step", "target"]
    return "\n".join([table("Python's share of a run", columns, rows), *wrong])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_overhead", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5, help="timed true runs in a turn (default: 5)")
    options = parser.parse_args(arguments)
    results: list[Overhead] = []
    failed = False
    for model in options.models:
        tell(model)
        try:
            job = partial(measure, model, options.threads, options.rounds, options.repeats)
            results.append(call_in_process(model, job))
        except FmtpropError as error:
            print(f"\n{error}", file=sys.stderr)
            failed = True
    tell("")
    environment = Environment.capture(options.threads, contender("fmtprop").versions())
    print(headline(environment), "", render(results), sep="\n")
    rows = [{**asdict(one), "microseconds_per_step": one.microseconds_per_step, "met": one.met} for one in results]
    write_json(options.json, {"environment": asdict(environment), "results": rows})
    return int(failed or not all(one.agreement.passed for one in results))


if __name__ == "__main__":
    sys.exit(main())
