"""``fmtprop run`` and ``fmtprop report``: policies compiled, checked, measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Json,
    Model,
    Policies,
    Repeats,
    ReportFile,
    SpecialValues,
    Target,
    Threads,
    Tune,
    Verify,
    words,
)
from fmtprop.cli.console import FAILED, USAGE, complain, emit, failing, note, progress
from fmtprop.errors import FmtpropError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fmtprop.report import Comparison


def run(
    model: Model,
    policy: Policies = None,
    dtype: Dtype = "f32",
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = "fast",
    repeats: Repeats = 10,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compile and run a model, check it against PyTorch.

    The model runs on seeded random inputs under each policy (default: optimal). The summary has run times, memory,
    and which primitives, formats and reorders each policy uses. Exits with 1 if outputs differ from PyTorch's.
    """
    names = words(policy or ["optimal"])
    comparison = _compare(model, names, dtype, threads, verify, tune, target, special_values, repeats, report)
    emit(comparison.to_json() if as_json else comparison.summary())
    _finish(comparison, report)


def report(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to: .txt or .json.", show_default="stdout"),
    ] = None,
    policy: Policies = None,
    dtype: Dtype = "f32",
    threads: Threads = None,
    verify: Verify = "on",
    tune: Tune = "auto",
    target: Target = "onednn",
    special_values: SpecialValues = "fast",
    repeats: Repeats = 10,
    as_json: Json = False,
) -> None:
    """Report what each reorder costs, policies side by side.

    Of each policy (default: all of them): every reorder with its cost and its reason, implementations, formats, the
    slowest steps, what oneDNN does not run, memory and compile time. Policy optimal comes with its certificate: what
    its choice costs, what no choice can cost less than, and what propagate's choices cost by the same costs.
    """
    names = words(policy or ["plain,naive,propagate,optimal"])
    comparison = _compare(model, names, dtype, threads, verify, tune, target, special_values, repeats, output)
    if output is None or as_json:
        emit(comparison.to_json() if as_json else comparison.to_text())
    _finish(comparison, output)


def _compare(
    model: str,
    policies: Sequence[str],
    dtype: str,
    threads: int | None,
    verify: str,
    tune: str,
    target: str,
    special_values: str,
    repeats: int,
    destination: Path | None,
) -> Comparison:
    with progress() as say:
        from fmtprop.api import Options
        from fmtprop.bench.policies import compare_policies
        from fmtprop.frontends import load
        from fmtprop.report.files import check_destination

        with failing(USAGE):
            if destination is not None:
                check_destination(destination)
            twice = sorted({name for name in policies if policies.count(name) > 1})
            if twice:
                raise FmtpropError(f"policy {twice[0]!r} is given twice")
            first = Options(dtype=dtype, target=target, verify=verify, tune=tune, special_values=special_values)
            options = [replace(first, policy=name) for name in policies]
            graph = load(model)
        return compare_policies(graph, options, threads=threads, repeats=repeats, progress=say)


def _finish(comparison: Comparison, destination: Path | None) -> None:
    """Write the file, and fail if the check did."""
    from fmtprop.report.files import write_report

    if destination is not None:
        write_report(comparison, destination)
        note(f"wrote {destination}")
    for failure in comparison.failures:
        complain(failure)
    if comparison.failures:
        raise typer.Exit(FAILED)
