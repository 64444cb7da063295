"""``fmtprop diff``, ``fmtprop check`` and ``fmtprop whatif``: comparison of reports with each other and with limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fmtprop.cli.arguments import (
    Dtype,
    Inputs,
    Json,
    Model,
    Policy,
    Repeats,
    Shapes,
    SpecialValues,
    Target,
    Threads,
    Tune,
    shapes_of,
    words,
)
from fmtprop.cli.console import FAILED, USAGE, emit, failing, note, progress, save
from fmtprop.cli.named import graph_of, inputs_of
from fmtprop.cli.plan import is_plan
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.report.check import Limits, Violation
    from fmtprop.report.diff import Told

#: the beginning of a check's results: only such files are replaced
_OURS = re.compile(rb'<\?xml version="1\.0" encoding="utf-8"\?>\n<testsuite|\{\s*"version": "2\.1\.0"')

ReportPath = Annotated[
    Path, typer.Argument(metavar="REPORT", help="A report or a plan: .json or .fmtplan.", show_default=False)
]


def diff(
    before: ReportPath,
    after: ReportPath,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", help="Which policy of each is compared.", show_default="the last one"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two reports or plans: changed reorders and implementations, and their costs.

    Reports are JSON files of `fmtprop report MODEL -o FILE.json`, for other versions, machines, options or policies.
    Plans are plan files, or those of `fmtprop show MODEL -f json`, with modelled costs: nothing was run.
    """
    from fmtprop.report.diff import chosen, compare

    with failing(USAGE):
        told = [chosen(_reports(path), policy, path) for path in (before, after)]
    difference = compare(*told)
    emit(json.dumps(difference.to_dict(), indent=1) if as_json else difference.to_text())


def _reports(path: Path) -> list[Told]:
    from fmtprop.report.diff import read_reports, told_plan

    if not is_plan(str(path)):
        return read_reports(path)
    from fmtprop.compiling.loading import read_plan
    from fmtprop.report.plan_text import plan_data

    return [told_plan(plan_data(read_plan(path)))]


