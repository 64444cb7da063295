"""A model planned and measured in several ways, side by side: policies, threads, instruction sets, libraries.

An instruction set and a library are chosen once in a process, so each case has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from rich.table import Table

from fmtprop.dnnl.library import ISA_NAMES
from fmtprop.errors import FmtpropError
from fmtprop.report.text import render
from fmtprop.report.words import bytes_text, time_text
from fmtprop.system.printable import counted, printable

#: most combinations that are run
_MOST = 64
#: text that a process prints before its report or error
_MARK = "FMTPROP-WHATIF "

_CHILD = f"""
import json, sys
from fmtprop import dnnl
from fmtprop.api import Options, compile_graph
from fmtprop.errors import FmtpropError
from fmtprop.capture.factories import graph_named
from fmtprop.passes.change_batch import ChangeBatch
from fmtprop.runtime.process import use_threads
case = json.loads(sys.argv[1])
told = dict(report={{}}, error="")
try:
    use_threads(case["threads"])
    if case["library"]:
        dnnl.lib()  # without it, a plan would be for another library
    options = Options(policy=case["policy"], dtype=case["dtype"], tune=case["tune"], pin=case["pin"])
    graph = graph_named(**case["named"])
    if case["batch"]:
        graph = ChangeBatch(case["batch"]).run(graph)
    told["report"] = compile_graph(graph, options).report(repeats=case["repeats"]).to_dict()
except FmtpropError as error:
    told["error"] = str(error)
print({_MARK!r} + json.dumps(told), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """One way to plan a model; an empty field is as usual."""

    policy: str = "optimal"
    dtype: str = "f32"
    batch: int | None = None
    threads: int | None = None
    isa: str = ""
    library: str = ""
    pin: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if self.batch else ""
        threads = counted(self.threads, "thread") if self.threads else ""
        words = [self.policy, self.dtype, batch, threads, self.isa, self.library]
        return ", ".join(filter(None, [*words, *(f"{name}={tag}" for name, tag in self.pin.items())]))


@dataclass(frozen=True)
class CaseResult:
    """Outcome of a case: a report as plain data, or an error."""

    case: Case
    report: dict[str, Any]
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {"case": asdict(self.case), "report": self.report or None, "error": self.error or None}


def cases(
    *, policies: Sequence[str], dtypes: Sequence[str], batches: Sequence[str], threads: Sequence[str],
    isas: Sequence[str], libraries: Sequence[str], pins: Sequence[str],
) -> list[Case]:  # fmt: skip
    """Return all combinations, each without pins and with each of them.

    >>> [str(case) for case in cases(policies=["optimal"], dtypes=["f32"], batches=[""], threads=["1", "2"],
    ...                              isas=["AVX2"], libraries=[""], pins=[])]
    ['optimal, f32, 1 thread, AVX2', 'optimal, f32, 2 threads, AVX2']
    """
    pinned: list[dict[str, str]] = [{}]
    for pin in pins:
        name, _, tag = pin.partition("=")
        if not name or not tag:
            raise FmtpropError(f"a pin is NODE.OPERAND=TAG, such as conv_1.dst=nChw16c; got {pin!r}")
        pinned.append({name: tag})
    unknown = [name for name in isas if name and name.lower() not in ISA_NAMES]
    if unknown:  # oneDNN would ignore it
        raise FmtpropError(f"unknown instruction set {unknown[0]!r}; known: {', '.join(ISA_NAMES).upper()}")
    images, numbers = _numbers("batches", batches), _numbers("threads", threads)
    found = [Case(*values) for values in product(policies, dtypes, images, numbers, isas, libraries, pinned)]
    if len(found) > _MOST:
        raise FmtpropError(f"these are {len(found)} combinations, more than {_MOST}: leave some out")
    return found


def _numbers(name: str, words: Sequence[str]) -> list[int | None]:
    for text in words:
        if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
            raise FmtpropError(f"{name} are whole numbers from 1, got {text!r}")
    return [int(text) if text else None for text in words]


def side_by_side(
    named: Mapping[str, Any],
    found: Sequence[Case],
    *,
    tune: str,
    repeats: int,
    progress: Callable[[str, int, int], None],
) -> list[CaseResult]:
    """Plan and measure each case, one after the other."""
    outcomes = []
    for done, case in enumerate(found):
        progress(str(case), done, len(found))
        outcomes.append(_run(named, case, tune, repeats))
    return outcomes


def _run(named: Mapping[str, Any], case: Case, tune: str, repeats: int) -> CaseResult:
    asked = {"named": named, "tune": tune, "repeats": repeats, **asdict(case)}
    environment = dict(os.environ)
    if case.isa:
        environment["ONEDNN_MAX_CPU_ISA"] = case.isa
    if case.library:
        environment["FMTPROP_DNNL_LIBRARY"] = case.library
    command = [sys.executable, "-c", _CHILD, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return CaseResult(case, **json.loads(line.removeprefix(_MARK)))
    lines = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
    return CaseResult(case, {}, lines[-1])


def table(outcomes: Sequence[CaseResult]) -> str:
    """Return the cases side by side; ratios are to the first that ran."""
    shown = Table(title="what if")
    for column in ("case", "isa", "oneDNN", "run", "ratio", "reorders", "in reorders", "arena"):
        shown.add_column(column, justify="left" if column in ("case", "isa", "oneDNN") else "right", overflow="fold")
    base = next((one.report["seconds"] for one in outcomes if one.report), 0.0)
    for one in outcomes:
        if not one.report:
            shown.add_row(printable(str(one.case)), "failed", *[""] * 6)
            continue
        report, machine = one.report, one.report["machine"]
        moved = sum(row["seconds"] for row in report["reorders"])
        shown.add_row(
            printable(str(one.case)), machine["isa"], machine["onednn"].partition(" ")[0],
            time_text(report["seconds"]), f"{report['seconds'] / base:.2f}" if base else "",
            str(len(report["reorders"])), time_text(moved), bytes_text(report["memory"]["arena"]),
        )  # fmt: skip
    reasons = [f"{one.case}: {one.error}" for one in outcomes if not one.report]
    return "\n".join([render(shown), *(printable(" ".join(reason.split())) for reason in reasons)])
