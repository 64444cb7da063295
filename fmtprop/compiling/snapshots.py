"""A model on its way from imported to formatted graph, kept to be shown.

Owns the names of the stages. What each of them does is the affair of :mod:`~fmtprop.compiling.compilation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.options import Options
from fmtprop.compiling.tensor_planner import tensor_assigner
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.optimal import OptimalFormats

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
    compilation = Compilation(graph, Options(dtype=dtype, policy=policy, target=target, tune="model"))
    if stage != "imported":
        compilation.normalise(lambda name, result: shots.append(Snapshot("normal", name, result)))
    if stage == "formatted":
        shots.append(_formatted(compilation))
    return shots if passes else shots[-1:]


def _formatted(compilation: Compilation) -> Snapshot:
    if compilation.options.target == "mkldnn":
        assign = tensor_assigner(compilation.options.policy)
        formatted = assign.run(compilation.normal)
        verify(formatted, Stage.FORMATTED)
        return Snapshot("formatted", assign.name, formatted)
    best = compilation.choose()
    return Snapshot("formatted", AssignFormats.name if best.certificate is None else OptimalFormats.name, best.graph)
