"""Reports as text: tables for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table

from fmtprop.report.ledger import PARTS, RUN, totals
from fmtprop.report.words import bytes_text
from fmtprop.system.printable import counted, printable

if TYPE_CHECKING:
    from fmtprop.report.comparison import Comparison
    from fmtprop.report.model import Report

_SLOWEST_STEPS = 10
#: number of reorders of each policy in a summary; the report has all
_COSTLIEST_REORDERS = 5


def report_text(report: Report) -> str:
    """Return one report: summary, reorders, formats, implementations, slowest steps, fallbacks."""
    said = "\n".join(map(printable, report.verdict)) + "\n"
    parts: list[RenderableType] = [_headline(report), said, _reorders(report), _counts(report), _slowest(report)]
    if report.reorders:
        parts.insert(3, _totals(report))
    if told := certificate_text(report):
        parts.insert(2, told + "\n")
    if report.in_floats:
        parts.append(_in_floats(report))
    if report.fallbacks:
        parts.append(_fallbacks(report))
    parts += [f"warning: {printable(warning)}" for warning in report.warnings]
    return render(Group(*parts))


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison of several policies, then the whole report of each."""
    whole = [text for report in comparison.reports for text in ("", report_text(report))]
    return render(Group(*_head(comparison), *whole))


def comparison_summary(comparison: Comparison) -> str:
    """Return a comparison of several policies, then each one's primitives, formats and costliest reorders."""
    parts = _head(comparison)
    for report in comparison.reports:
        parts.append(_counts(report))
        if report.reorders:
            parts.append(_reorders(report, _COSTLIEST_REORDERS))
    return render(Group(*parts))


# ---------------------------------------------------------------- parts


def _head(comparison: Comparison) -> list[RenderableType]:
    certificates = [told for report in comparison.reports if (told := certificate_text(report))]
    return [_machine(comparison.reports[0]), _side_by_side(comparison), _verdict(comparison), *certificates, ""]


def _side_by_side(comparison: Comparison) -> Table:
    reports = comparison.reports
    table = Table(title=f"{printable(reports[0].model)}: policies of format assignment")
    parts = PARTS[1:] if any(row.part != RUN for report in reports for row in report.reorders) else ()
    details = [part.partition(" ")[0] for part in parts] or ["moved", "packed once"]
    columns = "policy", "run", "ratio", "reorders", "in reorders", *details, "arena", "fallbacks", "error"
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    base = reports[0].seconds
    for report, error in zip(reports, comparison.errors, strict=True):
        moved = bytes_text(sum(row.nbytes for row in report.reorders))
        packed = f"{len(report.packed)} ({bytes_text(sum(n for _, _, n in report.packed))})"
        table.add_row(
            report.policy,
            _time(report.seconds),
            f"{report.seconds / base:.2f}",
            str(len(report.reorders)),
            f"{_time(report.reorder_seconds)} ({_share(report):.0%})",
            *([_of_part(report, part) for part in parts] or [moved, packed]),
            bytes_text(report.memory["arena"]),
            str(len(report.fallbacks)),
            f"{error:.1e}",
        )
    return table


def _of_part(report: Report, part: str) -> str:
    total = sum(row.seconds for row in report.steps)
    seconds = sum(row.seconds for row in report.reorders if row.part == part)
    return f"{seconds / total if total else 0:.0%}"


def _verdict(comparison: Comparison) -> str:
    note = f"; {comparison.measure.note}" if comparison.measure.note else ""
    if comparison.failures:
        return f"check against PyTorch FAILED: {'; '.join(comparison.failures)}{note}"
    return f"check against PyTorch: passed under each policy{note}"


