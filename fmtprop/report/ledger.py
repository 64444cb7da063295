"""The ledger: each reorder with its edge, its bytes, its time, its class, its cause and its counterfactual.

Owns the classes and causes of reorders. It reads the formatted graph and the frozen plan; times are given to it.
:mod:`~fmtprop.report.counterfactual` decides whether a reorder pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fmtprop.errors import FmtpropError
from fmtprop.ir import Category, Graph, Node, Role, Value, opdef, port
from fmtprop.ir.aliasing import storage
from fmtprop.layout import FormatKind, MemoryDesc
from fmtprop.passes.assignment.formats import describe
from fmtprop.passes.assignment.without_formats import is_reorder, is_storing
from fmtprop.report.counterfactual import (
    FORCED,
    PAYS,
    UNCERTAIN,
    UNSOLVED,
    WASTED,
    Counterfactual,
    Rivals,
)
from fmtprop.report.words import bytes_text, time_text
from fmtprop.runtime.plan import Step
from fmtprop.store import Store
from fmtprop.targets.reference import REFERENCE
from fmtprop.targets.registry import provider
from fmtprop.tuning.peaks import peaks

if TYPE_CHECKING:
    from fmtprop.report.model import Compiled

#: classes of a reorder
LAYOUT, DATA_TYPE, BOTH, WEIGHTS, BOUNDARY, COPY = KINDS = (
    "layout", "data type", "both", "weights", "boundary", "copy in place",
)  # fmt: skip

#: the part of a run that a reorder belongs to: the whole run of an ordinary plan; in a training step, parameters and
#: gradients that leave the step, or another tensor of a half
RUN, FORWARD, BACKWARD, PARAMETERS = PARTS = ("run", "forward", "backward", "parameters and gradients")

#: causes of a reorder, and their remedies
CAUSES = {
    "pin": "take the pin out, or pin the other side alike",
    "boundary": "give or take the tensor in the format that the plan uses: fmtprop.compile(boundary={...})",
    "data type": "compute both sides in one data type",
    "quantization": "one side computes in bytes, the other is faster in floats or has no kernel for bytes; keep_float "
    "has both in floats",
    "view": "this operation cannot be expressed in the format that is there, so the elements are copied; a model "
    "without it avoids that",
    "in place": "the tensor is made elsewhere: a view, an input, a constant, or read by two concats",
    "PyTorch": "PyTorch runs the operation on one side, which takes and gives row-major tensors; a model without it "
    "avoids that",
    "missing implementation": "no kernel reads the format that is there; a newer oneDNN may have one",
    "cheaper kernel": "a faster kernel wants another format; the reorder is the price",
    "test run": "a plan without it costs less, but the plan with it was the fastest one in the test run",
    "policy": "the policy asks for it; policy='optimal' weighs it",
    "constants": "done once, when the model is compiled",
}

_MEANINGS = {
    FORCED: "forced (no plan does without)",
    PAYS: "worth the time (a plan without costs more)",
    WASTED: "avoidable (a plan without costs no more)",
    UNCERTAIN: "uncertain (the difference is within the errors of the costs)",
    UNSOLVED: "not asked about",
}

#: seconds for the counterfactuals of one plan, the costliest reorders first
_SECONDS = 6.0


@dataclass(frozen=True)
class ReorderRow:
    """One reorder.

    Parameters
    ----------
    name : str
        Node name.
    src, dst : str
        Formats.
    dims : tuple of int
        Logical dimensions.
    nbytes : int
        Bytes read plus bytes written: elements and the padding of their blocks, not the gaps of a strided view.
    seconds : float
        Median time in the plan; 0 for weights, which are packed once.
    share : float
        Part of the run, 0 to 1.
    reason : str
        The reader's and the producer's format.
    origin : str
        Where its reader is in the model: the path of the module, and the line of a call in a ``forward``. Where the
        caller reads the tensor, its producer's.
    producer : str
        The node that writes the tensor, reorders before this one left out.
    readers : tuple of str
        The readers of the copy, as ``node.operand``, reorders after this one left out.
    producer_origin : str
        Where the producer is in the model.
    logical_nbytes : int
        Bytes read plus bytes written, of the elements alone.
    padding_nbytes : int
        The difference to ``nbytes``: the padding of blocks.
    bytes_per_second : float
        Its rate; 0 if it was not timed.
    bandwidth_share : float
        Its rate over this machine's rate of copies within the cache.
    kind : str
        Its class: layout, data type, both, weights, boundary, or the copy of a source of a concat in place.
    cause : str
        One of :data:`CAUSES`.
    remedy : str
        A change that removes it.
    impl, target : str
        The implementation that runs it, and its target.
    counterfactual : Counterfactual
        The cheapest plan without it.
    part : str
        The part of a run that it belongs to, one of :data:`PARTS`.
    """

    name: str
    src: str
    dst: str
    dims: tuple[int, ...]
    nbytes: int
    seconds: float
    share: float
    reason: str
    origin: str
    producer: str = ""
    readers: tuple[str, ...] = ()
    producer_origin: str = ""
    logical_nbytes: int = 0
    padding_nbytes: int = 0
    bytes_per_second: float = 0.0
    bandwidth_share: float = 0.0
    kind: str = LAYOUT
    cause: str = "cheaper kernel"
    remedy: str = ""
    impl: str = ""
    target: str = ""
    counterfactual: Counterfactual = field(default_factory=lambda: Counterfactual(UNSOLVED))
    part: str = RUN


def rows_of_run(net: Compiled, times: Sequence[float]) -> tuple[ReorderRow, ...]:
    """Return the ledger of one run: each reorder that every run executes."""
    found = [(step, time) for step, time in zip(net.plan.steps, times, strict=True) if step.node.op == "reorder"]
    if not found:
        return ()
    clerk, total = _Clerk(net), sum(times)
    answers, end = {}, perf_counter() + _SECONDS
    for step, _ in sorted(found, key=lambda one: -one[1]):
        answers[step.node.name] = clerk.counterfactual(step.node, in_time=perf_counter() < end)
    return tuple(clerk.row(step, time, total, answers[step.node.name]) for step, time in found)


def rows_of_packing(net: Compiled) -> tuple[ReorderRow, ...]:
    """Return the reorders that packed weights once, during compilation."""
    return tuple(
        _row(
            node, node.choice.operands["src"], node.descs[0], 0.0, 0.0, copying=0.0,
            producer=net.graph.inputs(node.name)["src"].node if node.name in net.graph else "",
            readers=_readers(net.graph, node), kind=WEIGHTS, cause="constants",
            counterfactual=Counterfactual(UNSOLVED, why="no run executes it"),
        )
        for node in net.plan.packed
        if node.op == "reorder" and node.choice is not None
    )  # fmt: skip


def totals(rows: Iterable[ReorderRow]) -> dict[str, list[dict[str, Any]]]:
    """Return the ledger's sums, sorted by cost."""
    rows = tuple(rows)
    return {
        "by_kind": _sums(rows, lambda row: row.kind),
        "by_part": _sums(rows, lambda row: row.part),
        "by_cause": _sums(rows, lambda row: row.cause),
        "by_module": _sums(rows, lambda row: module_of(row.origin)),
        "by_verdict": _sums(rows, lambda row: row.counterfactual.verdict),
    }


