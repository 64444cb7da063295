"""``fmtprop run`` and ``fmtprop report``: policies compiled, checked, measured."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Inputs,
    Json,
    Model,
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
    shapes_of,
    words,
)
from fmtprop.cli.console import USAGE, emit, failing, finish, progress
from fmtprop.cli.plan import check_no_options, is_plan
from fmtprop.cli.training import module_maker
from fmtprop.errors import FmtpropError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fmtprop.report import Comparison


def run(
    model: Model,
    policy: Policies = None,
    dtype: Dtype = "f32",
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    repeats: Repeats = 10,
    shape: Shapes = None,
    train: Train = False,
    inputs: Inputs = None,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compile and run a model, check it against PyTorch.

    The model runs on seeded random inputs under each policy (default: optimal). The summary has run times, memory,
    and which primitives, formats and reorders each policy uses. Exits with 1 if outputs differ from PyTorch's.
    With --train, a step under naive, propagate and optimal, with the shares of reorders in forward, backward and
    parameters: fmtprop run torchvision.models:resnet18 --train --input 8x3x224x224
    """
    options = {"dtype": dtype, "verify": verify, "tune": tune, "target": target, "special_values": special_values}
    policies = words(policy or ["naive,propagate,optimal" if train else "optimal"])
    comparison = _compare(model, policies, options, threads, repeats, report, train, inputs, shape, policy is not None)
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
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    repeats: Repeats = 10,
    shape: Shapes = None,
    train: Train = False,
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Report the cost of each reorder, and compare policies.

    It has for each policy (default: all): every reorder with its cost and its reason, implementations, formats, the
    slowest steps, steps outside oneDNN, memory and compile time. Policy optimal has a certificate: the cost of its
    choice, a lower bound for any choice, and the cost of propagate's choice.
    """
    options = {"dtype": dtype, "verify": verify, "tune": tune, "target": target, "special_values": special_values}
    policies = words(policy or ["plain,naive,propagate,optimal"])
    comparison = _compare(model, policies, options, threads, repeats, output, train, inputs, shape, policy is not None)
    if output is None or as_json:
        emit(comparison.to_json() if as_json else comparison.to_text())
    finish(comparison, output)


def _compare(
    model: str,
    policies: Sequence[str],
    given: Mapping[str, Any],
    threads: int | None,
    repeats: int,
    destination: Path | None,
    train: bool,
    inputs: Sequence[str] | None,
    shape: Sequence[str] | None,
    is_asked: bool,
) -> Comparison:
    if is_plan(model):
        return _measure_plan(model, given, policies if is_asked else None, threads, repeats, destination, train, shape)
    with progress() as say:
        from fmtprop.api import Options
        from fmtprop.bench.policies import compare_policies
        from fmtprop.compiling.options import KEPT
        from fmtprop.frontends import load
        from fmtprop.report.files import check_destination

        with failing(USAGE):
            if destination is not None:
                check_destination(destination)
            twice = sorted({name for name in policies if policies.count(name) > 1})
            if twice:
                raise FmtpropError(f"policy {twice[0]!r} is given twice")
            special = given["special_values"] or (KEPT if train else Options.special_values)
            ways = [Options(policy=name, **{**given, "special_values": special}) for name in policies]
            shapes = shapes_of(shape)
            make = module_maker(model, inputs, train, shapes)
            if make is None:
                run = partial(compare_policies, load(model, shapes=shapes))
            else:
                from fmtprop.bench.training import compare_steps  # imports torch._dynamo: 1.5 s

                run = partial(compare_steps, make)
        return run(ways, threads=threads, repeats=repeats, progress=say)


def _measure_plan(
    model: str,
    given: Mapping[str, Any],
    policies: Sequence[str] | None,
    threads: int | None,
    repeats: int,
    destination: Path | None,
    train: bool,
    shape: Sequence[str] | None,
) -> Comparison:
    with progress() as say:
        from fmtprop.bench.policies import measure_plan
        from fmtprop.report.files import check_destination

        with failing(USAGE):
            check_no_options(model, given, policies, train, shape)
            if destination is not None:
                check_destination(destination)
            return measure_plan(model, threads=threads, repeats=repeats, progress=say)
