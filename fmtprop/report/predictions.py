"""What costs predicted, beside what a run takes: of the whole plan, and of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.passes.optimal import prices
from fmtprop.passes.target import candidate_of
from fmtprop.report.model import whole_run
from fmtprop.targets.registry import provider
from fmtprop.tuning import costs_for

if TYPE_CHECKING:
    from fmtprop.report.model import Compiled

#: steps that take less of a run than this say nothing about costs, alone: a microsecond of timing is much of them
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class Predictions:
    """Costs over times."""

    model: str
    precision: str
    seconds: float
    cost_seconds: float
    #: `median`, `worst`: cost over time of a step: the median, and the one that is farthest from 1. Steps that take
    #: less than a hundredth of a run are not among them.
    median: float
    worst: float
    worst_step: str
    #: whether no cost of the plan was measured
    is_modelled: bool

    @classmethod
    def of(cls, net: Compiled, *, repeats: int = 10) -> Predictions:
        """Run a compiled model, and hold its costs against the times."""
        times = dict(zip((step.node.name for step in net.plan.steps), net.profile(repeats=repeats), strict=True))
        seconds, total = whole_run(net, repeats), sum(times.values())
        costs, measured = costs_of(net)
        ratios = {
            name: costs[name] / taken
            for name, taken in times.items()
            if costs.get(name) and taken >= _LEAST_SHARE * total
        }
        name = max(ratios, key=lambda one: max(ratios[one], 1 / ratios[one]), default="")
        node = net.graph.node(name) if name else None
        told = f"{name} ({node.op} {node.choice.impl})" if node is not None and node.choice is not None else ""
        return cls(
            net.plan.name, net.precision, seconds, sum(costs.values()), median(ratios.values()) if ratios else 0.0,
            ratios.get(name, 0.0), told, not measured,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the figures in three lines."""
        source = "modelled" if self.is_modelled else "measured"
        lines = [
            f"{self.model}, {self.precision}: {source} costs {self.cost_seconds * 1e3:.2f} ms, a run "
            f"{self.seconds * 1e3:.2f} ms, ratio {self.cost_seconds / self.seconds:.2f}"
        ]
        if self.worst_step:
            lines.append(f"of each step that takes a hundredth of a run or more: median {self.median:.2f}")
            lines.append(f"the worst {self.worst:.2f}, {self.worst_step}")
        return "\n".join(lines)


def costs_of(net: Compiled) -> tuple[Mapping[str, float], int]:
    """Return the cost of each step of a plan by its node, by the figures of the store, and how many were measured."""
    graph = net.graph
    costs = costs_for(
        net.options.recorded_costs,
        weights_nbytes=weights_nbytes(graph),
        activations_nbytes=activations_nbytes(graph),
        target=provider(net.options.target)(),
    )
    computed = [node for node in graph.nodes() if node.choice is not None and not node.is_boundary]
    pairs = [(node.choice.operands["src"], node.descs[0]) for node in computed if node.op == "reorder" and node.choice]
    costs.prepare([(node, candidate_of(node)) for node in computed if node.op != "reorder"], pairs)
    return prices(graph, costs), costs.tuning.cached