def verdict(rows: Sequence[ReorderRow], run_seconds: float) -> tuple[str, ...]:
    """Return a ledger's summary in sentences.

    >>> verdict((), 1e-3)
    ('No run executes a reorder.',)
    """
    if not rows:
        return ("No run executes a reorder.",)
    seconds, moved = sum(row.seconds for row in rows), sum(row.nbytes for row in rows)
    share = seconds / run_seconds if run_seconds else 0.0
    some, move = ("1 reorder takes", "moves") if len(rows) == 1 else (f"{len(rows)} reorders take", "move")
    said = f"{some} {share:.1%} of a run ({time_text(seconds)}) and {move} {bytes_text(moved)}."
    count = Counter(row.counterfactual.verdict for row in rows)
    known = ", ".join(f"{count[name]} {meaning}" for name, meaning in _MEANINGS.items() if count[name])
    costliest = max(rows, key=lambda row: row.seconds)
    where = f" in {costliest.origin}" if costliest.origin else ""
    return said, f"Of these: {known}.", f"The costliest one is {costliest.name}{where}: {costliest.remedy}."


def module_of(origin: str) -> str:
    """Return the module that an operator's origin is in: a layer's owner, a top-level layer's own name, or a line.

    >>> module_of("layer1.0.conv1"), module_of("conv1"), module_of("layer1.0 (nets.py:14)"), module_of("nets.py:14")
    ('layer1.0', 'conv1', 'layer1.0', 'nets.py:14')
    """
    path, _, line = origin.partition(" (")
    return path if line or ":" in path else path.rpartition(".")[0] or path


def copy_bandwidth() -> float:
    """Return this machine's rate of copies within its cache, in bytes read and written per second."""
    return peaks(Store(), 0).copying


