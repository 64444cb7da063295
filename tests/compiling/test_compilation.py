"""Which plan is kept, what is remembered of it, and what becomes of the weights."""

from __future__ import annotations

from math import inf
from pathlib import Path
from zlib import crc32

import pytest
import torch

import fmtprop as fp
from fmtprop.api import compile_graph
from fmtprop.compiling import budget, compilation, entrants, selection
from fmtprop.compiling.options import Options
from fmtprop.compiling.race import Race, run_in_turns
from fmtprop.compiling.stages import normalise
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.layout import DataType
from fmtprop.passes.target import Setting
from fmtprop.report import Report
from fmtprop.report.text import certificate_text
from fmtprop.runtime.build import Draft
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.tuning import costs, peaks, roofline, tuner
from tests.clocks import Clock
from tests.compiling.other_plans import unlike_any_other


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 24, 3)
    ).eval()


@pytest.mark.parametrize("winner", [0, 1])
@pytest.mark.usefixtures("usual_peaks", "only_verdicts")
def test_the_faster_plan_is_kept_and_remembered(
    model: torch.nn.Module, winner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def decide(plans, inputs, limit, fewest, *_):
        seen.append(len(plans))
        return Race(tuple(1.0 + (i != winner) for i in range(len(plans))), 3, winner, tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    unlike_any_other(monkeypatch)
    x = torch.randn(1, 3, 20, 20)
    first, again = fp.compile(model, x), fp.compile(model, x)
    assert seen == [2], "the second compilation knows the verdict"
    assert first.race is not None and first.race.winner == winner and again.race is None
    impls = [[step.node.choice.impl for step in net.plan.steps] for net in (first, again)]
    assert impls[0] == impls[1]
    for net in (first, again):
        told = net.certificate
        assert told is not None and told.plan == ("optimal" if winner == 0 else "propagate")
        assert told.gap < 1e-6 if winner == 0 else told.objective == told.propagate >= told.bound
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("usual_peaks", "only_verdicts")
def test_plans_that_ran_do_not_run_again_where_corrected_costs_choose_them(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[tuple[tuple[str, str], ...], float] = {}

    def decide(plans, inputs, limit, fewest, *_):
        name, plan = next(iter(plans.items()))  # no other can win
        seconds = [4.0 * step.node.choice.cost for step in plan.steps]
        key = tuple((step.node.name, step.node.choice.impl) for step in plan.steps)
        assert key not in told
        told[key] = sum(seconds)
        return Race((sum(seconds),), 3, 0, (name,), ((sum(seconds),) * 3,), (tuple(seconds),))

    monkeypatch.setattr(selection, "race", decide)
    unlike_any_other(monkeypatch)
    x = torch.randn(1, 3, 200, 200)
    net = fp.compile(model, x)
    assert told and net.race is not None
    assert net.certificate is not None and net.certificate.corrected
    assert net.certificate.objective == pytest.approx([*told.values()][-1], rel=0.3), "by the corrected costs"
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_run_that_disproves_the_peaks_has_them_measured_again(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(tmp_path))  # without the peaks
    unlike_any_other(monkeypatch)
    disturbed = [300.0]

    def measure(types: list[DataType], footprints: tuple[int, ...]) -> dict[str, float]:
        factor = disturbed.pop() if disturbed else 1.0
        flops = {f"flops {dtype}": 1e11 for dtype in types} | {f"moving {n}": 2e10 for n in peaks.MOVED}
        reading = {f"{kind} {n}": 2e10 for kind in ("reading", "streaming") for n in footprints}
        return {**flops, **reading, "copying": 4e10, "call": 3e-6 * factor, "functions": 2e9}

    monkeypatch.setattr(peaks, "measure", measure)
    monkeypatch.setattr(peaks, "SLOWEST_CALL_SECONDS", 1.0)
    x = torch.randn(1, 3, 20, 20)
    net = fp.compile(model, x)
    assert not disturbed and net.race is not None and net.certificate is not None
    again = fp.compile(model, x)
    assert again.certificate is not None and again.certificate.objective == net.certificate.objective
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("own_cache")
def test_primitives_are_checked_before_weights_are_packed_and_once_only(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def note(*args, **kwargs):
            order.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)

    for owner, name in ((Draft, "__init__"), (compilation, "check_steps"), (Draft, "pack")):
        noted(owner, name)
    x = torch.randn(1, 3, 20, 20)
    for _ in range(2):
        fp.compile(model, x, confirm=False)
    assert order == ["__init__", "check_steps", "pack", "__init__", "pack"]
    order.clear()
    fp.compile(model, x, confirm=False, verify="off")
    assert order == ["__init__", "pack"]


@pytest.mark.usefixtures("usual_peaks", "only_verdicts")
@pytest.mark.parametrize(
    ("ran", "faster"), [("as promised", ""), ("short", "first"), ("short", "spare"), ("beaten", "spare")]
)
@pytest.mark.usefixtures("own_cache")
def test_what_runs_as_several_is_doubted_where_costs_promised_too_much(
    ran: str, faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    races: list[int] = []

    def decide(plans, inputs, limit, fewest, *_):
        races.append(len(plans))
        if len(races) == 1:
            runs = ((1.0, 1.1), (1.2, 1.2)) if ran == "beaten" else ()
            return Race((1.0, 100.0 if ran == "as promised" else 1.0), 3, 0, tuple(plans), runs)
        if ran == "beaten":
            return Race((2.0, 1.0), 3, 1, tuple(plans))
        return Race((2.0, 3.0, 1.0 if faster == "spare" else 4.0), 3, 2 * (faster == "spare"), tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    unlike_any_other(monkeypatch)
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.Conv2d(64, 8, 1)
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(1, 64, 56, 56)
    first, again = fp.compile(model, x, tune="model"), fp.compile(model, x, tune="model")
    assert again.race is None, "the second compilation knows the verdict"
    told = first.race
    assert told is not None
    if ran == "beaten":  # `propagate` was slower in each run
        assert races == [2, 2] and told.names == ("optimal", "optimal, no node run as several")
    elif ran == "as promised":
        assert races == [2] and told.winner == 0 and told.names == ("optimal", "propagate")
    else:
        assert races == [2, 3] and told.names == ("optimal", "propagate", "optimal, no node run as several")
        assert told.winner == (2 if faster == "spare" else 0) and told.seconds == (
            2.0,
            3.0,
            1.0 if faster == "spare" else 4.0,
        )
    for net in (first, again):
        assert (net.graph.count("convolution") > 2) == (faster != "spare")
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


class EqualFigures:
    """Measures nothing: equal jobs have equal figures, whatever else runs now."""

    doubtful: frozenset[object] = frozenset()

    def __init__(self, jobs, weights_nbytes):
        pass

    def seconds(self, groups, deadline, done, progress):
        for index, jobs in enumerate(groups):
            done(index, {job.key: 1e-5 * (1 + crc32(repr(job.key).encode()) % 100) for job in jobs})


@pytest.mark.usefixtures("usual_peaks", "only_verdicts")
@pytest.mark.usefixtures("own_cache")
def test_a_verdict_of_measured_costs_holds_for_later_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "Bench", EqualFigures)
    for name in ("_FASTER_RATIO", "_SLOWER_RATIO"):  # nothing is impossible
        monkeypatch.setattr(roofline, name, inf)
    monkeypatch.setattr(selection, "FAR_RATIO", inf)  # by such figures, anything may cost any number of times as much
    unlike_any_other(monkeypatch)
    races: list[int] = []

    def decide(plans, inputs, limit, fewest, *_):
        races.append(len(plans))
        return Race((1.0,) * len(plans), 3, 1, tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.Conv2d(64, 8, 1)
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(1, 64, 56, 56)
    first = fp.compile(model, x, tune="measure")
    assert first.tuning is not None and first.tuning.measured > 0
    assert first.race is not None and first.race.names[1] != "optimal"
    again = fp.compile(model, x)  # by the costs that were measured
    assert len(races) == 1 and again.race is None
    impls = [[step.node.choice.impl for step in net.plan.steps] for net in (first, again)]
    assert impls[0] == impls[1]
    # the plan that won then is not what has its name now
    monkeypatch.setattr(selection, "_pair_key", lambda best, kept: "another")
    assert fp.compile(model, x).race is not None and len(races) > 1


@pytest.mark.usefixtures("usual_peaks")
@pytest.mark.usefixtures("own_cache")
def test_a_plan_that_is_kept_though_it_costs_more_says_how_much() -> None:
    normal, _ = normalise(fp.load("resnet50"))
    options = Options(tune="model")
    modelled = selection.costs_for("model", weights_nbytes=10**8)
    field = entrants.Entrants(normal, Setting(OneDnnTarget(), ReferenceTarget()), modelled, options)
    best, direct = field.best.certificate, field.get(entrants.DIRECT)
    assert best is not None and best.optimal and direct is not None and direct.certificate is not None
    assert direct.certificate.bound == best.bound and not direct.certificate.optimal
    assert direct.certificate.gap == pytest.approx(1 - best.objective / direct.certificate.objective)


@pytest.mark.parametrize(
    ("how", "measured", "patient"),
    [
        ("model", False, False),
        ("auto", False, False),
        ("measure", True, True),
        ("remeasure", True, True),
        (fp.Tune("model", effort="patient"), False, True),
        (fp.Tune("measure", effort="quick"), True, False),
    ],
)
def test_tune_is_a_short_form_of_where_costs_come_from_and_of_the_effort(how, measured: bool, patient: bool) -> None:
    tuning = Options(tune=how).tuning
    assert (tuning.measures, tuning.is_patient) == (measured, patient)


@pytest.mark.usefixtures("usual_peaks")
@pytest.mark.parametrize(("effort", "field"), [("quick", 2), ("patient", 3)])
@pytest.mark.usefixtures("own_cache")
def test_a_patient_compilation_runs_more_plans(effort: str, field: int, monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[int] = []

    def decide(plans, inputs, limit, fewest, *_):
        races.append(len(plans))
        return Race((1.0, *(100.0 for _ in range(len(plans) - 1))), 3, 0, tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    unlike_any_other(monkeypatch)
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.Conv2d(64, 8, 1)
    graph = fp.from_torch(torch.nn.Sequential(*layers).eval(), torch.randn(1, 64, 56, 56))
    compile_graph(graph, Options(tune=fp.Tune("model", effort=effort)))
    assert races == [field]


@pytest.mark.parametrize(("name", "value"), [("costs", "guess"), ("effort", "lazy")])
def test_an_unknown_source_or_effort_is_refused(name: str, value: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"'{name}' parameter of Tune must be one of .* Got '{value}'"):
        fp.Tune(**{name: value})


@pytest.mark.parametrize(
    ("tune", "limit", "rounds"), [("measure", None, selection._LEAST_ROUNDS), ("measure", 5.0, 1), ("model", None, 1)]
)
@pytest.mark.usefixtures("own_cache")
def test_rounds_are_asked_for_where_the_plan_is_to_be_good_and_time_has_no_limit(
    model: torch.nn.Module, tune: str, limit: float | None, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def decide(plans, inputs, limit, fewest, *_):
        asked.append(fewest)
        return Race(tuple(1.0 + i for i in range(len(plans))), 3, 0, tuple(plans))

    monkeypatch.setattr(selection, "race", decide)
    unlike_any_other(monkeypatch)
    fp.compile(model, torch.randn(1, 3, 20, 20), tune=tune, tune_budget=limit)
    assert asked and set(asked) == {rounds}


@pytest.mark.parametrize(("seconds", "tune", "is_raced"), [(0.0, "auto", False), (60.0, "auto", True)])
@pytest.mark.usefixtures("usual_peaks")
def test_a_race_for_which_there_is_no_time_is_left_out_and_said_so(
    model: torch.nn.Module, seconds: float, tune: str, is_raced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    races: list[float] = []

    def decide(plans, inputs, limit, fewest, expected, attempts, most):
        races.append(most)
        return Race((2e-5,) * len(plans), 3, 0, tuple(plans))  # no run that disproves the machine's peaks

    monkeypatch.setattr(selection, "race", decide)
    monkeypatch.setattr(budget, "SECONDS", seconds)
    monkeypatch.setattr(budget, "RUNS", 0)
    unlike_any_other(monkeypatch)
    x = torch.randn(1, 3, 20, 20)
    net = fp.compile(model, x, tune=tune)
    assert (len(races), net.race is not None, "race of plans" in net.left_out) == (is_raced, is_raced, not is_raced)
    assert all(0.0 < most <= seconds for most in races)
    told = certificate_text(Report.of(net, repeats=1))
    assert ("since the time for compiling ended: race of plans" in told) == (not is_raced)
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-4)


def test_without_time_only_one_graph_is_solved_and_patience_solves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[str] = []
    usual = entrants.OptimalFormats.solutions
    monkeypatch.setattr(
        entrants.OptimalFormats, "solutions", lambda self, *rest: solved.append("") or usual(self, *rest)
    )
    monkeypatch.setattr(entrants, "expansions", lambda *_, **__: {})
    normal, _ = normalise(fp.from_torch(torch.nn.Conv2d(8, 8, 3), torch.randn(4, 8, 9, 9)))
    setting, options = Setting(OneDnnTarget(), ReferenceTarget()), Options()
    for is_limited, graphs, missing in ((True, 1, {"optimal, batch in slices"}), (False, 2, set())):
        solved.clear()
        sliced = entrants.Variant("batch in slices", Renamed(), "", is_priced=False)
        monkeypatch.setattr(entrants, "VARIANTS", {"optimal, batch in slices": sliced})
        limit = budget.Budget(is_limited=is_limited, clock=iter(range(10_000)).__next__)
        modelled = costs.costs_for("model", weights_nbytes=0)
        field = entrants.Entrants(normal, setting, modelled, options, budget=limit)
        field.get("optimal")
        field.seconds = 10_000.0
        field.get("optimal, batch in slices")
        assert (len(solved), set(limit.left_out)) == (graphs, missing)


class Renamed:
    """A rewrite that makes another graph of the same nodes."""

    def run(self, graph: Graph) -> Graph:
        return graph.copy()


class Slow:
    """A plan that is as slow as one likes, and what runs it: it moves the race's clock."""

    clock = Clock()

    def __init__(self, seconds: float, cold: float = 0.0) -> None:
        self.seconds, self.cold = seconds, cold

    def run(self, inputs: object) -> None:
        Slow.clock.now += self.seconds

    def profile(self, inputs: object, limit: float = inf) -> tuple[list[object], list[float]]:
        needed, self.cold = self.seconds + self.cold, 0.0
        spent = min(limit, needed)
        Slow.clock.now += spent
        return [None] if spent == needed else [], [spent]


@pytest.mark.parametrize(
    ("plans", "budget", "fewest", "rounds"),
    [
        ((1.0, 2.0), 0.0, 1, 1),
        ((1.0, 2.0), 0.0, 5, 5),
        ((2.0, 2.0), 40.0, 5, 10),
        ((4.0, 5.0), 0.0, 5, 2),  # after 18 seconds nobody waits for three more rounds
        ((0.002, 0.002), 1.0, 5, 30),
        ((1.0, 2.0), 30.0, 5, 5),  # costs and all runs agree
        ((1.0, 2.0), 30.0, 1, 2),
        ((0.001, 0.002), 1.0, 1, 10),  # for 0.03 seconds
        ((2.0, 1.0), 30.0, 1, 5),  # costs and runs do not
        ((0.001,), 1.0, 1, 30),  # its median is all that is asked for
    ],
)
def test_slow_plans_run_the_rounds_that_were_asked_for(plans, budget, fewest, rounds) -> None:
    entrants = {f"{place}: {plan}": Slow(plan) for place, plan in enumerate(plans)}
    found = run_in_turns(entrants, [], budget, fewest, watch=Slow.clock.watch())
    assert found is not None
    assert (found.rounds, found.winner) == (rounds, plans.index(min(plans)))
    assert found.seconds == pytest.approx(plans)
    assert all(len(runs) == rounds for runs in found.runs)


class Uneven(Slow):
    """A plan whose runs take different times; all others as long as the last one."""

    def __init__(self, *seconds: float) -> None:
        self.seconds_left = list(seconds)

    def profile(self, inputs: object, limit: float = inf) -> tuple[list[object], list[float]]:
        self.seconds = self.seconds_left.pop(0) if len(self.seconds_left) > 1 else self.seconds_left[0]
        self.cold = 0.0
        return super().profile(inputs, limit)


@pytest.mark.parametrize(
    ("other", "winner"), [((0.9,), 1), ((1.0,), 0), ((2.0, 0.1, 2.0), 0), ((0.9, 0.9, 2.0, 0.9), 1)]
)
def test_a_plan_must_be_faster_in_most_rounds_to_win(other, winner) -> None:
    found = run_in_turns({"first": Uneven(1.0), "other": Uneven(*other)}, [], 0.0, 6, watch=Slow.clock.watch())
    assert found is not None and found.winner == winner


@pytest.mark.parametrize(("most", "rounds"), [(inf, 5), (6.9, 2), (2.0, 1)])
def test_rounds_for_which_there_is_no_time_are_not_run(most, rounds) -> None:
    start = Slow.clock.now
    found = run_in_turns(
        {"first": Slow(1.0), "other": Slow(0.9)}, [], 0.2, 5, inf, None, most, watch=Slow.clock.watch()
    )
    assert found is not None and found.rounds == rounds
    assert Slow.clock.now - start <= max(most, 2 * 1.9 + 0.1)


@pytest.mark.parametrize(("other", "winner"), [(1.2, 0), (0.9, 1)])
def test_cold_first_runs_of_slow_plans_do_not_decide(other, winner) -> None:
    found = run_in_turns({"first": Slow(1.0, 0.5), "other": Slow(other)}, [], 0.2, watch=Slow.clock.watch())
    assert found is not None and (found.winner, found.rounds) == (winner, 3)
    assert found.seconds == pytest.approx((1.0, other))


@pytest.mark.parametrize(
    ("plans", "expected", "seconds"),
    [
        ((1.0, 50.0), inf, 1.0 + 2.1),  # what takes twice as long cannot win
        # nor does a plan of four times the expected time, if another takes less; the first plan runs once more
        ((50.0, 1.0), 2.0, 8.1 + 1.0 + 2.1),
        ((9.0, 10.0), 1.0, 2 * 4.1 + 9.0 + 10.0),  # where all do, they get more time
    ],
)
def test_a_plan_that_cannot_win_is_interrupted(plans, expected, seconds) -> None:
    start = Slow.clock.now
    found = run_in_turns({str(plan): Slow(plan) for plan in plans}, [], 0.2, 1, expected, watch=Slow.clock.watch())
    assert found is not None and found.names[found.winner] == str(min(plans)) and found.rounds == 1
    assert Slow.clock.now - start == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("first", "other", "is_beyond"),
    [
        ((10.0,), (10.0,), True),
        ((10.0,), (12.0,), False),
        ((10.0, 10.0), (10.0, 12.0), False),  # one round of two: a neighbour
        ((10.0, 10.0, 10.0), (10.0, 10.0, 12.0), True),
    ],
)
def test_costs_are_doubted_where_most_rounds_contradict_them(first, other, is_beyond) -> None:
    result = Race((min(first), min(other)), len(first), 0, runs=(first, other))
    assert result.is_beyond(1, 0.95) is is_beyond


def test_released_weights_are_gone_and_the_plan_has_its_own(model: torch.nn.Module) -> None:
    x = torch.randn(1, 3, 20, 20)
    expected = model(x)
    net = fp.compile(model, x, release_weights=True)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["confirm", "winograd"])
def test_a_switch_is_on_or_off(model: torch.nn.Module, name: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"The '{name}' parameter of compile must be True or False. Got 'no'"):
        fp.compile(model, torch.randn(1, 3, 20, 20), **{name: "no"})
