"""Where costs come from: the model, a measurement, the cache; and that they can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fmtprop.errors import FmtpropError
from fmtprop.ir.node import Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops.eltwise import Eltwise
from fmtprop.passes.target import Candidate
from fmtprop.store import Store, key_of
from fmtprop.targets import OneDnnTarget
from fmtprop.tuning import Tuning, costs_for
from fmtprop.tuning import costs as costs_module
from fmtprop.tuning.costs import disturbance
from fmtprop.tuning.identity import describe, describe_reorder, identity_of
from fmtprop.tuning.measure import Bench, Job
from fmtprop.tuning.peaks import keys_of_peaks
from tests.tuning.test_measure import ways

WEIGHTS = 1 << 20
PLAIN, LAST = (MemoryDesc((1, 16, 14, 14), "f32", tag=tag) for tag in ("abcd", "acdb"))
Work = list[tuple[Node, Candidate]]


@pytest.fixture
def work() -> Work:
    node, candidates = ways(16, 14)
    other, more = ways(8, 7)
    return [(node, candidate) for candidate in candidates] + [(other, candidate) for candidate in more]


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("measured although nothing was to be measured")

    monkeypatch.setattr(Bench, "seconds", fail)


@pytest.mark.parametrize(("weights", "activations", "asked"), [(1, 2, 3), (99, 1, 100), (1, None, 1)])
def test_weights_come_from_as_far_as_all_that_a_run_touches_reaches(
    weights: int, activations: int | None, asked: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    figures = costs_module.peaks(store)
    monkeypatch.setattr(costs_module, "peaks", lambda _, footprint: seen.append(footprint) or figures)
    nbytes = None if activations is None else activations << 20
    costs_for("model", weights_nbytes=weights << 20, activations_nbytes=nbytes, store=store)
    assert seen == [asked << 20]


def test_an_unknown_tune_is_refused(store: Store) -> None:
    with pytest.raises(FmtpropError, match="unknown tune 'guess'; known: auto, model, measure"):
        costs_for("guess", weights_nbytes=1, store=store)


def test_the_model_measures_nothing(store: Store, work: Work, no_measuring: None) -> None:
    costs = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    costs.prepare(work, [(PLAIN, LAST)])
    assert all(costs.node(*way) == costs.model.node(*way) > 0 for way in work)
    assert costs.tuning == Tuning(modelled=len(work) + 1)
    assert not any(costs.is_measured(identity_of(*way)) for way in work)
    assert len(store) == 0


def test_without_figures_of_nodes_no_keys_are_made(
    store: Store, work: Work, no_measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_figures(dict.fromkeys(keys_of_peaks().values(), 1e9))
    monkeypatch.setattr(costs_module, "describe", None)  # calling it now fails
    costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
    costs.prepare(work, [(PLAIN, LAST), (PLAIN, PLAIN)])
    assert all(costs.node(*way) == costs.model.node(*way) for way in work)
    assert costs.tuning == Tuning(modelled=len(work) + 1)


def test_what_was_measured_is_known_to_the_next_compilation(
    store: Store, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    first = costs_for(
        "measure", weights_nbytes=WEIGHTS, store=store, progress=lambda done, total: told.append((done, total))
    )
    first.prepare(work, [(PLAIN, LAST)])
    (total,) = {total for _, total in told}
    assert told == sorted(told) and told[0] == (0, total) and told[-1] == (total, total)
    assert total % 3 == 0, "two nodes and a reorder"
    assert first.tuning.measured == len(store) > 0 and first.tuning.seconds > 0
    assert first.tuning.measured + first.tuning.modelled == len(work) + 1
    figures = [first.node(*way) for way in work]
    assert any(a != first.model.node(*way) for a, way in zip(figures, work, strict=True))

    monkeypatch.setattr(Bench, "seconds", None)  # calling it now fails
    for tune in ("auto", "measure"):
        again = costs_for(tune, weights_nbytes=WEIGHTS, store=Store(store.path))
        again.prepare(work, [(PLAIN, LAST)])
        assert [again.node(*way) for way in work] == figures
        assert again.reorder(PLAIN, LAST) == first.reorder(PLAIN, LAST)
        assert again.tuning == Tuning(0, first.tuning.measured, first.tuning.modelled, 0.0)
        measured = [identity for identity in {identity_of(*way) for way in work} if again.is_measured(identity)]
        assert len(measured) + again.is_measured((PLAIN, LAST)) == first.tuning.measured


def test_remeasuring_replaces_what_the_cache_knows(store: Store, work: Work) -> None:
    fill(store, work, lambda node, candidate: 1.0)
    known = len(store)
    costs = costs_for("remeasure", weights_nbytes=WEIGHTS, store=store)
    for _ in range(2):  # once per compilation, however often it asks
        costs.prepare(work, [])
        assert costs.tuning.measured > 0 and costs.tuning.cached == 0
    timed = [way for way in work if costs.node(*way) != 1.0]
    assert len(timed) >= costs.tuning.measured
    assert len(store) == known
    again = costs_for("auto", weights_nbytes=WEIGHTS, store=Store(store.path))
    again.prepare(work, [])
    assert min(again.node(*way) for way in work) < 0.5


def test_a_reorder_must_save_more_than_the_doubt_in_the_figures(store: Store, work: Work) -> None:
    def asked(seconds: float) -> float:
        fill(store, work, lambda node, candidate: seconds)
        store.add_figures({key_of(describe_reorder(PLAIN, LAST)): 1e-5})
        costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
        costs.prepare(work, [(PLAIN, LAST)])
        found = costs.reorder(PLAIN, LAST)
        assert found is not None
        return found

    nodes = len({node.name for node, _ in work})
    assert asked(8e-5) - asked(4e-5) == pytest.approx(1.5e-3 * nodes * 4e-5)
    modelled = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    modelled.prepare(work, [(PLAIN, LAST)])
    best = {node.name: min(modelled.node(*way) for way in work if way[0].name == node.name) for node, _ in work}
    own = modelled.model.reorder(PLAIN, LAST) + disturbance(PLAIN, LAST)
    assert modelled.reorder(PLAIN, LAST) == pytest.approx(own + 1.5e-3 * sum(best.values()))


def test_without_time_nothing_is_measured(store: Store, work: Work, no_measuring: None) -> None:
    costs = costs_for("measure", weights_nbytes=WEIGHTS, budget=0.0, store=store)
    costs.prepare(work, [])
    assert costs.tuning.measured == 0 and costs.tuning.modelled == len(work)
    assert all(costs.node(*way) == costs.model.node(*way) for way in work)


def fill(store: Store, work: Work, seconds: Callable[[Node, Candidate], float]) -> None:
    store.add_figures({key_of(describe(*way, WEIGHTS)): seconds(*way) for way in work})


@pytest.fixture
def convolutions() -> Work:
    """Return ways that take 0.3 ms and more on any machine's core."""
    node, candidates = ways(64, 56)
    return [(node, candidate) for candidate in candidates]