def _sums(rows: Sequence[ReorderRow], key: Callable[[ReorderRow], str]) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = key(row)
        total = sums.setdefault(name, {"name": name, "count": 0, "seconds": 0.0, "nbytes": 0, "padding_nbytes": 0})
        total["count"] += 1
        total["seconds"] += row.seconds
        total["nbytes"] += row.nbytes
        total["padding_nbytes"] += row.padding_nbytes
    return sorted(sums.values(), key=lambda total: (-total["seconds"], -total["nbytes"], total["name"]))


class _Clerk:
    """Writes the rows of one plan."""

    def __init__(self, net: Compiled) -> None:
        self._net, self._graph = net, net.graph
        self._copying = copy_bandwidth() if provider(net.options.target)().model() is None else 0.0
        self._rivals: Rivals | None = None
        self._refusal = ""
        try:
            self._rivals = Rivals(net)
        except FmtpropError as error:
            self._refusal = str(error)

    def row(self, step: Step, seconds: float, total: float, counterfactual: Counterfactual) -> ReorderRow:
        (source,), result, node = step.operands.values(), step.results[0], step.node
        producer = _producer(self._graph, self._source(node))
        readers = _readers(self._graph, node) if node.name in self._graph else (self._copied(node),)
        kind = self._kind(node, source.desc, result.desc, producer.node, readers)
        return _row(
            node, source.desc, result.desc, seconds, seconds / total if total else 0.0, copying=self._copying,
            producer=str(producer), readers=readers, kind=kind,
            cause=self._cause(node, source.desc, kind, readers, counterfactual.verdict),
            producer_origin=self._graph.node(producer.node).origin, counterfactual=counterfactual,
            part=self._part(node, producer, readers),
        )  # fmt: skip

    def counterfactual(self, node: Node, *, in_time: bool) -> Counterfactual:
        """Return the cheapest plan without a reorder; unsolved if the time is over or the model demands it."""
        if self._rivals is None:
            return Counterfactual(UNSOLVED, why=self._refusal)
        if not in_time:
            return Counterfactual(UNSOLVED, why=f"costlier reorders took all of {_SECONDS:.0f} s")
        if node.name not in self._graph:
            owner, _, operand = self._copied(node).rpartition(".")
            if opdef(self._graph.node(owner).op).parts is None:
                return Counterfactual(FORCED, why=f"{operand} of {owner} is overwritten and read again")
            return self._rivals.without(self._source(node), in_place=owner)
        if not is_reorder(node):
            return Counterfactual(FORCED, why="the model converts the data type here")
        return self._rivals.without(_producer(self._graph, Value(node.name)))

    def _source(self, node: Node) -> Value:
        if node.name in self._graph:
            return self._graph.inputs(node.name)["src"]
        owner, _, operand = self._copied(node).rpartition(".")
        return self._graph.inputs(owner)[operand]

    def _copied(self, node: Node) -> str:
        """Return the ``node.operand`` that a copy is for, if it is no node of the graph: the builder's name has it."""
        return node.name.removesuffix("_copy")

    def _part(self, node: Node, producer: Value, readers: Sequence[str]) -> str:
        turn = self._net.plan.turn
        if turn is None:
            return RUN
        is_given = self._graph.node(storage(self._graph, producer).node).op == "input"
        is_forward = any(step.node.name == node.name for step in self._net.plan.steps[: turn.step])
        leaves = any(self._graph.node(reader.rpartition(".")[0]).op == "output" for reader in readers)
        if (is_given and any(map(self._is_learned, readers))) or (leaves and not is_forward):
            return PARAMETERS
        return FORWARD if is_forward else BACKWARD

    def _is_learned(self, reader: str) -> bool:
        """Return whether a reader, or one behind a view, takes the tensor as a parameter."""
        name, _, operand = reader.rpartition(".")
        node = self._graph.node(name)
        if node.is_boundary:
            return False
        if opdef(node.op).category is Category.VIEW:
            return any(map(self._is_learned, _read_by(self._graph, name)))
        return port(node, operand).role is Role.PARAMETER

    def _kind(self, node: Node, src: MemoryDesc, dst: MemoryDesc, producer: str, readers: Sequence[str]) -> str:
        if node.name not in self._graph:
            return COPY
        outside = [producer, *(reader.rpartition(".")[0] for reader in readers)]
        if any(self._graph.node(name).is_boundary for name in outside):
            return BOUNDARY
        if src.dtype is dst.dtype:
            return LAYOUT
        return DATA_TYPE if src.with_dtype(dst.dtype) == dst else BOTH

    def _cause(self, node: Node, src: MemoryDesc, kind: str, readers: Sequence[str], verdict: str) -> str:
        if kind in (COPY, BOUNDARY):
            return "in place" if kind == COPY else "boundary"
        producer = _producer(self._graph, self._source(node))
        if {*readers, f"{producer.node}.dst"} & self._net.options.pin.keys():
            return "pin"
        weighs = self._net.options.policy == "optimal"
        is_avoidable = verdict == WASTED and not weighs
        if src.dtype is not node.descs[0].dtype and not is_avoidable:
            return "quantization" if is_storing(node) else "data type"
        if any(self._refuses(reader, src) for reader in readers):
            return "view"
        if not is_avoidable and not all(self._can_read(reader, src) for reader in readers):
            sides = [storage(self._graph, producer).node, *(reader.rpartition(".")[0] for reader in readers)]
            return "PyTorch" if any(map(is_by_pytorch, map(self._graph.node, sides))) else "missing implementation"
        if verdict == FORCED:  # kernels read the format, so a view of the tensor does not
            return "view"
        race = self._net.race
        is_raced = verdict == WASTED and race is not None and len(race.names) > 1
        return "test run" if weighs and is_raced else "cheaper kernel" if weighs else "policy"

    def _refuses(self, reader: str, src: MemoryDesc) -> bool:
        """Return whether a reader is a view that a format cannot express."""
        node = self._graph.node(reader.rpartition(".")[0])
        if node.is_boundary or opdef(node.op).category is not Category.VIEW:
            return False
        rule = opdef(node.op).view
        if rule is None:
            return False
        try:
            rule.dst(node.attrs, src, node.results[0])
        except FmtpropError:
            return True
        return False

    def _can_read(self, reader: str, src: MemoryDesc) -> bool:
        name, _, operand = reader.rpartition(".")
        return self._rivals is None or self._rivals.ways_reading(name, operand, src) > 0


