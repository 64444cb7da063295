"""The report of one compiled model: each step with its formats, each reorder with its reason and its cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from fmtprop.ir.graph import Graph
from fmtprop.passes.assignment.assign import LOSES, NO_PRIMITIVE
from fmtprop.passes.assignment.formats import describe
from fmtprop.passes.precision.in_bytes import IN_FLOATS
from fmtprop.passes.target import is_loop
from fmtprop.report.files import OURS_TRACE, write_text
from fmtprop.report.ledger import ReorderRow, module_of, rows_of_packing, rows_of_run, totals, verdict
from fmtprop.report.machine import machine
from fmtprop.report.sketch import (
    BufferRow,
    EdgeRow,
    NodeRow,
    buffers_of,
    computes_in,
    edges_of,
    nodes_of,
    op_with_tail,
)
from fmtprop.report.words import time_text
from fmtprop.runtime.plan import Plan, Step
from fmtprop.system.printable import counted
from fmtprop.system.timing import Stopwatch
from fmtprop.targets import ReferenceTarget

if TYPE_CHECKING:
    import torch

    from fmtprop.compiling.race import Race
    from fmtprop.passes.optimal import Certificate
    from fmtprop.tuning import Basis, Tuning

#: share of a run in steps without optimized code from which a report warns, and the number of ops in the warning
_WARNED_SHARE, _NAMED_OPS = 0.05, 3

#: data types of indices and masks, in which no model computes
_WHOLE = ("", "s32", "s64", "boolean")

#: version of the JSON form
SCHEMA = 4


class Compiled(Protocol):
    """The part of a compiled model that a report needs."""

    graph: Graph
    plan: Plan
    precision: str
    compile_seconds: dict[str, float]
    options: Any
    certificate: Certificate | None
    tuning: Tuning | None
    basis: Basis | None
    race: Race | None
    dropped: Mapping[str, str]
    left_out: Mapping[str, str]

    def profile(self, *, repeats: int) -> list[float]:
        """Return the median seconds of each step."""

    def timeline(self) -> list[tuple[float, float]]:
        """Return when each step of a run began, in seconds since 1970, and its seconds."""

    def random_inputs(self) -> list[torch.Tensor]:
        """Return inputs that fit."""

    def run_flat(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on flat inputs."""


@dataclass(frozen=True)
class StepRow:
    """One executed step.

    Parameters
    ----------
    name, op, impl, target : str
        Node, op, implementation and target.
    formats : str
        ``src -> dst``.
    seconds : float
        Median time in the plan; all steps together take the time of a run.
    reason : str
        The rule that chose its formats.
    origin : str
        Where it is in the model: the path of the module, and the line of a call in a ``forward``.
    computes_in : str
        Data type of its first source.
    """

    name: str
    op: str
    impl: str
    target: str
    formats: str
    seconds: float
    reason: str
    origin: str
    computes_in: str = ""