def check(
    model: Model,
    max_reorders: Annotated[
        int | None, typer.Option("--max-reorders", min=0, help="Reorders that a run may execute.", show_default=False)
    ] = None,
    max_reorder_share: Annotated[
        str | None,
        typer.Option(
            "--max-reorder-share", metavar="SHARE", help="Part of a run in reorders: 0.05 or 5%.", show_default=False
        ),
    ] = None,
    max_ref: Annotated[
        int | None,
        typer.Option("--max-ref", min=0, help="Steps that may run in unoptimized loops.", show_default=False),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", metavar="REPORT", help="Nothing may be worse than in this report.", show_default=False
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit's XML.", show_default=False)
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Also write SARIF 2.1.0.", show_default=False)
    ] = None,
    policy: Policy = "optimal",
    dtype: Dtype = "f32",
    tune: Tune = "model",
    target: Target = "onednn",
    special_values: SpecialValues = None,
    threads: Threads = None,
    repeats: Repeats = 5,
    shape: Shapes = None,
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Check a model's plan against limits, for automatic tests: one line for each violation, and exit code 1.

    Costs come from the model by default, so the result does not change from run to run. Only --max-reorder-share needs
    measured times. Example: fmtprop check resnet50 --max-reorders 2 --max-ref 0 --baseline last.json
    """
    if all(limit is None for limit in (max_reorders, max_reorder_share, max_ref, baseline)):
        raise typer.BadParameter(
            "there is nothing to check: give --max-reorders, --max-reorder-share, --max-ref or --baseline"
        )
    with progress() as say:
        from fmtprop.api import Options, compile_graph
        from fmtprop.report.check import Limits
        from fmtprop.report.check import check as check_report
        from fmtprop.report.diff import chosen, read_reports
        from fmtprop.runtime.process import use_threads

        with failing(USAGE):
            told = chosen(read_reports(baseline), policy, baseline) if baseline is not None else None
            share = None if max_reorder_share is None else _share(max_reorder_share)
            limits = Limits(max_reorders, share, max_ref, told)
            options = Options(
                policy=policy, dtype=dtype, tune=tune, target=target, special_values=special_values or "fast"
            )
            graph = graph_of(model, inputs, shape)
        use_threads(threads)
        say("compiling", 0, 2)
        net = compile_graph(graph, options)
        say("measuring", 1, 2)
        report = net.report(repeats=repeats)
    violations = check_report(report, limits)
    _write(model, limits, violations, junit, sarif)
    if as_json:
        facts = {
            "model": report.model,
            "policy": report.policy,
            "reorders": len(report.reorders),
            "rules": limits.rules,
        }
        told_violations = [{"rule": one.rule, "message": one.message} for one in violations]
        emit(json.dumps({**facts, "passed": not violations, "violations": told_violations}, indent=1))
    else:
        fine = f"{printable(report.model)}: within its limits ({', '.join(limits.rules)})"
        emit("\n".join(map(str, violations)) or fine)
    if violations:
        raise typer.Exit(FAILED)


def _share(text: str) -> float:
    from fmtprop.errors import FmtpropError

    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise FmtpropError(f"--max-reorder-share is a part of a run, such as 0.05 or 5%; got {text!r}")
    return share


def _write(
    model: str, limits: Limits, violations: tuple[Violation, ...], junit: Path | None, sarif: Path | None
) -> None:
    from fmtprop.report import check as forms

    with failing(USAGE):
        if junit is not None:
            save(junit, forms.junit(model, limits.rules, violations), _OURS)
        if sarif is not None:
            save(sarif, forms.sarif(model, violations), _OURS)
    for path in (junit, sarif):
        if path is not None:
            note(f"wrote {path}")


def whatif(
    model: Model,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", metavar="NAME[,NAME...]", help="Policies.", show_default="optimal"),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", "-d", metavar="NAME[,NAME...]", help="Data types.", show_default="f32"),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", metavar="N[,N...]", help="Sizes of the batch.", show_default="the model's own"),
    ] = None,
    threads: Annotated[
        list[str] | None,
        typer.Option("--threads", "-t", metavar="N[,N...]", help="Threads.", show_default="as PyTorch chooses"),
    ] = None,
    isa: Annotated[
        list[str] | None,
        typer.Option(
            "--isa",
            metavar="NAME[,NAME...]",
            help="Instruction sets, as ONEDNN_MAX_CPU_ISA names them: AVX2, SSE41, …",
            show_default="all that this CPU has",
        ),
    ] = None,
    library: Annotated[
        list[str] | None,
        typer.Option("--library", metavar="PATH", help="oneDNN libraries; repeat it.", show_default="the usual one"),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="NODE.OPERAND=TAG", help="One more case, with this format; repeat it."),
    ] = None,
    shape: Shapes = None,
    inputs: Inputs = None,
    tune: Tune = "model",
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Plan and measure a model in several ways, side by side, each in a process of its own.

    Tries all combinations of the options. Example: fmtprop whatif resnet50 --isa AVX2,AVX512_CORE --threads 1,2
    """
    from fmtprop.bench.whatif import cases, side_by_side, table

    with progress() as say:
        with failing(USAGE):
            found = cases(
                policies=words(policy or ["optimal"]), dtypes=words(dtype or ["f32"]),
                batches=words(batch) if batch else [""], threads=words(threads) if threads else [""],
                isas=words(isa) if isa else [""], libraries=library or [""], pins=pin or [],
            )  # fmt: skip
            given = {"model": model, "inputs": inputs_of(inputs), "shapes": shapes_of(shape)}
        outcomes = side_by_side(given, found, tune=tune, repeats=repeats, progress=say)
    emit(json.dumps([outcome.to_dict() for outcome in outcomes], indent=1) if as_json else table(outcomes))
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(FAILED)
