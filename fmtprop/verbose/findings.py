"""Findings: avoidable executions of a log, with advice. Reads sums of distinct executions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fmtprop.verbose.parse import LAST, PLAIN, Execution

#: names of loops without optimized code; a fused depthwise pair also has such a name, but runs the kernels in it
_LOOP = re.compile(r"(?:^|[:_])ref(?::|_int8|$)")

_ADVICE = {
    "reference implementation": "another format, data type or size has a fast kernel; a newer oneDNN may have one",
    "reference reorder": "nobody has a fast way between these two formats: take another format on one side",
    "weights packed again": "pack them once, and keep the result, as torch.compile with freezing, "
    "torch.utils.mkldnn.to_mkldnn or fmtprop.compile do",
    "reorder that is undone": "let the primitive between the two take the first format",
    "reorders in a row": "one reorder from the first format to the last one would do",
    "reorder that changes nothing": "a copy of a strided, unaligned or temporary tensor: create it dense, once",
    "activations in row-major": "channels_last would remove {these}: "
    "model.to(memory_format=torch.channels_last), and the input likewise",
    "activations leave their blocks": "channels_last may remove {these}, and so may anything that keeps "
    "blocks between layers: mkldnn tensors, torch.compile with freezing, fmtprop.compile",
}


@dataclass
class Total:
    """Number, time and bytes of executions."""

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def add(self, other: Total) -> None:
        """Add another sum."""
        self.count += other.count
        self.seconds += other.seconds
        self.nbytes += other.nbytes


@dataclass(eq=False)
class Tally:
    """One distinct execution, and the sums of its repetitions.

    Parameters
    ----------
    execution : Execution
        The execution; its own seconds have no meaning.
    count, milliseconds : int, float
        Number and time of its repetitions.
    refusals : tuple of str
        Reasons for which other implementations were refused before its first execution, in logs that tell.
    undone : dict
        The repetitions that undo an earlier reorder, by the kind of the primitive between the two.
    chained : Total
        The repetitions that follow another reorder of the same tensor.
    """

    execution: Execution
    count: int = 0
    milliseconds: float = 0.0
    refusals: tuple[str, ...] = ()
    undone: dict[str, Total] = field(default_factory=dict)
    chained: Total = field(default_factory=Total)

    def __post_init__(self) -> None:
        """Compute the properties that each line needs."""
        one = self.execution
        formats = tuple((operand.dtype, operand.tag) for operand in one.operands[:2])
        self.is_reorder = one.kind == "reorder"
        self.moves = self.is_reorder and len(formats) == 2
        #: sizes, source and destination; and those of the inverse reorder
        self.edge = (one.problem, *formats) if self.moves else ()
        self.inverse = (one.problem, *formats[::-1]) if self.moves and formats[0] != formats[1] else None
        self.nbytes = one.nbytes if self.moves else 0

    @property
    def name(self) -> str:
        """A reorder's formats and sizes."""
        src, dst = self.execution.operands[:2]
        return f"{src.dtype}:{src.tag} -> {dst.dtype}:{dst.tag} {self.execution.problem}"

    @property
    def sum(self) -> Total:
        """The sum of all repetitions."""
        return Total(self.count, self.milliseconds / 1e3, self.count * self.nbytes)

    def follow(self, before: Tally | None, earlier: Tally | None, milliseconds: float) -> None:
        """Compare a reorder with the one or two executions before it."""
        if before is None:
            return
        if before.moves:
            if before.execution.unpacks:  # a gradient of weights: the next reorder is of another tensor
                return
            if before.edge == self.inverse:
                self._note(self.undone.setdefault("", Total()), milliseconds)
            elif before.edge[0] == self.edge[0] and before.edge[2] == self.edge[1] != self.edge[2]:
                self._note(self.chained, milliseconds)
        elif earlier is not None and earlier.moves and earlier.edge == self.inverse:
            self._note(self.undone.setdefault(before.execution.kind, Total()), milliseconds)

    def _note(self, total: Total, milliseconds: float) -> None:
        total.add(Total(1, milliseconds / 1e3, self.nbytes))


def findings(tallies: Iterable[Tally]) -> list[dict[str, Any]]:
    """Return the avoidable executions, the costliest first.

    Returns
    -------
    list of dict
        ``kind``, ``name``, ``count``, ``seconds``, ``bytes``, ``advice``, and ``reasons``, a list of str: oneDNN
        refused other implementations for these before it took a reference one.
    """
    tallies = list(tallies)
    found: dict[tuple[str, str], Total] = {}
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    # a step of training changes the weights: they are packed again for a reason
    trains = any(tally.execution.prop.startswith("backward") for tally in tallies)
    reads = None if trains else _weights_reads(tallies)
    for tally in tallies:
        for kind, name, total in _of(tally, reads):
            found.setdefault((kind, name), Total()).add(total)
            if kind.startswith("reference"):
                reasons.setdefault((kind, name), {}).update(dict.fromkeys(tally.refusals))
    rows = [
        {
            "kind": kind, "name": name, "count": s.count, "seconds": s.seconds, "bytes": s.nbytes,
            "advice": _ADVICE[kind].format(these=f"these {s.count}" if s.count > 1 else "it"),
            "reasons": list(reasons.get((kind, name), ())),
        }
        for (kind, name), s in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def _of(tally: Tally, reads: Counter[tuple[str, str]] | None) -> Iterable[tuple[str, str, Total]]:
    one = tally.execution
    # a fused depthwise pair runs kernels, a recurrent layer runs products
    if _LOOP.search(one.impl) and not one.impl.startswith("ref_fused") and one.kind != "rnn":
        kind = "reference reorder" if tally.moves else "reference implementation"
        yield kind, tally.name if tally.moves else f"{one.kind} {one.impl}", tally.sum
    if not tally.moves:
        return
    src, dst = one.operands[:2]
    if one.packs:
        # equal layers are packed once each, and then kernels read their weights more often than that
        if reads is not None and 1 < tally.count >= reads[dst.tag, one.problem]:
            yield "weights packed again", tally.name, tally.sum
    elif src[1:] == dst[1:]:
        yield "reorder that changes nothing", tally.name, tally.sum
    elif src.dtype == dst.dtype and (advised := _activation(one)):
        yield advised, f"{src.dtype}:{src.tag} -> {dst.dtype}:{dst.tag}", tally.sum
    for between, total in tally.undone.items():
        yield "reorder that is undone", f"{tally.name}{f' around {between}' if between else ''}", total
    if tally.chained.count:
        yield "reorders in a row", tally.name, tally.chained


def _activation(one: Execution) -> str:
    """Return the finding of a reorder of an activation; empty if there is none."""
    if not one.moves_activations:
        return ""
    tags = {operand.tag for operand in one.operands[:2]}
    return "activations in row-major" if tags & PLAIN and tags & LAST else "activations leave their blocks"


def _weights_reads(tallies: Iterable[Tally]) -> Counter[tuple[str, str]]:
    """Return the number of reads of weights by format and size."""
    reads: Counter[tuple[str, str]] = Counter()
    for tally in tallies:
        for operand in tally.execution.operands:
            if operand.role == "wei" and not tally.is_reorder:
                reads[operand.tag, tally.execution.weights_sizes] += tally.count
    return reads
