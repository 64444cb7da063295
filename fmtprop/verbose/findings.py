"""Findings: avoidable executions of a log, with advice. Reads sums of distinct executions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from fmtprop.verbose.parse import LAST, PLAIN, Execution

#: names of loops without optimized code; a fused depthwise pair also has such a name, but runs the kernels in it
_LOOP = re.compile(r"(?:^|[:_])ref(?::|_int8|$)")

_ADVICE = {
    "reference implementation": "another format, data type or size has a fast kernel; a newer oneDNN may have one",
    "reference reorder": "nobody has a fast way between these two formats: take another format on one side",
    "weights packed again": "pack them once, and keep the result",
    "reorder that is undone": "let the primitive between the two take the first format",
    "reorders in a row": "one reorder from the first format to the last one would do",
    "reorder that changes nothing": "a copy of a strided, unaligned or temporary tensor: create it dense, once",
    "activations in row-major": "keep activations channels-last, from the model's input on",
    "activations leave their blocks": "keep activations in one format between layers: blocked, or channels-last",
}
#: the same in PyTorch's words
_IN_PYTORCH = {
    "weights packed again": "torch.compile with freezing, torch.utils.mkldnn.to_mkldnn or fmtprop.compile",
    "activations in row-major": "model.to(memory_format=torch.channels_last), and the input likewise",
    "activations leave their blocks": "channels_last, mkldnn tensors, torch.compile with freezing or fmtprop.compile",
}
#: the beginning of a problem that tells the batch, or the rows of a product: runs of one size have one
_BATCH = re.compile(r"mb\d+|[\dx]+(?=x\d+:)")


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
    """One distinct execution, and the sums of its repetitions."""

    #: the execution; its own seconds have no meaning
    execution: Execution
    count: int = 0
    milliseconds: float = 0.0
    #: reasons for which other implementations were refused before its first execution, in logs that tell
    refusals: tuple[str, ...] = ()
    #: whether the library that told of itself last can be PyTorch's, so that its own remedies are part of the advice
    in_pytorch: bool = True
    #: of a reorder that packs weights: how often it came after other computations, and their number by then
    turns: int = 0
    computed: int = -1
    #: the repetitions that undo an earlier reorder, by the kind of the primitive between the two
    undone: dict[str, Total] = field(default_factory=dict)
    #: the repetitions that follow another reorder of the same tensor
    chained: Total = field(default_factory=Total)

    def __post_init__(self) -> None:
        """Compute the properties that each line needs."""
        one = self.execution
        formats = tuple((operand.dtype, operand.tag) for operand in one.operands[:2])
        self.is_reorder = one.kind == "reorder"
        self.moves = self.is_reorder and len(formats) == 2
        self.packs = one.packs
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

    def pack(self, computed: int) -> None:
        """Note a packing of weights after a number of computations: layers that are packed together have one turn."""
        if computed != self.computed:
            self.turns, self.computed = self.turns + 1, computed

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

    Result: ``kind``, ``name``, ``count``, ``seconds``, ``bytes``, ``advice``, and ``reasons``, a list of str: oneDNN
    refused other implementations for these before it took a reference one.
    """
    tallies = list(tallies)
    found: dict[tuple[str, str], Total] = {}
    in_pytorch: set[str] = set()
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    # a step of training changes the weights: they are packed again for a reason
    trains = any(tally.execution.prop.startswith("backward") for tally in tallies)
    layers = None if trains else _layers(tallies)
    for tally in tallies:
        for kind, name, total in _of(tally, layers):
            found.setdefault((kind, name), Total()).add(total)
            in_pytorch |= {kind} if tally.in_pytorch else set()
            if kind.startswith("reference"):
                reasons.setdefault((kind, name), {}).update(dict.fromkeys(tally.refusals))
    rows = [
        {
            "kind": kind, "name": name, "count": s.count, "seconds": s.seconds, "bytes": s.nbytes,
            "advice": _advice(kind, kind in in_pytorch),
            "reasons": list(reasons.get((kind, name), ())),
        }
        for (kind, name), s in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def _advice(kind: str, in_pytorch: bool) -> str:
    own = _IN_PYTORCH.get(kind) if in_pytorch else None
    return _ADVICE[kind] + (f"; in PyTorch: {own}" if own else "")


def _of(tally: Tally, layers: Mapping[tuple[str, str], float] | None) -> Iterable[tuple[str, str, Total]]:
    one = tally.execution
    # a fused depthwise pair runs kernels, a recurrent layer runs products
    if _LOOP.search(one.impl) and not one.impl.startswith("ref_fused") and one.kind != "rnn":
        kind = "reference reorder" if tally.moves else "reference implementation"
        yield kind, tally.name if tally.moves else f"{one.kind} {one.impl}", tally.sum
    if not tally.moves:
        return
    src, dst = one.operands[:2]
    if one.packs:
        # equal layers are packed once each, maybe before a run of which the log has not all layers
        count = tally.count if tally.turns > 1 else 1
        if layers is not None and count > max(1.0, layers.get((dst.tag, one.problem), inf)):
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


def _layers(tallies: Iterable[Tally]) -> dict[tuple[str, str], float]:
    """Return the number of layers that have weights of a format and size.

    A layer reads its weights once in each run. A log does not tell how many runs there were; but among the layers that
    run at one batch, hardly a network has none that is unlike all others, and such a one is executed once in each run.
    So the least number of executions is the number of runs. If a part of the network ran alone, it is too small: then
    there seem to be more layers, and a finding is missed, but none is made up.
    """
    reads: dict[str, Counter[tuple[str, str]]] = {}
    runs: dict[str, int] = {}
    for tally in tallies:
        sizes = tally.execution.weights_sizes
        formats = [one.tag for one in tally.execution.operands if one.role == "wei" and not tally.is_reorder]
        found = _BATCH.match(tally.execution.problem)
        batch = found.group() if found is not None else ""
        for tag in formats:
            reads.setdefault(batch, Counter())[tag, sizes] += tally.count
            runs[batch] = min(runs.get(batch, tally.count), tally.count)
    layers: dict[tuple[str, str], float] = {}
    for batch, counts in reads.items():
        for weights, count in counts.items():
            layers[weights] = max(layers.get(weights, 0.0), count / runs[batch])
    return layers
