"""``fmtprop run`` and ``fmtprop report``: policies compiled, checked, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from fmtprop.cli.console import USAGE, emit, failing, finish, progress
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
    special_values: SpecialValues = "fast",
    repeats: Repeats = 10,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Compile and run a model, check it against PyTorch.

    The model runs on seeded random inputs under each policy (default: optimal). The summary has run times, memory,
    and which primitives, formats and reorders each policy uses. Exits with 1 if outputs differ from PyTorch's.
    """
    options = {"dtype": dtype, "verify": verify, "tune": tune, "target": target, "special_values": special_values}
    comparison = _compare(model, words(policy or ["optimal"]), options, threads, repeats, report)
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
    special_values: SpecialValues = "fast",
    repeats: Repeats = 10,
    as_json: Json = False,
) -> None:
    """Report the cost of each reorder, and compare policies.

    It has for each policy (default: all): every reorder with its cost and its reason, implementations, formats, the
    slowest steps, steps outside oneDNN, memory and compile time. Policy optimal has a certificate: the cost of its
    choice, a lower bound for any choice, and the cost of propagate's choice.
    """
    options = {"dtype": dtype, "verify": verify, "tune": tune, "target": target, "special_values": special_values}
    policies = words(policy or ["plain,naive,propagate,optimal"])
    comparison = _compare(model, policies, options, threads, repeats, output)
    if output is None or as_json:
        emit(comparison.to_json() if as_json else comparison.to_text())
    finish(comparison, output)


def _compare(
    model: str,
    policies: Sequence[str],
    options: Mapping[str, Any],
    threads: int | None,
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
            ways = [Options(policy=name, **options) for name in policies]
            graph = load(model)
        return compare_policies(graph, ways, threads=threads, repeats=repeats, progress=say)
