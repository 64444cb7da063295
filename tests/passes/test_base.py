from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fmtprop.errors import PassError, ShapeError
from fmtprop.ir.verify import Stage
from fmtprop.ops import Reshape
from fmtprop.passes import base
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.rewrites.fold_constants import FoldConstants
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from tests.passes.rewriting import Builder


def graph_with_identity():
    build = Builder()
    return build.output(build.op("reshape", Reshape((2, 3)), "same", src=build.input(2, 3)))


@dataclass(frozen=True)
class Breaker:
    name: ClassVar[str] = "breaker"

    def run(self, graph):
        graph = graph.copy()
        for node in graph.output_nodes:
            graph.remove(node.name)
        return graph


@dataclass(frozen=True)
class Thrower:
    name: ClassVar[str] = "thrower"

    def run(self, graph):
        raise ShapeError("node n: too small")


def test_passes_run_in_order_and_are_observed():
    graph, seen = graph_with_identity(), []
    result = Pipeline(NORMALISE, Stage.NORMAL).run(graph, lambda name, g: seen.append((name, len(g))))
    assert seen[0] == ("remove-identities", 2) and len(seen) == len(NORMALISE)
    assert len(result) == 2 and len(graph) == 3


def test_the_pass_that_breaks_the_graph_is_named():
    with pytest.raises(PassError) as caught:
        Pipeline((RemoveIdentities(), Breaker()), Stage.NORMAL).run(graph_with_identity())
    assert str(caught.value) == (
        "pass breaker (after remove-identities): V4: graph test has no output; mark one with Graph.output"
    )


def test_a_pass_that_is_not_the_last_is_checked_too():
    with pytest.raises(PassError, match=r"pass breaker \(the first pass\): V4"):
        Pipeline((Breaker(), RemoveIdentities()), Stage.NORMAL).run(graph_with_identity())


def test_the_first_pass_has_no_predecessors():
    with pytest.raises(PassError, match=r"pass thrower \(the first pass\): node n: too small"):
        Pipeline((Thrower(),), Stage.NORMAL).run(graph_with_identity())


def test_the_last_graph_must_reach_the_stage():
    with pytest.raises(PassError, match=r"pass fold-constants .the first pass.: V10: node same"):
        Pipeline((FoldConstants(),), Stage.NORMAL).run(graph_with_identity())


def test_names_of_passes_are_unique():
    names = [step.name for step in NORMALISE]
    assert len(set(names)) == len(names)


def test_a_graph_of_known_structure_is_not_verified(monkeypatch):
    monkeypatch.setattr(base, "verify", lambda graph, stage: pytest.fail("its formatted graph is verified"))
    known = Pipeline(NORMALISE, Stage.NORMAL, is_known=True).run(graph_with_identity())
    assert len(known) == 2


def test_the_pass_that_fails_on_a_graph_of_known_structure_is_named():
    with pytest.raises(PassError, match=r"pass thrower \(the first pass\): node n: too small"):
        Pipeline((Thrower(),), Stage.NORMAL, is_known=True).run(graph_with_identity())
