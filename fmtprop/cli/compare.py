"""``fmtprop run`` and ``fmtprop report``: policies compiled, checked, measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Inputs,
    Json,
    Model,
    Pins,
    Policies,
    Repeats,
    ReportFile,
    Shapes,
    SpecialValues,
    Target,
    Threads,
    Train,
    Tune,
    Verify,
    Weights,
    no_weights_in_training,
    pairs_of,
    words,
)
from fmtprop.cli.console import USAGE, emit, failing, finish, progress
from fmtprop.cli.named import graph_of, module_maker, original_of
from fmtprop.cli.plan import check_no_options, is_plan
from fmtprop.errors import FmtpropError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fmtprop.report import Comparison


def run(
    model: Model,
    policy: Policies = None,
    dtype: Dtype = "f32",
    weights: Weights = None,
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    repeats: Repeats = 10,
    shape: Shapes = None,
    inputs: Inputs = None,
    pin: Pins = None,
    train: Train = False,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compile and run a model, check it against PyTorch.

    The model runs on its example inputs, or on seeded random ones, under each policy (default: optimal). The summary
    has run times, memory, and which primitives, formats and reorders each policy uses. Exits with 1 if outputs differ
    from PyTorch's.
    With --train, a step under naive, propagate and optimal, with the shares of reorders in forward, backward and
    parameters: fmtprop run torchvision.models:resnet18 --train --input 8x3x224x224
    """
    options = dict(dtype=dtype, weights=weights, verify=verify, tune=tune, target=target, special_values=special_values)
    policies = words(policy or ["naive,propagate,optimal" if train else "optimal"])
    given = _Given(model, inputs, shape, train, pin, policy is not None)
    comparison = _compare(given, policies, options, threads, repeats, report)
    emit(comparison.to_json() if as_json else comparison.summary())
    finish(comparison, report)


def report(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to: .html, .txt or .json.", show_default="stdout"),
    ] = None,
    policy: Policies = None,
    dtype: Dtype = "f32",
    weights: Weights = None,
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    repeats: Repeats = 10,
    shape: Shapes = None,
    inputs: Inputs = None,
    pin: Pins = None,
    train: Train = False,
    as_json: Json = False,
) -> None:
    """Report the cost of each reorder, and compare policies.

    It has for each policy (default: all): every reorder with its cost and its reason, implementations, formats, the
    slowest steps, steps outside oneDNN, memory and compile time. Policy optimal has a certificate: the cost of its
    choice, a lower bound for any choice, and the cost of propagate's choice.
    """
    options = dict(dtype=dtype, weights=weights, verify=verify, tune=tune, target=target, special_values=special_values)
    policies = words(policy or ["plain,naive,propagate,optimal"])
    given = _Given(model, inputs, shape, train, pin, policy is not None)
    comparison = _compare(given, policies, options, threads, repeats, output)
    if output is None or as_json:
        emit(comparison.to_json() if as_json else comparison.to_text())
    finish(comparison, output)


@dataclass(frozen=True)
class _Given:
    """What a command was given besides the options of a compilation."""

    model: str
    inputs: Sequence[str] | None
    shape: Sequence[str] | None
    train: bool
    pin: Sequence[str] | None
    asks_policies: bool


def _compare(
    asked: _Given,
    policies: Sequence[str],
    given: dict[str, Any],
    threads: int | None,
    repeats: int,
    destination: Path | None,
) -> Comparison:
    with progress() as say:
        from fmtprop.api import Options
        from fmtprop.bench.policies import compare_policies, measure_plan
        from fmtprop.compiling.options import KEPT, OPTIMAL
        from fmtprop.compiling.stages import with_codes
        from fmtprop.report.files import check_destination

        with failing(USAGE):
            if destination is not None:
                check_destination(destination)
            if is_plan(asked.model):
                check_no_options(
                    asked.model, given, policy=asked.asks_policies, train=asked.train, shape=asked.shape,
                    input=asked.inputs, pin=asked.pin,
                )  # fmt: skip
                return measure_plan(asked.model, threads=threads, repeats=repeats, progress=say)
            twice = sorted({name for name in policies if policies.count(name) > 1})
            if twice:
                raise FmtpropError(f"policy {twice[0]!r} is given twice")
            weights = given.pop("weights")
            special = given["special_values"] or (KEPT if asked.train else Options.special_values)
            pins = pairs_of("--pin", asked.pin)
            ways = [
                Options(policy=name, pin=pins if name == OPTIMAL or OPTIMAL not in policies else {},
                        **{**given, "special_values": special})
                for name in policies
            ]  # fmt: skip
            if asked.train:
                from fmtprop.bench.training import compare_steps  # imports torch._dynamo: 1.5 s

                no_weights_in_training(weights)
                run = partial(compare_steps, module_maker(asked.model, asked.inputs, asked.shape))
            else:
                graph = graph_of(asked.model, asked.inputs, asked.shape)
                module = original_of(graph, asked.model, asked.inputs) if weights is None else None
                run = partial(compare_policies, with_codes(graph, weights), module=module)
        return run(ways, threads=threads, repeats=repeats, progress=say)
