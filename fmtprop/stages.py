"""A model's way from imported to formatted graph, with everything in between kept to be shown.

Owns which passes run before formats are assigned, and the names of the stages. How a pass works is its own affair; the
plan and its checks are :mod:`fmtprop.planner`'s.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from fmtprop import dnnl
from fmtprop.collector import collect_young
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import DataType
from fmtprop.options import OPTIMAL
from fmtprop.passes.assign import AssignFormats
from fmtprop.passes.base import Observer, Pass, Pipeline
from fmtprop.passes.optimal import OptimalFormats
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision import LowerPrecision
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.mkldnn import computes_in
from fmtprop.tensor_planner import tensor_assigner
from fmtprop.tuning import costs_for

__all__ = ["STAGES", "Snapshot", "make_room", "normalise", "snapshots", "weights_nbytes"]

#: bytes of weights from which memory is given back between the stages; it takes a quarter of a second
_LARGE = 12 << 20

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


def normalise(
    graph: Graph, dtype: str = "f32", observer: Observer | None = None, *, target: str = "onednn"
) -> tuple[Graph, str]:
    """Bring an imported graph to normal form.

    Parameters
    ----------
    graph : Graph
        Imported; it is not changed.
    dtype : {"f32", "bf16"}
        What compute-intensive ops should run in.
    observer : callable, optional
        Called after each pass with its name and its graph.
    target : {"onednn", "mkldnn"}
        Who will execute.

    Returns
    -------
    Graph
        In normal form.
    str
        The data type that compute-intensive ops really run in: f32 where oneDNN has no bf16, with a warning.

    Raises
    ------
    PassError
        A pass failed, or gave a graph that breaks a rule.
    """
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph, observer)
    if dtype == "f32":
        return normal, "f32"
    if not (computes_in(DataType.BF16) if target == "mkldnn" else dnnl.supports("bf16")):
        who = "PyTorch's oneDNN" if target == "mkldnn" else "oneDNN"
        isa = torch.backends.cpu.get_cpu_capability() if target == "mkldnn" else dnnl.lib().isa
        warnings.warn(
            f"{who} has no bf16 on this CPU ({isa}): compute-intensive ops run in f32 instead",
            RuntimeWarning,
            stacklevel=5,
        )
        return normal, "f32"
    lowered = LowerPrecision(DataType.BF16).run(normal)
    if observer is not None:
        observer(LowerPrecision.name, lowered)
    return lowered, "bf16"


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
        How far to go. Formats are chosen as :func:`fmtprop.compile` does, without a plan, its checks, and the variants
        that it runs against each other.
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
        assign = _assigner(policy, normal) if target == "onednn" else tensor_assigner(policy)
        formatted = assign.run(normal)
        verify(formatted, Stage.FORMATTED)
        shots.append(Snapshot("formatted", assign.name, formatted))
    return shots if passes else shots[-1:]


def _assigner(policy: str, normal: Graph) -> Pass:
    target, fallback = OneDnnTarget(), ReferenceTarget()
    if policy != OPTIMAL:
        return AssignFormats(policy, target, fallback)
    return OptimalFormats(target, fallback, costs_for("model", weights_nbytes=weights_nbytes(normal)))


def weights_nbytes(graph: Graph) -> int:
    """Return the bytes of all constants of a graph: how far away its weights are when a layer needs them."""
    return sum(node.results[0].nbytes for node in graph.nodes() if node.op == "constant")


def make_room(graph: Graph) -> None:
    """Give back the memory of what earlier stages left, if the model is large: their graphs are held by cycles."""
    if weights_nbytes(graph) > _LARGE:
        collect_young()
        dnnl.trim_heap()