def certificate_text(report: Report) -> str:
    """Return the certificate of policy `optimal`, the sources of its costs, and the result of its race."""
    lines = []
    if (c := report.certificate) is not None:
        nothing = ": nothing to gain" if c.optimal else ""
        usual = f"the same plan as propagate's{nothing}" if c.is_usual else f"propagate costs {_time(c.propagate)}"
        lines.append(
            f"policy {report.policy}: kept is the plan {c.plan!r}, which costs {_time(c.objective)}"
            f" ({report.costs}), lower bound "
            f"{_time(c.bound)} ({c.proof} among {c.alternatives} alternatives, in {_time(c.seconds)}); "
            f"{f'{_time(c.fallback)} of it in steps without optimized code; ' if c.fallback else ''}{usual}"
        )
        again = "; the plan was found again by costs that a run had corrected" if c.corrected else ""
        if report.seconds:
            lines.append(f"costs over the run: {c.objective / report.seconds:.2f}{again}")
        lines.append(f"rounding error to be expected of this choice: {c.growth:.1f} times that of direct convolutions")
    if (t := report.tuning) is not None:
        lines.append(f"costs: {t.measured} measured, {t.cached} from the cache, {t.modelled} from the model")
    if (run := report.race) is not None and len(run.names) > 1:
        times = "; ".join(f"{name}: {_time(s)}" for name, s in zip(run.names, run.seconds, strict=True))
        lines.append(f"test run in turns while compiling, {times}; kept: {run.names[run.winner]}")
    lines += [f"left out, since it failed: {name} ({printable(why)})" for name, why in report.dropped.items()]
    lines += [f"left out, since the time for compiling ended: {name} ({why})" for name, why in report.left_out.items()]
    return "\n".join(lines)


def _machine(report: Report) -> str:
    m = report.machine
    return f"{m['cpu']}, {m['isa']}, {counted(int(m['threads']), 'thread')}; oneDNN {m['onednn']}, torch {m['torch']}"


def _headline(report: Report) -> str:
    stages = ", ".join(f"{name} {_time(seconds)}" for name, seconds in report.compile_seconds.items())
    reorders = (
        f"{counted(len(report.reorders), 'reorder')} taking {_time(report.reorder_seconds)} ({_share(report):.1%})"
    )
    if any(row.part != RUN for row in report.reorders):
        parts = totals(report.reorders)["by_part"]
        reorders += ": " + ", ".join(f"{one['count']} {one['name']} {_time(one['seconds'])}" for one in parts)
    return (
        f"{printable(report.model)}, policy {report.policy}, {report.computes_in}: {_time(report.seconds)} a run, "
        f"{counted(len(report.steps), 'step')}, {reorders}\n"
        f"memory: {_memory(report)}; packed once: {len(report.packed)}\ncompiled in: {stages}\n{_machine(report)}\n"
    )


def _memory(report: Report) -> str:
    sizes = {name: bytes_text(size) for name, size in report.memory.items()}
    arena = f"arena {sizes['arena']}" if report.memory["arena"] else "no arena"
    outside = " (with tensors that PyTorch allocates)" if report.memory["peak"] > report.memory["arena"] else ""
    return f"constants {sizes['constants']}, {arena}, at most {sizes['peak']} alive at once{outside}"


def _reorders(report: Report, limit: int | None = None) -> Table:
    rows = sorted(report.reorders, key=lambda row: -row.seconds)
    which = f"the {limit} costliest of {len(rows)} reorders" if limit is not None and limit < len(rows) else "reorders"
    table = Table(title=f"policy {report.policy}: {which} of every run")
    figures = ("moved", "time", "share", f"without it, {report.costs}")
    for column in ("reorder", "from", "to", "dims", *figures, "cause"):
        table.add_column(column, justify="right" if column in figures else "left", overflow="fold")
    for row in rows[:limit]:
        dims = "x".join(map(str, row.dims))
        without = row.counterfactual
        change = "" if without.difference_seconds is None else f" {_change(without.difference_seconds)}"
        # otherwise the figure would look like the reorder's own
        other = " in another plan" if change and without.difference_seconds != without.alone_seconds else ""
        told = (bytes_text(row.nbytes), _time(row.seconds), f"{row.share:.1%}", without.verdict + change + other)
        _add_row(
            table, row.name, row.src, row.dst, dims, *told, f"{row.cause}: {row.producer} -> {', '.join(row.readers)}"
        )
    return table


