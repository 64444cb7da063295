"""Snapshots of a model between the imported and the formatted graph, for display.

Owns the names of the stages. :mod:`~fmtprop.compiling.compilation` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.options import Options
from fmtprop.errors import FmtpropError
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.optimal import OptimalFormats, prices
from fmtprop.targets.registry import provider
from fmtprop.tuning import costs_for

#: the stages in order
STAGES = ("imported", "normal", "formatted")


@dataclass(frozen=True)
class Snapshot:
    """A graph after a pass."""

    #: one of ``STAGES``: the stage that the graph has reached or will reach next
    stage: str
    #: the pass before it; empty for the imported graph
    after: str
    graph: Graph

    @property
    def title(self) -> str:
        """Heading of the snapshot: its stage, and the pass before it."""
        return f"{self.stage}, after {self.after}" if self.after else self.stage


def snapshots(
    graph: Graph,
    stage: str = "formatted",
    *,
    policy: str = "propagate",
    dtype: str = "f32",
    target: str = "onednn",
    passes: bool = False,
) -> list[Snapshot]:
    """Return the graph at a stage, or after each pass up to this stage.

    `stage`: the last stage. Formats are chosen as :func:`fmtprop.compile` does, but without a plan, its checks, and the
    race, which may replace the choice by cost. `policy`: policy of format assignment; ``"optimal"`` uses modelled
    costs. `passes`: True for the imported graph and the graph after every pass, in order; False for only the last
    graph.

    >>> from fmtprop.capture import load
    >>> [(shot.stage, shot.after) for shot in snapshots(load("chain"), "imported")]
    [('imported', '')]
    >>> snapshots(load("chain"), "normal")[0].graph.count("eltwise")  # became a post-op
    0
    """
    if stage not in STAGES:
        raise FmtpropError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
    shots = [Snapshot("imported", "", graph)]
    compilation = Compilation(graph, Options(dtype=dtype, policy=policy, target=target, tune="model"))
    if stage != "imported":
        compilation.normalise(lambda name, result: shots.append(Snapshot("normal", name, result)))
    if stage == "formatted":
        shots.append(_formatted(compilation))
    return shots if passes else shots[-1:]


def costs_of(formatted: Graph, target: str = "onednn") -> dict[str, float]:
    """Return the modelled seconds of each node of a formatted graph that a run executes."""
    executor = provider(target)()
    weights, activations = weights_nbytes(formatted), activations_nbytes(formatted)
    return prices(
        formatted, costs_for("model", weights_nbytes=weights, activations_nbytes=activations, target=executor)
    )


def _formatted(compilation: Compilation) -> Snapshot:
    best = compilation.choose()
    return Snapshot("formatted", AssignFormats.name if best.certificate is None else OptimalFormats.name, best.graph)
