"""A benchmark as a table for a terminal or a log. Must not measure anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from fmtprop.report.text import render
from fmtprop.system.printable import counted

if TYPE_CHECKING:
    from fmtprop.bench.interleave import Benchmark, Quartiles


def benchmark_text(benchmark: Benchmark) -> str:
    """Return machine, latencies with quartiles, speed-ups, and disagreements as text."""
    table = Table(title=f"median of {benchmark.rounds} rounds, quartiles in brackets")
    for column in ("runtime", "ms per run", f"speed-up over {benchmark.reference}", "error"):
        table.add_column(column, justify="left" if column == "runtime" else "right")
    for entry in benchmark.entries:
        table.add_row(entry.name, _cell(entry.latency), _cell(entry.speedup), f"{entry.agreement.error:.1e}")
    return render(Group(_environment(benchmark), table, *benchmark.failures))


def _environment(benchmark: Benchmark) -> str:
    environment = benchmark.environment
    isa = environment.isa[-1] if environment.isa else "unknown instruction set"
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    threads, cpus = counted(environment.threads, "thread"), counted(environment.cpus, "CPU")
    return f"{environment.cpu}, {isa}, {threads} of {cpus}; {versions}"


def _cell(figures: Quartiles | None) -> str:
    if figures is None:
        return "not timed"
    return f"{figures.median:.2f} [{figures.low:.2f}, {figures.high:.2f}]"