def _totals(report: Report) -> Table:
    table = Table(title=f"policy {report.policy}: reorders by class, cause, verdict and module")
    for column in ("by", "name", "reorders", "time", "moved", "padding"):
        table.add_column(column, justify="left" if column in ("by", "name") else "right", overflow="fold")
    sums = totals(report.reorders)
    for by, name in (("by_kind", "class"), ("by_cause", "cause"), ("by_verdict", "verdict"), ("by_module", "module")):
        for row in sums[by][:_SLOWEST_STEPS]:
            sizes = (bytes_text(row["nbytes"]), bytes_text(row["padding_nbytes"]))
            _add_row(table, name, row["name"], str(row["count"]), _time(row["seconds"]), *sizes)
    return table


def _counts(report: Report) -> Table:
    table = Table(title=f"policy {report.policy}: primitives and formats")
    table.add_column("steps", justify="right")
    table.add_column("implementation", overflow="fold")
    table.add_column("steps", justify="right")
    table.add_column("writes format", overflow="fold")
    left, right = report.primitives.most_common(), report.formats.most_common()
    for i in range(max(len(left), len(right))):
        a = (str(left[i][1]), left[i][0]) if i < len(left) else ("", "")
        b = (str(right[i][1]), right[i][0]) if i < len(right) else ("", "")
        _add_row(table, *a, *b)
    return table


def _slowest(report: Report) -> Table:
    slowest = sorted(report.steps, key=lambda row: -row.seconds)[:_SLOWEST_STEPS]
    table = Table(
        title=f"the {len(slowest)} slowest steps"
        if len(slowest) < len(report.steps)
        else "all steps, the slowest first"
    )
    for column in ("step", "op", "in", "implementation", "formats", "time", "from"):
        table.add_column(column, justify="right" if column == "time" else "left", overflow="fold")
    for row in slowest:
        _add_row(table, row.name, row.op, row.computes_in, row.impl, row.formats, _time(row.seconds), row.origin)
    return table


def _in_floats(report: Report) -> Table:
    table = Table(title="quantized, but computed in floats")
    for column in ("step", "op", "time", _why(report), "from"):
        table.add_column(column, overflow="fold")
    for row, why in report.in_floats:
        _add_row(table, row.name, row.op, _time(row.seconds), why, row.origin)
    return table


def _fallbacks(report: Report) -> Table:
    table = Table(title="steps without optimized code")
    for column in ("step", "op", "time", _why(report), "from"):
        table.add_column(column, overflow="fold")
    for row in report.fallbacks:
        _add_row(table, row.name, row.op, _time(row.seconds), row.reason, row.origin)
    return table


def _why(report: Report) -> str:
    """Return the title of reasons: those of policy `optimal` have costs."""
    return "why" if report.certificate is None else f"why, costs {report.costs}"


def table_text(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return one table as text; cells that begin with a digit are figures."""
    table, cells = Table(title=printable(title)), list(rows)
    for index, column in enumerate(head):
        is_figure = any(row[index][:1].isdigit() for row in cells)
        table.add_column(column, justify="right" if is_figure else "left", overflow="fold")
    for row in cells:
        _add_row(table, *row)
    return render(table)


# ---------------------------------------------------------------- words


def render(content: RenderableType, width: int = 132) -> str:
    """Return tables and paragraphs as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False).print(content)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"  # rich pads titles


def _add_row(table: Table, *cells: str) -> None:
    """Add a row; its cells may have names with arbitrary characters."""
    table.add_row(*map(printable, cells))


def _share(report: Report) -> float:
    total = sum(row.seconds for row in report.steps)
    return report.reorder_seconds / total if total else 0.0


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _change(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{_time(abs(seconds))}"