@dataclass(frozen=True)
class Report:
    """The steps of a plan and their costs.

    Parameters
    ----------
    model, policy, precision : str
        The model, and the options of its compilation.
    machine : mapping of str to str
        The machine of the measurement.
    seconds : float
        Median time of a whole run, without the time in which other programs had its processors.
    compile_seconds : mapping of str to float
        Time of each stage of the compilation.
    steps : tuple of StepRow
        In the order of execution, reorders among them.
    reorders : tuple of ReorderRow
        The reorders of every run.
    packed : tuple of (str, str, int)
        Constants packed once: node, format, bytes.
    memory : mapping of str to int
        Bytes: ``constants``, ``arena``, and ``peak``, the largest sum alive at one step. It has the tensors of the
        arena, whose lower bound it is, and those that PyTorch's operators allocate. Plans of target ``mkldnn`` have no
        arena, 0 bytes.
    certificate : Certificate, optional
        For policy `optimal`: the proof of its choice.
    tuning : Tuning, optional
        For policy `optimal`: the sources of its costs.
    race : Race, optional
        For policy `optimal`: the times of the plans in its race, if there was one.
    dropped : mapping of str to str
        Parts that failed during compilation and were left out, with the reasons.
    left_out : mapping of str to str
        Comparisons of plans for which the compilation had no time.
    packing : tuple of ReorderRow
        The reorders that packed weights once, during compilation.
    nodes : tuple of NodeRow
        The nodes that a run executes, views, inputs and outputs included, with their places in a picture.
    edges : tuple of EdgeRow
        The tensors between them.
    buffers : tuple of BufferRow
        The arena's buffers and their lifetimes.
    timeline : tuple of (float, float)
        One run: when each step began, in seconds since 1970, and its seconds.
    """

    model: str
    policy: str
    precision: str
    machine: Mapping[str, str]
    seconds: float
    compile_seconds: Mapping[str, float]
    steps: tuple[StepRow, ...]
    reorders: tuple[ReorderRow, ...]
    packed: tuple[tuple[str, str, int], ...]
    memory: Mapping[str, int]
    certificate: Certificate | None = None
    tuning: Tuning | None = None
    race: Race | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    packing: tuple[ReorderRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    edges: tuple[EdgeRow, ...] = ()
    buffers: tuple[BufferRow, ...] = ()
    timeline: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, net: Compiled, *, repeats: int = 10) -> Report:
        """Measure a compiled model."""
        seconds = whole_run(net, repeats)
        times = _as_of(net.profile(repeats=repeats), seconds)
        timeline = tuple(net.timeline())
        plan = net.plan
        steps = tuple(_step_row(step, t) for step, t in zip(plan.steps, times, strict=True))
        reorders = rows_of_run(net, times)
        packed = tuple((node.name, describe(node.descs[0]), node.descs[0].nbytes) for node in plan.packed)
        memory = {"constants": plan.constant_nbytes, "arena": plan.arena_nbytes, "peak": plan.peak_nbytes}
        return cls(
            model=plan.name,
            policy=net.options.policy,
            precision=net.precision,
            machine=machine(net.options.target),
            seconds=seconds,
            compile_seconds=dict(net.compile_seconds),
            steps=steps,
            reorders=reorders,
            packed=packed,
            memory=memory,
            certificate=net.certificate,
            tuning=net.tuning,
            race=net.race,
            dropped=net.dropped,
            left_out=net.left_out,
            packing=rows_of_packing(net),
            nodes=nodes_of(net.graph),
            edges=edges_of(net.graph),
            buffers=buffers_of(plan),
            timeline=timeline,
        )

    @property
    def ledger(self) -> tuple[ReorderRow, ...]:
        """All reorders: those of every run, and those that packed weights."""
        return (*self.reorders, *self.packing)

    @property
    def primitives(self) -> Counter[str]:
        """Number of steps of each implementation, the largest first."""
        return Counter(f"{row.op} {row.impl}" for row in self.steps)

    @property
    def formats(self) -> Counter[str]:
        """Number of steps that write each format."""
        return Counter(row.formats.rpartition(" -> ")[2] for row in self.steps)

    @property
    def fallbacks(self) -> tuple[StepRow, ...]:
        """The steps without optimized code: PyTorch's operators, or oneDNN's reference loops."""
        by_pytorch = {ReferenceTarget.name, "aten"}
        return tuple(row for row in self.steps if {row.target, row.impl} & by_pytorch or is_loop(row.impl))

    @property
    def in_floats(self) -> tuple[tuple[StepRow, str], ...]:
        """The steps of a quantized model that compute in floats, each with the reason."""
        found = ((row, row.reason.partition(IN_FLOATS)) for row in self.steps)
        return tuple((row, why) for row, (_, is_told, why) in found if is_told)

    @property
    def computes_in(self) -> str:
        """Data types in which steps compute, the one of the most time first; indices and masks do not count."""
        names = [row["name"] for row in precisions_of(self.steps)]
        return " and ".join(name for name in names if name not in _WHOLE) or self.precision

    @property
    def fallback_share(self) -> float:
        """Part of the run in steps without optimized code, 0 to 1."""
        total = sum(row.seconds for row in self.steps)
        return sum(row.seconds for row in self.fallbacks) / total if total else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons for a slow plan that a user can act on."""
        if self.fallback_share <= _WARNED_SHARE:
            return ()
        seconds: Counter[str] = Counter()
        for row in self.fallbacks:
            seconds[row.op] += row.seconds  # type: ignore[assignment]
        slowest = ", ".join(op for op, _ in seconds.most_common(_NAMED_OPS))
        some = counted(len(self.fallbacks), "step")
        they = "it takes" if len(self.fallbacks) == 1 else "they take"
        in_any_format = all(row.reason == NO_PRIMITIVE or LOSES in row.reason for row in self.fallbacks)
        hint = "; policy='optimal' may find formats that have such code"
        other = "" if self.policy == "optimal" or in_any_format else hint
        return (
            f"{self.fallback_share:.0%} of the run is in {some} without optimized code ({slowest}): {they} as long as "
            f"in PyTorch{other}",
        )

    @property
    def verdict(self) -> tuple[str, ...]:
        """The report in a few sentences: reorders, their gain, and the distance to the bound."""
        return (*verdict(self.reorders, sum(row.seconds for row in self.steps)), *self._distance())

    def _distance(self) -> tuple[str, ...]:
        if self.certificate is None:
            return ()
        one, costs = self.certificate, f"{self.costs} costs"
        nothing = ": there was nothing to gain" if one.optimal else ""
        usual = (f"It is the plan of policy propagate{nothing}.",) if one.is_usual else ()
        if one.optimal:
            return (*usual, f"By its {costs} no plan of these candidates is cheaper: proved.")
        less = f"a plan could take at most {one.gap:.1%} less ({time_text(one.objective - one.bound)})"
        won = self.race is not None and len(self.race.names) > 1
        return (*usual, f"By its {costs} {less}{': this one won the test run' if won else ''}.")

    @property
    def costs(self) -> str:
        """Sources of the costs: ``modelled``, ``measured`` or ``modelled and measured``."""
        if self.tuning is not None:
            measured, modelled = self.tuning.measured + self.tuning.cached, self.tuning.modelled
        else:  # the reports of other policies have costs of other plans alone
            words = " ".join(row.counterfactual.costs for row in self.reorders)
            measured, modelled = words.count("measured"), words.count("modelled")
        found = [word for word, count in (("modelled", modelled), ("measured", measured)) if count]
        return " and ".join(found) or "modelled"

    @property
    def reorder_seconds(self) -> float:
        """Seconds of all reorders of a run."""
        return sum(row.seconds for row in self.reorders)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report as JSON; also write it when a path is given.

        Raises
        ------
        FmtpropError
            The file cannot be written.
        """
        text = json.dumps({"schema": SCHEMA, **self.to_dict()}, indent=1)
        if path is not None:
            write_text(text, path)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data: all fields, and figures derived from them."""
        return {
            **asdict(self),
            "totals": totals(self.reorders),
            "modules": modules_of(self.steps, self.reorders),
            "precisions": precisions_of(self.steps),
            "costs": self.costs,
            "fallback_share": self.fallback_share,
            "warnings": self.warnings,
            "verdict": self.verdict,
        }

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report as one HTML file that needs no network; also write it when a path is given.

        Raises
        ------
        FmtpropError
            The file cannot be written.
        """
        from fmtprop.report.html import page

        text = page([{**self.to_dict(), "error": None}])
        if path is not None:
            write_text(text, path)
        return text

    def to_trace(self, path: str | PathLike[str] | None = None, profile: str | PathLike[str] | None = None) -> str:
        """Return the steps of one run in Chrome's trace format, for Perfetto; also write it when a path is given.

        The clock is that of :mod:`torch.profiler`'s own traces: ``ts`` counts from the same moment.

        Raises
        ------
        FmtpropError
            The file cannot be written, or the profile is none.
        """
        from fmtprop.report.trace import trace

        text = trace(self, profile)
        if path is not None:
            write_text(text, path, OURS_TRACE)
        return text

    def _repr_html_(self) -> str:
        """Return the verdict and the costliest reorders for a notebook."""
        from fmtprop.report.html import notebook

        return notebook(self)

    def to_text(self) -> str:
        """Return the report as text for a terminal."""
        from fmtprop.report.text import report_text

        return report_text(self)

    def __str__(self) -> str:
        return self.to_text()


