"""Sums of a tracer's calls by module, line and operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from fmtprop.lens.gain import Gain, Measurement
from fmtprop.report.files import OURS_TRACE, WrittenAsJson, write_text
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.lens.tracer import OperatorCall

#: version of the JSON form
SCHEMA = 4
_SHOWN = 20
#: the fields of a row that are sums over its calls
_SUMS = (
    "calls", "primitives", "reorders", "primitive_seconds", "reorder_seconds", "weights_seconds", "activation_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class OperatorRow:
    """oneDNN's executions in the calls of one operator, from one module and one line."""

    #: `module`, `kind`: the module's path and its class; empty outside modules
    module: str
    kind: str
    line: str
    operator: str
    #: `calls`, `primitives`, `reorders`: number of calls, and of oneDNN's executions in them
    calls: int
    primitives: int
    reorders: int
    primitive_seconds: float
    reorder_seconds: float
    weights_seconds: float
    #: time of the reorders of activations between row-major and channels-last or blocked formats
    activation_seconds: float
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Lens(WrittenAsJson):
    """PyTorch's hidden reorders in one run of a model or program."""

    name: str
    rows: tuple[OperatorRow, ...]
    #: the model in other ways, measured; empty if it was not asked for
    variants: tuple[Measurement, ...] = ()
    #: the class of the model that was measured: in a program, the one with the costliest reorders
    subject: str = ""
    #: the calls of the run; not in the JSON form
    calls: tuple[OperatorCall, ...] = field(default=(), repr=False)

    @property
    def primitive_seconds(self) -> float:
        """Seconds of all primitives."""
        return sum(row.primitive_seconds for row in self.rows)

    @property
    def reorder_seconds(self) -> float:
        """Seconds of all reorders."""
        return sum(row.reorder_seconds for row in self.rows)

    @property
    def reorders(self) -> int:
        """Number of reorders."""
        return sum(row.reorders for row in self.rows)

    @property
    def attributed_share(self) -> float:
        """Part of the reorders' time with a known module, 0 to 1."""
        named = sum(row.reorder_seconds for row in self.rows if row.kind)
        return named / self.reorder_seconds if self.reorder_seconds else 1.0

    @property
    def activation_seconds(self) -> float:
        """Seconds of reorders of activations, which ``channels_last`` may remove; not those of weights."""
        return sum(row.activation_seconds for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data; seconds, shares from 0 to 1."""
        share = self.reorder_seconds / self.primitive_seconds if self.primitive_seconds else 0.0
        return {
            "schema": SCHEMA,
            "model": self.name,
            "primitives": {"count": sum(row.primitives for row in self.rows), "seconds": self.primitive_seconds},
            "reorders": {"count": self.reorders, "seconds": self.reorder_seconds, "share": share},
            "attributed_share": self.attributed_share,
            "activation_seconds": self.activation_seconds,
            "subject": self.subject,
            "operators": [asdict(row) for row in self.rows],
            "variants": [asdict(variant) for variant in self.variants],
        }

    def to_trace(self, path: str | PathLike[str] | None = None, profile: str | PathLike[str] | None = None) -> str:
        """Return the run in Chrome's trace format, for Perfetto; also write it when a path is given.

        oneDNN's primitives, hidden reorders among them, are events within the operators. The clock is that of
        :mod:`torch.profiler`: explain a module inside ``torch.profiler.profile()``, and give its export here.

        Raises FmtpropError if the file cannot be written, or the profile is none.
        """
        from fmtprop.lens.trace import trace

        text = trace(self.calls, profile)
        if path is not None:
            write_text(text, path, OURS_TRACE)
        return text

    def to_text(self) -> str:
        """Return tables for a terminal."""
        from fmtprop.report.text import render

        data = self.to_dict()
        parts: list[RenderableType] = [
            f"{printable(self.name)}: {self.reorders} hidden reorders take {self.reorder_seconds * 1e3:.3f} ms, "
            f"{data['reorders']['share']:.1%} of oneDNN's time"
        ]
        if self.reorders:
            parts.append(f"{self.attributed_share:.1%} of it belongs to modules; {self._channels_last()}")
        if self.reorders:
            parts += ["", _operators(self.rows)]
        if self.variants:
            parts.append(_variants(self.subject, self.variants))
            parts += [f"{one.name} failed: {printable(one.failure)}" for one in self.variants if one.failure]
        return render(Group(*parts))

    def _channels_last(self) -> str:
        """Return what the format does to reorders: what was measured, or else what it may do."""
        ways = {one.name: one for one in self.variants if not one.failure}
        eager, other = ways.get("eager"), ways.get("channels_last")
        if eager is None or other is None:
            seconds = self.activation_seconds
            return f"reorders of activations, which channels_last may remove, take {seconds * 1e3:.3f} ms"
        times = f"{other.reorder_seconds * 1e3:.3f} ms instead of {eager.reorder_seconds * 1e3:.3f}"
        count = f"{other.reorders} of {eager.reorders} reorders"
        return f"with channels_last, a call of {self.subject or self.name} has {count}, {times}"

    def _repr_html_(self) -> str:
        """Return the text for a notebook."""
        from html import escape

        return f"<pre>{escape(self.to_text())}</pre>"


def lens_of(
    name: str,
    calls: Iterable[OperatorCall],
    variants: Sequence[Measurement] = (),
    subject: str = "",
) -> Lens:
    """Add up calls."""
    calls = tuple(calls)
    groups: dict[tuple[str, str, str, str], list[OperatorCall]] = {}
    for call in calls:
        groups.setdefault((call.module, call.kind, call.line, call.operator), []).append(call)
    rows = [_row(key, group) for key, group in groups.items()]
    rows.sort(key=lambda row: -row.reorder_seconds)
    return Lens(name, tuple(rows), tuple(variants), subject, calls)


def lens_from(data: Mapping[str, Any]) -> Lens:
    """Return a program's lens from the result of :meth:`Lens.to_dict`."""
    rows = (OperatorRow(**{**row, "formats": tuple(row["formats"])}) for row in data["operators"])
    variants = (Measurement(**{**one, "gain": _gain(one["gain"])}) for one in data["variants"])
    return Lens(data["model"], tuple(rows), tuple(variants), data["subject"])


def _gain(data: Mapping[str, float] | None) -> Gain | None:
    return None if data is None else Gain(**data)


def _row(key: tuple[str, str, str, str], group: Sequence[OperatorCall]) -> OperatorRow:
    found = [one for call in group for one in call.executions]
    reorders = [one for one in found if one.kind == "reorder"]
    packing = sum(one.seconds for one in reorders if one.packs)
    activations = sum(one.seconds for one in reorders if one.moves_activations)
    formats = dict.fromkeys(
        f"{one.operands[0].tag} -> {one.operands[1].tag} {one.problem}" for one in reorders if len(one.operands) > 1
    )
    return OperatorRow(
        *key, len(group), len(found), len(reorders), sum(one.seconds for one in found),
        sum(one.seconds for one in reorders), packing, activations, tuple(formats),
    )  # fmt: skip


def _alike(rows: Sequence[OperatorRow]) -> list[tuple[str, OperatorRow]]:
    """Return rows with their modules; layers of one line with the same reorders, in any order, are one row."""
    groups: dict[tuple[object, ...], list[OperatorRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.line, row.operator, frozenset(row.formats)), []).append(row)
    found = []
    for group in groups.values():
        names = list(dict.fromkeys(row.module for row in group))
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        whole = replace(group[0], **{name: sum(getattr(row, name) for row in group) for name in _SUMS})
        found.append((f"{names[0]}{more}", whole))
    return sorted(found, key=lambda one: -one[1].reorder_seconds)


def _operators(rows: Sequence[OperatorRow]) -> Table:
    alike = _alike(rows)
    table = Table(title=f"the costliest {min(_SHOWN, len(alike))} of {len(alike)} places")
    for column in ("module", "line", "operator", "reorders", "time", "of weights", "formats"):
        right = column in ("reorders", "time", "of weights")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for name, row in alike[:_SHOWN]:
        times = (f"{seconds * 1e3:.3f} ms" for seconds in (row.reorder_seconds, row.weights_seconds))
        module = f"{name} ({row.kind})" if row.kind else ""
        cells = (
            module,
            row.line.rpartition("/")[2],
            row.operator,
            str(row.reorders),
            *times,
            "; ".join(row.formats[:3]),
        )
        table.add_row(*map(printable, cells))
    return table


def _variants(subject: str, variants: Sequence[Measurement]) -> Table:
    table = Table(title=f"{printable(subject)} in other ways, measured in turns")
    for column in ("way", "run", "ratio", "saves", "reorders", "in reorders", "error"):
        table.add_column(column, justify="left" if column == "way" else "right", overflow="fold")
    base = variants[0].seconds
    for one in variants:
        if one.failure:
            table.add_row(one.name, "failed")
            continue
        ratio = f"{one.seconds / base:.2f}" if base else ""
        saves = "" if one.gain is None else str(one.gain)
        figures = (
            f"{one.seconds * 1e3:.3f} ms",
            ratio,
            saves,
            str(one.reorders),
            f"{one.reorder_seconds * 1e3:.3f} ms",
        )
        table.add_row(one.name, *figures, f"{one.error:.0e}")
    return table
