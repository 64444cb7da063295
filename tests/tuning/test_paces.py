"""What a run teaches about costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fmtprop.store import Store
from fmtprop.tuning import costs_for, paces
from fmtprop.tuning.paces import Paces
from tests.tuning.test_costs import WEIGHTS, Work, fill
from tests.tuning.test_measure import ways

CONV = ("modelled", "f32", "convolution", "brg")


@pytest.fixture
def work() -> Work:
    return [(node, candidate) for node, candidates in (ways(16, 14), ways(8, 7)) for candidate in candidates]


def chosen(work: Work) -> list:
    return [
        node.with_(descs=candidate.results, choice=candidate.choice("test")).with_(name=f"{node.name}_{index}")
        for index, (node, candidate) in enumerate(work)
    ]


def test_the_most_special_family_that_is_known_counts(tmp_path: Path) -> None:
    paces = Paces(Store(tmp_path / "store.sqlite"))
    paces.learn([(CONV, 1e-5, 4e-5), (CONV, 1e-3, 1e-3), (("modelled", "f32", "matmul", "brg"), 1e-4, 2e-4)])
    assert paces.of(CONV, 1e-5) == pytest.approx(4.0), "of this size"
    assert paces.of(CONV, 1e-1) == pytest.approx(1.04e-3 / 1.01e-3), "of all sizes"
    assert paces.of((*CONV[:3], "jit"), 1e-5) == paces.of(CONV, 1e-1), "of the op"
    assert paces.of(("modelled", "f32", "softmax", "jit"), 1e-5) == pytest.approx(1.24e-3 / 1.11e-3), "of the type"
    assert paces.of(("modelled", "bf16", "softmax", "jit"), 1e-5) == 1.0
    assert paces.of(("measured", *CONV[1:]), 1e-5) == 1.0, "figures and a model err in other ways"


def test_what_was_learned_is_kept_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for pace in (2.0, 3.0):
        Paces(Store(path)).learn([(CONV, 1e-3, pace * 1e-3)])
        assert Paces(Store(path)).of(CONV, 1e-3) == pace


def test_a_disturbed_run_teaches_no_nonsense(tmp_path: Path) -> None:
    paces = Paces(Store(tmp_path / "store.sqlite"))
    paces.learn([(CONV, 1e-6, 1.0)])
    assert paces.of(CONV, 1e-6) == 50.0


@pytest.mark.parametrize("measured", [False, True])
def test_costs_that_a_run_corrected_predict_it(store: Store, work: Work, measured: bool) -> None:
    if measured:
        fill(store, work, lambda node, candidate: 1e-4)
    costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
    costs.prepare(work, [])
    before = [costs.node(*way) for way in work]
    steps = list(zip(chosen(work), [3.0 * cost for cost in before], strict=True))
    costs.learn(steps)
    assert [costs.node(*way) for way in work] == pytest.approx([3.0 * cost for cost in before])
    again = costs_for("auto", weights_nbytes=WEIGHTS, store=Store(store.path))
    again.prepare(work, [])
    assert [again.node(*way) for way in work] == pytest.approx([3.0 * cost for cost in before])
    again.learn([(node, seconds / 2) for node, seconds in steps])
    assert sum(again.node(*way) for way in work) == pytest.approx(1.5 * sum(before)), "learned anew, not added"


def test_views_and_nodes_without_a_choice_teach_nothing(store: Store, work: Work) -> None:
    costs = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    (node, candidate), known = work[0], len(store)
    view = node.with_(descs=candidate.results, choice=replace(candidate.choice("test"), target="view"))
    costs.learn([(node, 1.0), (view, 1.0)])
    assert len(store) == known


def test_ratios_to_an_older_model_tell_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = ("modelled", "bf16", "matmul", "onednn/brg:avx512_core_amx")
    Paces(Store()).learn([(family, 1e-3, 3e-3)])
    assert Paces(Store()).of(family, 1e-3) == pytest.approx(3.0)
    monkeypatch.setattr(paces, "_EDITION", 3)
    assert Paces(Store()).of(family, 1e-3) == 1.0
