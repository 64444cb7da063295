"""What the verifier forbids, the problem cannot choose: random networks by random costs, and each rule by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from fmtprop import dnnl
from fmtprop.compiling.stages import normalise
from fmtprop.ir import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.formats import channel_blocked, channels_last
from fmtprop.passes.optimal import OptimalFormats, expansions, trial
from fmtprop.passes.precision.lower import LowerPrecision
from fmtprop.passes.rewrites.release_sums import ReleaseSums
from fmtprop.passes.target import Setting
from fmtprop.passes.variants.scale_weights import ScaleWeights
from fmtprop.passes.variants.slice_batch import SliceBatch
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.reference import ReferenceTarget
from tests.models.choices import chosen
from tests.models.odd import RandomCosts
from tests.passes.random_graphs import random_graph

#: how often each way to run was chosen, by all seeds of this process
CHOSEN: Counter[str] = Counter()


class Costs(RandomCosts):
    """Random, but what stands for one node by several is often cheap: it has many costs to add up."""

    def node(self, node, candidate):
        several = node.name.startswith("expanded_") and self.seed % 3
        return super().node(node, candidate) * (0.02 if several else 1.0)


class Declining(OneDnnTarget):
    """Declines some nodes altogether, as a library does whose every implementation failed its check."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def candidates(self, node, request):
        declined = node.op != "reorder" and random.Random(f"{self.seed}{node.name}").random() < 0.4
        return () if declined else super().candidates(node, request)


def boundary(graph: Graph, rng: random.Random) -> dict[str, MemoryDesc]:
    """Return formats for some inputs and outputs."""
    found = {}
    for node in (*graph.input_nodes, *graph.output_nodes):
        is_input = node.op == "input"
        type_ = node.results[0] if is_input else graph.type_of(graph.inputs(node.name)["src"])
        row_major = MemoryDesc(type_.dims, type_.dtype)
        formats = [row_major, channels_last(row_major), *([channel_blocked(row_major, 8)] if is_input else [])]
        found[node.name] = rng.choice(formats)
    return found


def variants(normal: Graph) -> Iterator[Graph]:
    """Yield a normal graph and each rewrite of it whose formats a compilation may ask for."""
    yield normal
    for rewrite in (SliceBatch(1, 1), ScaleWeights()):
        rewritten = rewrite.run(normal)
        if rewritten is not normal:
            yield rewritten


def check(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(seed, rng.choice([12, 20, 32]))
    normal, _ = normalise(graph)
    if seed % 2 and dnnl.supports("bf16"):
        normal = LowerPrecision(DataType.BF16).run(normal)
    target, fallback = OneDnnTarget() if seed % 3 else Declining(seed), ReferenceTarget()
    for policy in ("plain", "naive", "propagate"):
        verify(AssignFormats(policy, Setting(target, fallback, boundary(normal, rng))).run(normal), Stage.FORMATTED)
    for variant in variants(normal):
        released = ReleaseSums().run(variant)
        verify(released, Stage.NORMAL)
        solver = OptimalFormats(Setting(target, fallback, boundary(released, rng)), Costs(seed))
        ways = expansions(released, solver, with_originals=bool(seed % 2))
        for formatted, certificate in solver.solutions(released, ways):
            verify(formatted, Stage.FORMATTED)
            assert certificate.objective <= certificate.propagate * (1 + 1e-9)
            CHOSEN.update(chosen(formatted))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 24 else pytest.mark.slow) for n in range(400)])
def test_no_choice_breaks_a_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CHANNELS", 2)
    monkeypatch.setattr(trial, "HEIGHT", 2)
    check(seed)
