"""A plan file as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fmtprop.ir.graph import Graph
from fmtprop.report.graph_text import graph_data, graphs_text
from fmtprop.system.printable import printable


class PlanInFile(Protocol):
    """A plan in a file."""

    formatted: Graph
    precision: str


class File(Protocol):
    """What is in a plan file."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What it was made for."""

    @property
    def differing(self) -> Sequence[str]:
        """What differs here."""

    @property
    def options(self) -> Any:
        """How it was compiled."""

    @property
    def plans(self) -> Sequence[PlanInFile]:
        """The plans."""


def plan_data(file: File) -> dict[str, Any]:
    """Return a plan file as JSON-ready data: as ``fmtprop show MODEL -f json``, with what it was made for."""
    plan = file.plans[0]
    graph, computed = plan.formatted, plan.formatted.dependents()
    costs = {
        node.name: node.choice.cost
        for node in graph.nodes()
        if node.choice is not None and not node.is_boundary and node.name in computed
    }
    return {
        "stage": "formatted",
        "after": "a plan file",
        "policy": file.options.policy,
        "dtype": plan.precision,
        "environment": dict(file.environment),
        "differing": list(file.differing),
        **graph_data(graph, costs),
    }


def plan_text(file: File) -> str:
    """Return a plan file as text."""
    plan, head = file.plans[0], []
    head += [f"made for {key}: {printable(value)}" for key, value in file.environment.items()]
    head.append(f"does not fit here: {printable('; '.join(file.differing))}" if file.differing else "fits here")
    head.append(f"policy {file.options.policy}, {plan.precision}")
    steps = Counter(
        f"{node.op} {node.choice.impl}"
        for node in plan.formatted.nodes()
        if node.choice is not None and node.choice.handle is not None
    )
    head += [f"{count:5} {printable(name)}" for name, count in steps.most_common()]
    return "\n".join([*head, "", graphs_text([(f"{plan.formatted.name}, formatted", plan.formatted)])])
