"""Comparison of policies on one model: each policy is compiled, checked against PyTorch and measured.

Owns the order of these steps and the comparison. :mod:`fmtprop.api` compiles; :mod:`fmtprop.report` owns figures and
words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from fmtprop.api import CompiledModel, Options, compile_graph, random_inputs
from fmtprop.capture.factories import FlatModule
from fmtprop.compiling.loading import load_one, read_plan
from fmtprop.compiling.stages import check_memory
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.ops.evaluate import evaluate
from fmtprop.report import Comparison, outputs_of
from fmtprop.runtime.agreement import error_of_output
from fmtprop.runtime.process import use_threads

#: called with a description, steps done, steps in all
Progress = Callable[[str, int, int], None]


def compare_policies(
    graph: Graph,
    options: Sequence[Options],
    *,
    threads: int | None = None,
    repeats: int = 10,
    module: Callable[[], FlatModule] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compile a graph in several ways, check each against PyTorch, and measure it.

    `threads`: threads of torch and oneDNN, for the whole process. Default: unchanged. `module`: makes the module that
    the graph was imported from, with which results are compared; else with those of the graph's ops in PyTorch.

    >>> from fmtprop.capture import load
    >>> comparison = compare_policies(load("chain"), [Options(policy="plain"), Options()], repeats=1)
    >>> [report.policy for report in comparison.reports], comparison.failures
    (['plain', 'optimal'], ())
    """
    if not options:
        raise FmtpropError("compare_policies: options is empty; give at least one Options()")
    check_memory(graph)
    use_threads(threads)
    say = progress or _silent
    total = 1 + 2 * len(options)
    say("running in PyTorch", 0, total)
    inputs, expected = _expected(graph, module)
    reports, errors = [], []
    for done, option in enumerate(options):
        title, before = f"compiling under {option.policy}", 1 + 2 * done
        say(title, before, total)
        net = compile_graph(graph, replace(option, stage=partial(_say_stage, say, title, before, total)))
        say(f"measuring {option.policy}", 2 + 2 * done, total)
        errors.append(_worst_error(net, inputs, expected))
        reports.append(net.report(repeats=repeats))
        net.close()
    say("done", total, total)
    return Comparison.of(reports, errors, outputs_of(graph))


def _expected(
    graph: Graph, module: Callable[[], FlatModule] | None
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return inputs and PyTorch's results: of the module on its examples, or of the graph's ops on random numbers."""
    if module is None:
        inputs = random_inputs(graph)
        return inputs, evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    made = module()
    with torch.inference_mode():
        results = made(*(tensor.clone() for tensor in made.examples))
    if len(results) != len(graph.output_nodes):
        raise FmtpropError(f"the module gives {len(results)} tensors, and its graph {len(graph.output_nodes)}")
    return made.examples, results


def measure_plan(
    path: str, *, threads: int | None = None, repeats: int = 10, progress: Progress | None = None
) -> Comparison:
    """Load a plan file, check it against PyTorch, and measure it; see :func:`compare_policies`.

    Raises PlanError if the file cannot be loaded.
    """
    use_threads(threads)
    say = progress or _silent
    say("loading", 0, 3)
    net = load_one(path)
    graph = read_plan(path).plans[-1].inside()
    inputs = random_inputs(graph)
    say("running in PyTorch", 1, 3)
    expected = evaluate(graph, {node.name: one for node, one in zip(graph.input_nodes, inputs, strict=True)})
    say("measuring", 2, 3)
    errors = [_worst_error(net, inputs, expected)]
    report = net.report(repeats=repeats)
    net.close()
    return Comparison.of([report], errors, outputs_of(graph))


def _say_stage(say: Progress, title: str, done: int, total: int, stage: str) -> None:
    say(f"{title}: {stage}", done, total)


def _worst_error(net: CompiledModel, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of all outputs."""
    pairs = zip(net.run_flat(inputs), expected, strict=True)
    return max(error_of_output(got, want, net.precision) for got, want in pairs)


def _silent(what: str, done: int, total: int) -> None:
    """Ignore the report."""
