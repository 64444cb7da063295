"""A model on its way from imported to formatted graph, kept to be shown.

Owns the names of the stages. What each of them does is the affair of :mod:`~fmtprop.compiling.stages` and
:mod:`~fmtprop.compiling.contestants`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.compiling.attempts import Attempts
from fmtprop.compiling.contestants import Contestants
from fmtprop.compiling.options import Options
from fmtprop.compiling.stages import normalise
from fmtprop.compiling.tensor_planner import tensor_assigner
from fmtprop.errors import FmtpropError
from fmtprop.ir.footprint import activations_nbytes, weights_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.optimal import OptimalFormats
from fmtprop.passes.target import Setting
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tuning import costs_for

__all__ = ["STAGES", "Snapshot", "snapshots"]

#: in the order in which a graph goes through them
STAGES = ("imported", "normal", "formatted")


@dataclass(frozen=True)
class Snapshot:
    """A graph on its way.

    Parameters
    ----------
    stage : str
        One of ``STAGES``: what the graph is on its way to, or has become.
    after : str
        The pass that gave it; empty for the imported graph.
    graph : Graph
        The graph.
    """

    stage: str
    after: str
    graph: Graph

    @property
    def title(self) -> str:
        """What it is, for a heading: its stage and the pass that gave it."""
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
    """Return the graph at a stage, or after each pass on the way there.

    Parameters
    ----------
    graph : Graph
        Imported; it is not changed.
    stage : {"formatted", "normal", "imported"}
        How far to go. Formats are chosen as :func:`fmtprop.compile` does, without a plan, its checks, and the contest
        in which another than the choice by cost may win.
    policy : {"optimal", "propagate", "naive", "plain"}
        How formats are chosen; ``"optimal"`` by the model's costs.
    dtype : {"f32", "bf16"}
        What compute-intensive ops should run in.
    target : {"onednn", "mkldnn"}
        Who is asked for formats.
    passes : bool
        True for the imported graph and the graph after every pass, in order; False for the last one alone.

    Returns
    -------
    list of Snapshot

    Raises
    ------
    FmtpropError
        The stage is unknown, or a pass failed.

    Examples
    --------
    >>> from fmtprop.frontends import load
    >>> [(shot.stage, shot.after) for shot in snapshots(load("chain"), "imported")]
    [('imported', '')]
    >>> snapshots(load("chain"), "normal")[0].graph.count("eltwise")  # has become a post-op
    0
    """
    if stage not in STAGES:
        raise FmtpropError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
    shots = [Snapshot("imported", "", graph)]
    if stage != "imported":
        normal, _ = normalise(
            graph, dtype, lambda name, result: shots.append(Snapshot("normal", name, result)), target=target
        )
    if stage == "formatted":
        shots.append(_formatted(normal, Options(dtype=dtype, policy=policy, target=target, tune="model")))
    return shots if passes else shots[-1:]


def _formatted(normal: Graph, options: Options) -> Snapshot:
    if options.target == "mkldnn":
        assign = tensor_assigner(options.policy)
        formatted = assign.run(normal)
        verify(formatted, Stage.FORMATTED)
        return Snapshot("formatted", assign.name, formatted)
    setting = Setting(OneDnnTarget(), ReferenceTarget())
    costs = costs_for(
        options.tune, weights_nbytes=weights_nbytes(normal), activations_nbytes=activations_nbytes(normal)
    )
    attempts = Attempts()
    best = Contestants(normal, setting, costs, options, attempts).best
    attempts.settle(normal.name, best.name, 5)
    return Snapshot("formatted", AssignFormats.name if best.certificate is None else OptimalFormats.name, best.graph)