def _row(
    node: Node, src: MemoryDesc, dst: MemoryDesc, seconds: float, share: float, *, copying: float, producer: str,
    readers: tuple[str, ...], kind: str, cause: str, counterfactual: Counterfactual, producer_origin: str = "",
    part: str = RUN,
) -> ReorderRow:  # fmt: skip
    nbytes = touched_nbytes(src) + touched_nbytes(dst)
    logical = prod(dst.dims) * (src.dtype.nbytes + dst.dtype.nbytes)
    rate = nbytes / seconds if seconds else 0.0
    choice = node.choice
    return ReorderRow(
        node.name, describe(src), describe(dst), dst.dims, nbytes, seconds, share,
        choice.reason if choice is not None else "", node.origin, producer, readers, producer_origin,
        min(logical, nbytes), max(nbytes - logical, 0), rate, rate / copying if copying else 0.0, kind, cause,
        CAUSES[cause], choice.impl if choice is not None else "", choice.target if choice is not None else "",
        counterfactual, part,
    )  # fmt: skip


def _producer(graph: Graph, value: Value) -> Value:
    """Return the original of a value that may be a reordered copy."""
    while is_reorder(graph.node(value.node)):
        value = graph.inputs(value.node)["src"]
    return value


def is_by_pytorch(node: Node) -> bool:
    """Return whether PyTorch runs a node, as it has to or since the target has no implementation of it."""
    if node.is_boundary:
        return False
    return opdef(node.op).category is Category.HOST or (node.choice is not None and node.choice.target == REFERENCE)


def _readers(graph: Graph, node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_read_by(graph, node.name))) if node.name in graph else ()


def _read_by(graph: Graph, name: str) -> Iterator[str]:
    for reader, operand in graph.readers(Value(name)):
        if is_reorder(graph.node(reader)):
            yield from _read_by(graph, reader)
        else:
            yield f"{reader}.{operand}"


def touched_nbytes(desc: MemoryDesc) -> int:
    """Return the bytes that are touched if a whole tensor is read or written.

    The padding of blocks counts. Gaps between the elements of a strided view do not count, and an element that a
    broadcast repeats counts once.

    >>> half = MemoryDesc((4, 8)).submemory((4, 4), (0, 0))
    >>> half.nbytes, touched_nbytes(half)
    (128, 64)
    """
    if desc.kind is not FormatKind.BLOCKED:
        return desc.nbytes
    g = desc.geometry
    blocks = prod(
        min(count, 1) if stride == 0 else count for count, stride in zip(g.outer_counts(), g.strides, strict=True)
    )
    return blocks * g.block_elements() * desc.dtype.nbytes