@pytest.mark.parametrize("tune", ["auto", "measure"])
@pytest.mark.parametrize("ratio", [1e-3, 35.0])
def test_a_recorded_figure_that_no_machine_can_need_does_not_count(
    tune: str, ratio: float, store: Store, convolutions: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of 0.7 ms was recorded with 25 ms; the next tuning heals the store by itself."""
    honest = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    poisoned = convolutions[0]
    assert honest.node(*poisoned) > 1e-5
    fill(store, convolutions, lambda node, candidate: honest.node(node, candidate))
    fill(store, [poisoned], lambda node, candidate: ratio * honest.node(node, candidate))
    monkeypatch.setattr(Bench, "seconds", answering(lambda job: honest.node(*by_identity(convolutions, job.key))))
    costs = costs_for(tune, weights_nbytes=WEIGHTS, store=store)
    costs.prepare(convolutions, [])
    assert costs.node(*poisoned) == pytest.approx(honest.node(*poisoned))
    assert costs.tuning.measured == (len(convolutions) if tune == "measure" else 0)
    healed = store.figure(key_of(describe(*poisoned, WEIGHTS)))
    assert healed == pytest.approx((1 if tune == "measure" else ratio) * honest.node(*poisoned))


def by_identity(work: Work, identity: object) -> tuple[Node, Candidate]:
    return next(way for way in work if identity_of(*way) == identity)


def answering(
    seconds: Callable[[Job], float], doubtful: Callable[[Job], bool] = lambda job: False
) -> Callable[..., None]:
    """Return a measurement that gives these answers."""

    def measure(bench: Bench, groups: list[list[Job]], deadline: float, done: Any, progress: Any) -> None:
        for index, jobs in enumerate(groups):
            bench.doubtful |= {job.key for job in jobs if doubtful(job)}
            done(index, {job.key: seconds(job) for job in jobs})
            bench.doubtful.clear()

    return measure


@pytest.mark.parametrize("kind", ["once", "always", "always another"])
def test_what_cannot_be_is_timed_again_and_left_to_the_model_if_it_stays_so(
    kind: str, store: Store, convolutions: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    turns: list[object] = []
    strange = identity_of(*convolutions[0])

    def seconds(job: Job) -> float:
        expected = honest.node(*by_identity(convolutions, job.key))
        if job.key != strange:
            return expected
        turns.append(job)
        factor = {"once": 40.0 if len(turns) == 1 else 1.0, "always": 40.0, "always another": 40.0 * len(turns) ** 2}
        return factor[kind] * expected

    monkeypatch.setattr(Bench, "seconds", answering(seconds))
    costs = costs_for("measure", weights_nbytes=WEIGHTS, store=store)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costs.prepare(convolutions, [])
    assert len(turns) == 2 and len(caught) == (kind == "always another")
    expected = honest.node(*convolutions[0])
    assert costs.node(*convolutions[0]) == pytest.approx((40.0 if kind == "always" else 1.0) * expected, rel=1e-6)
    again = costs_for("auto", weights_nbytes=WEIGHTS, store=Store(store.path))
    again.prepare(convolutions, [])
    assert again.node(*convolutions[0]) == pytest.approx(costs.node(*convolutions[0])), "two moments agreed: recorded"


def test_disturbed_figures_are_timed_again_with_one_warning_for_all_that_stay(
    store: Store, convolutions: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    monkeypatch.setattr(
        Bench,
        "seconds",
        answering(lambda job: 2 * honest.node(*by_identity(convolutions, job.key)), lambda job: True),
    )
    costs = costs_for("measure", weights_nbytes=WEIGHTS, store=store)
    with pytest.warns(RuntimeWarning, match=f"the times of {len(convolutions)} of {len(convolutions)} ways") as caught:
        costs.prepare(convolutions, [])
    assert len(caught) == 1 and costs.tuning.measured == 0 and len(store) == 0
    assert all(costs.node(*way) == honest.node(*way) for way in convolutions)


def test_auto_does_not_mix_within_a_node(store: Store, work: Work, no_measuring: None) -> None:
    model = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    first = [way for way in work if way[0].results == work[0][0].results]
    second = [way for way in work if way not in first]
    fill(store, first[:1] + second, lambda node, candidate: 3 * model.node(node, candidate))
    costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
    costs.prepare(work, [])
    for way in work:  # all of the second node are known; the first one's are modelled, on the same scale
        assert costs.node(*way) == pytest.approx(3 * model.node(*way))
    store.add_figures(
        {key_of(describe(*first[0], WEIGHTS)): 1.0}
    )  # known, but not comparable with its modelled siblings
    costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
    costs.prepare(work, [])
    assert costs.node(*first[0]) != 1.0


def test_what_was_not_measured_is_on_the_scale_of_what_was(store: Store, work: Work, no_measuring: None) -> None:
    model = costs_for("model", weights_nbytes=WEIGHTS, store=store)
    fill(store, work[1:], lambda node, candidate: 5 * model.node(node, candidate))
    costs = costs_for("measure", weights_nbytes=WEIGHTS, budget=0.0, store=store)
    costs.prepare(work, [])
    assert costs.node(*work[0]) == pytest.approx(5 * model.node(*work[0]))


def test_networks_of_another_size_share_nothing(store: Store, work: Work) -> None:
    node, candidate = work[0]
    small, large = (key_of(describe(node, candidate, size)) for size in (1 << 20, 100 << 20))
    assert small != large
    assert key_of(describe(node, candidate, 70 << 20)) == large, "both of the largest class"


def test_reorders(store: Store) -> None:
    repeated = MemoryDesc(PLAIN.dims, "f32", strides=(0, 0, 0, 0))
    store.add_figures({key_of(describe_reorder(PLAIN, LAST)): 5e-5})
    costs = costs_for("auto", weights_nbytes=WEIGHTS, store=store)
    costs.prepare([], [(PLAIN, LAST), (LAST, PLAIN), (PLAIN, repeated)])
    assert costs.reorder(PLAIN, PLAIN) == 0.0
    assert costs.reorder(PLAIN, LAST) == 5e-5 + disturbance(PLAIN, LAST)
    assert costs.reorder(PLAIN, repeated) is None
    back, modelled = costs.reorder(LAST, PLAIN), costs.model.reorder(LAST, PLAIN)
    forth = costs.model.reorder(PLAIN, LAST)
    assert back is not None and modelled is not None and forth is not None
    assert back == pytest.approx(modelled * 5e-5 / forth, abs=1e-4), "on the scale of its sibling"


def test_views_are_free_and_the_reference_target_is_modelled(store: Store, work: Work, no_measuring: None) -> None:
    node, candidate = work[0]
    view = Candidate("view", "in_place", candidate.operands, candidate.results)
    reference = Candidate("reference", "torch", candidate.operands, candidate.results)
    costs = costs_for("measure", weights_nbytes=WEIGHTS, store=store)
    costs.prepare([(node, view), (node, reference)], [])
    assert costs.node(node, view) == 0.0
    assert costs.node(node, reference) == costs.model.node(node, reference) > 0


def test_a_slow_reference_loop_is_not_timed_where_something_else_exists(store: Store) -> None:
    desc = MemoryDesc((1, 16, 14, 14), "f32")
    node = Node("act", "eltwise", Eltwise("relu"), (TensorType(desc.dims, desc.dtype),))
    other = MemoryDesc(desc.dims, "f32", tag="acdb")
    asked = ({"src": desc, "dst": desc}, {"src": desc, "dst": other})  # only loops change the format
    candidates = [candidate for request in asked for candidate in OneDnnTarget().candidates(node, request)]
    slow = [candidate for candidate in candidates if candidate.is_ref]
    if not slow or len(slow) == len(candidates):
        pytest.skip("this oneDNN offers no reference loop for relu")
    costs = costs_for("measure", weights_nbytes=WEIGHTS, store=store)
    costs.prepare([(node, candidate) for candidate in candidates], [])
    assert costs.tuning.measured <= len(candidates) - len(slow)
    best = min(costs.node(node, candidate) for candidate in candidates)
    assert all(costs.node(node, candidate) > best for candidate in slow)