def modules_of(steps: Sequence[StepRow], reorders: Sequence[ReorderRow]) -> list[dict[str, Any]]:
    """Return the time of each module and of the reorders in it, and the bytes that these move; the slowest first."""
    moved = {row.name: row.nbytes for row in reorders}
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        name = module_of(step.origin)
        sums = found.setdefault(name, {"name": name, "seconds": 0.0, "reorder_seconds": 0.0, "nbytes": 0})
        sums["seconds"] += step.seconds
        if step.name in moved:
            sums["reorder_seconds"] += step.seconds
            sums["nbytes"] += moved[step.name]
    return sorted(found.values(), key=lambda sums: -sums["seconds"])


def precisions_of(steps: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return the steps and their time by the data type that they compute in; the slowest first."""
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        sums = found.setdefault(step.computes_in, {"name": step.computes_in, "steps": 0, "seconds": 0.0})
        sums["steps"] += 1
        sums["seconds"] += step.seconds
    return sorted(found.values(), key=lambda sums: -sums["seconds"])


def _as_of(times: Sequence[float], seconds: float) -> list[float]:
    """Return the times of steps that are in all a run's, so that shares of the steps are shares of the run."""
    total = sum(times)
    return [time * seconds / total for time in times] if total else list(times)


def whole_run(net: Compiled, repeats: int) -> float:
    """Return the median seconds of a run, after two that do not count: without waiting for other programs."""
    inputs = net.random_inputs()
    with Stopwatch() as watch:
        times = [watch.time(lambda: net.run_flat(inputs)) for _ in range(repeats + 2)]
    return median(times[2:])


def _step_row(step: Step, seconds: float) -> StepRow:
    choice = step.node.choice
    impl, reason = (choice.impl, choice.reason) if choice is not None else ("", "")
    node = step.node
    row = node.name, op_with_tail(node), impl, step.target, _formats(step), seconds, reason, node.origin
    return StepRow(*row, computes_in(node))


def _formats(step: Step) -> str:
    src = next((describe(access.desc) for access in step.operands.values()), "")
    dst = describe(step.results[0].desc) if step.results else ""
    return f"{src} -> {dst}"
