"""The exact solver against brute force, and what it says when there is nothing to solve."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest

from fmtprop.errors import GraphError, PassError
from fmtprop.passes.optimal import Alternative, Problem, ReorderTable, Solution, cheapest_conversions, evaluate, solve
from fmtprop.passes.optimal.elimination import eliminate, improve
from fmtprop.passes.optimal.problem import find_cycle
from fmtprop.passes.optimal.solve import prune

FORMATS = ("abcd", "acdb", "aBcd8b", "aBcd16b")


@pytest.fixture(params=["elimination first", "program alone"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve every problem of this file in both ways."""
    if request.param == "program alone":
        monkeypatch.setattr(import_module("fmtprop.passes.optimal.solve"), "eliminate", lambda *_: None)


def brute_force(problem: Problem) -> float:
    """The least cost of all choices, each with all trees of reorders; infinite where there is no solution."""
    by_op = problem.covering()
    trees: dict[object, float] = {}
    best = math.inf

    def extend(chosen: tuple[int, ...], done: frozenset[str], cost: float) -> None:
        nonlocal best
        if cost >= best:
            return
        op = next((op for op in problem.ops if op not in done), None)
        if op is None:
            if not find_cycle(problem, chosen):
                best = min(best, cost + _reorders(problem, chosen, trees))
            return
        for index in by_op[op]:
            alternative = problem.alternatives[index]
            if done.isdisjoint(alternative.covers):
                extend((*chosen, index), done | set(alternative.covers), cost + alternative.cost)

    extend((), frozenset(), 0.0)
    return best


def _reorders(problem: Problem, chosen: tuple[int, ...], trees: dict[object, float]) -> float:
    written = {t: f for index in chosen for t, f in problem.alternatives[index].writes.items()}
    needs: dict[object, set[object]] = {}
    for index in chosen:
        for tensor, formats in problem.alternatives[index].reads.items():
            needs.setdefault(tensor, set()).update(formats)
    total = 0.0
    for tensor, formats in needs.items():
        if tensor not in written:
            return math.inf
        key = (tensor, written[tensor], frozenset(formats))
        if key not in trees:
            trees[key] = cheapest_growth(problem.reorders.get(tensor, {}), written[tensor], frozenset(formats))
        total += trees[key]
    return total


def cheapest_growth(reorders: Mapping[tuple[object, object], float], root: object, needs: frozenset[object]) -> float:
    """Grow the set of formats that exist by one reorder after the other, in all ways, cheapest first."""
    reached = {frozenset((root,)): 0.0}
    done = set()
    while True:
        todo = [(cost, sorted(made), made) for made, cost in reached.items() if made not in done]
        if not todo:
            return math.inf
        cost, _, made = min(todo)
        if needs <= made:
            return cost
        done.add(made)
        for (src, dst), seconds in reorders.items():
            if src in made and dst not in made:
                grown = made | {dst}
                reached[grown] = min(reached.get(grown, math.inf), cost + seconds)


def random_problem(rng: random.Random) -> Problem:
    """A small graph of the kinds that make trouble: shared readers, regions, pins, missing and lopsided reorders."""
    formats = FORMATS[: rng.choice((1, 2, 3, 4, 4, 4))]
    count = rng.choice((1, 2, 3, 5, 7, 8, 8, 8))
    ops = [f"op_{number}" for number in range(count)]
    reads: list[list[str]] = []
    for number in range(count):
        before = [f"t_{other}" for other in range(max(0, number - rng.choice((1, 2, 8))), number)]
        reads.append(rng.sample(before, min(len(before), rng.choice((0, 1, 1, 1, 2, 2, 3)))))
    alternatives = []

    def formats_read() -> tuple[str, ...]:
        return tuple(rng.sample(formats, 2)) if len(formats) > 1 and rng.random() < 0.15 else (rng.choice(formats),)

    for number, op in enumerate(ops):
        for _ in range(1 if rng.random() < 0.15 else rng.randint(2, 4)):
            alternatives.append(
                Alternative(
                    covers=(op,),
                    reads={tensor: formats_read() for tensor in reads[number]},
                    writes={f"t_{number}": rng.choice(formats)},
                    cost=rng.choice((0.0, 1.0, 1.0)) * rng.uniform(0, 4) * 1e-6,
                )
            )
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        pair = sorted(rng.sample(range(count), 2)) if count > 1 else [0]
        written = {f"t_{number}" for number in pair}
        wanted = {tensor for number in pair for tensor in reads[number]} - written
        others = {tensor for number in range(count) if number not in pair for tensor in reads[number]}
        hidden = {tensor for tensor in written if tensor not in others or rng.random() < 0.1}
        alternatives.append(
            Alternative(
                covers=tuple(ops[number] for number in pair),
                reads={tensor: formats_read() for tensor in sorted(wanted)},
                writes={tensor: rng.choice(formats) for tensor in sorted(written - hidden)},
                cost=rng.uniform(0, 8) * 1e-6,
            )
        )
    present = rng.choice((1.0, 0.9, 0.6))
    scale = rng.choice((1.0, 4.0, 10.0))
    through = (*formats, *rng.choice(((), (), ("hub",))))
    reorders = {
        f"t_{number}": {
            pair: rng.uniform(0.05, 1) ** rng.choice((1, 2)) * scale * 1e-6
            for pair in itertools.permutations(through, 2)
            if rng.random() < present
        }
        for number in range(count)
    }
    rng.shuffle(alternatives)
    return Problem(tuple(ops), tuple(alternatives), reorders)


@cache
def drawn(seed: int) -> tuple[Problem, float]:
    """Return a random problem and its least cost, once for both ways to solve it."""
    problem = random_problem(random.Random(seed))
    return problem, brute_force(problem)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))])
def test_no_choice_is_better_than_the_solution(block: int) -> None:
    solved = 0
    for seed in range(100 * block, 100 * block + 100):
        problem, expected = drawn(seed)
        if expected == math.inf:
            with pytest.raises(PassError, match="optimal: "):
                solve(problem)
            continue
        solution = solve(problem, time_limit=math.inf)
        assert solution.objective == pytest.approx(expected, rel=1e-6, abs=1e-15), seed
        assert evaluate(problem, solution.chosen, solution.conversions) == pytest.approx(solution.objective, rel=1e-12)
        assert solution.optimal and solution.gap == 0.0 and solution.bound == solution.objective, seed
        solved += 1
    assert solved > 60


def test_pruning_keeps_the_optimum() -> None:
    left_out = 0
    for seed in range(1000, 1050):
        problem, expected = drawn(seed)
        reduced, kept = prune(problem)
        assert brute_force(reduced) == pytest.approx(expected, rel=1e-9), seed
        assert reduced.alternatives == tuple(problem.alternatives[index] for index in kept)
        left_out += len(problem.alternatives) - len(kept)
    assert left_out > 50


def test_cheapest_trees() -> None:
    rng = random.Random(7)
    for _ in range(200):
        formats = "abcdefg"[: rng.randint(2, 7)]
        reorders = {
            pair: rng.choice((0.0, 1.0, rng.uniform(0.1, 3)))
            for pair in itertools.permutations(formats, 2)
            if rng.random() < 0.6
        }
        needs = frozenset(rng.sample(formats, rng.randint(1, len(formats))))
        seconds, order = ReorderTable({"t": reorders})["t"].tree("a", needs)
        assert seconds == pytest.approx(cheapest_growth(reorders, "a", needs))
        made = {"a"}
        for src, dst in order:
            assert src in made and dst not in made
            made.add(dst)
        assert seconds == math.inf or needs <= made
        assert {dst for _, dst in order} - needs <= {src for src, _ in order}, "makes a format that nobody wants"


def one_tensor(reads: tuple[str, ...], reorders: dict[tuple[str, str], float]) -> Problem:
    """A tensor written in `a`, and one op for each format in which it is read."""
    readers = tuple(f"read_{fmt}" for fmt in reads)
    alternatives = [Alternative((op,), {"t": (fmt,)}, {}, 1e-6) for op, fmt in zip(readers, reads, strict=True)]
    return Problem(("write", *readers), (Alternative(("write",), {}, {"t": "a"}, 1e-6), *alternatives), {"t": reorders})


def test_formats_made_from_each_other_are_made_from_nothing() -> None:
    # b and c are nearly free from each other, but one of them has to come from a.
    problem = one_tensor(
        ("b", "c"), {("b", "c"): 1e-9, ("c", "b"): 1e-9, ("a", "b"): 5e-6, ("a", "c"): 4e-6, ("b", "a"): 1e-9}
    )
    solution = solve(problem)
    assert solution.conversions == {"t": (("a", "c"), ("c", "b"))}
    assert solution.objective == pytest.approx(7.001e-6)


def test_a_reorder_is_paid_once_and_chains_where_that_is_cheaper() -> None:
    problem = one_tensor(("b", "b", "c"), {("a", "b"): 2e-6, ("b", "c"): 1e-6, ("a", "c"): 4e-6})
    problem = replace(
        problem,
        ops=("write", "first", "second", "third"),
        alternatives=tuple(
            replace(alternative, covers=(op,))
            for op, alternative in zip(("write", "first", "second", "third"), problem.alternatives, strict=True)
        ),
    )
    solution = solve(problem)
    assert solution.conversions == {"t": (("a", "b"), ("b", "c"))}
    assert solution.objective == pytest.approx(7e-6)


def test_a_format_that_nobody_reads_serves_as_a_hub() -> None:
    # Straight from a to each reader is the shortest way for each of them, but not for both together.
    reorders = {("a", "hub"): 2e-6, ("hub", "b"): 1e-6, ("hub", "c"): 1e-6, ("a", "b"): 2.5e-6, ("a", "c"): 2.5e-6}
    solution = solve(one_tensor(("b", "c"), reorders))
    assert solution.conversions["t"][0] == ("a", "hub")
    assert solution.objective == pytest.approx(7e-6)


def test_regions_that_wait_for_each_other_are_not_chosen_together() -> None:
    # p → q and r → s: p with s, and r with q, are harmless regions, but not both at once.
    def region(*covers: str, reads: tuple[str, ...], cost: float) -> Alternative:
        return Alternative(covers, {t: ("a",) for t in reads}, {op: "a" for op in covers}, cost)

    problem = Problem(
        ("p", "q", "r", "s"),
        (
            region("p", reads=(), cost=5e-6),
            region("q", reads=("p",), cost=5e-6),
            region("r", reads=(), cost=5e-6),
            region("s", reads=("r",), cost=5e-6),
            region("p", "s", reads=("r",), cost=4e-6),
            region("q", "r", reads=("p",), cost=3e-6),
        ),
        {},
    )
    solution = solve(problem)
    assert solution.chosen == (0, 3, 5) and solution.optimal
    with pytest.raises(PassError, match=r"optimal: .* wait for each other's results"):
        evaluate(problem, (4, 5), {})


FORMATS_OF_A_NETWORK = (*FORMATS, "Abcd16a")


def network(rng: random.Random, count: int) -> Problem:
    """A long chain of convolutions, elementwise ops, residual sums and concats between plain ends."""
    plain, *_ = formats = FORMATS_OF_A_NETWORK
    quality = dict(zip(formats, (2.0, 1.1, 1.0, 1.0, 1.3), strict=True))
    ops, alternatives, reorders = ["op_0"], [Alternative(("op_0",), {}, {"t_0": plain}, 0.0)], {}
    size, kind = 20e-6, ""
    for number in range(1, count):
        ops.append(f"op_{number}")
        src, dst = f"t_{number - 1}", f"t_{number}"
        size = size * rng.choice((0.5, 2.0)) if rng.random() < 0.05 and 5e-6 < size < 1e-4 else size
        before, kind = kind, rng.choice(("conv", "conv", "elementwise", "sum", "concat"))
        if kind == "conv":
            for _ in range(8):
                first = rng.choice(formats)
                second = first if rng.random() < 0.6 else rng.choice(formats)
                cost = size * rng.uniform(2, 5) * quality[first] * quality[second]
                alternatives.append(Alternative((ops[-1],), {src: (first,)}, {dst: second}, cost))
            if before == "conv" and rng.random() < 0.5:
                both, first = (ops[-2], ops[-1]), f"t_{number - 2}"
                alternatives.append(Alternative(both, {first: ("acdb",)}, {src: "acdb", dst: "acdb"}, size * 5))
        else:
            further = {"elementwise": 0, "sum": 1, "concat": 3}[kind]
            sources = {src, *(f"t_{rng.randrange(max(0, number - 8), number)}" for _ in range(further))}
            for fmt in formats:
                cost = size * len(sources) * rng.uniform(0.5, 0.6)
                alternatives.append(Alternative((ops[-1],), {t: (fmt,) for t in sorted(sources)}, {dst: fmt}, cost))
        reorders[src] = {pair: size * rng.uniform(0.7, 1.5) for pair in itertools.permutations(formats, 2)}
    alternatives.append(Alternative(("output",), {f"t_{count - 1}": (plain,)}, {}, 0.0))
    reorders[f"t_{count - 1}"] = {pair: size for pair in itertools.permutations(formats, 2)}
    return Problem((*ops, "output"), tuple(alternatives), reorders)


def branches(rng: random.Random, count: int) -> Problem:
    """Blocks of a network: two convolutions and the sum with what went into them, or with a third beside them."""
    formats = FORMATS_OF_A_NETWORK
    ops, alternatives = ["input"], [Alternative(("input",), {}, {"t": formats[0]}, 0.0)]

    def op(*sources: str) -> str:
        name = f"op_{len(ops)}"
        ops.append(name)
        for fmt in formats:
            reads = {tensor: (fmt,) for tensor in sources}
            alternatives.append(
                Alternative((name,), reads, {f"{name}.dst": rng.choice(formats)}, rng.uniform(2e-6, 4e-6))
            )
        return f"{name}.dst"

    tensor = "t"
    while len(ops) < count:
        tensor = op(op(op(tensor)), op(tensor) if rng.random() < 0.3 else tensor)
    ops.append("output")
    alternatives.append(Alternative(("output",), {tensor: (formats[0],)}, {}, 0.0))
    costs = {pair: rng.uniform(0.5e-6, 1e-6) for pair in itertools.permutations(formats, 2)}
    tensors = dict.fromkeys(tensor for alternative in alternatives for tensor in alternative.writes)
    return Problem(tuple(ops), tuple(alternatives), dict.fromkeys(tensors, costs))


def everything_meets(count: int) -> Problem:
    """Tensors in any format, each two of which are read in one."""
    makers = [f"make_{number}" for number in range(count)]
    meetings = list(itertools.combinations(makers, 2))
    alternatives = [Alternative((maker,), {}, {maker: fmt}, 0.0) for maker in makers for fmt in FORMATS]
    alternatives += [
        Alternative((f"{one}+{two}",), {one: (fmt,), two: (fmt,)}, {}, 1e-6 * (FORMATS.index(fmt) + 1))
        for one, two in meetings
        for fmt in FORMATS
    ]
    costs = {pair: 1e-6 for pair in itertools.permutations(FORMATS, 2)}
    ops = (*makers, *(f"{one}+{two}" for one, two in meetings))
    return Problem(ops, tuple(alternatives), dict.fromkeys(makers, costs))


def test_elimination_solves_what_is_narrow_and_leaves_what_is_wide() -> None:
    for seed in range(8):
        problem = branches(random.Random(seed), 60)
        table = ReorderTable(problem.reorders)
        found = eliminate(problem, table)
        assert found is not None
        chosen, seconds = found
        assert seconds == pytest.approx(evaluate(problem, chosen, cheapest_conversions(problem, chosen, table)))
        assert solve(problem, time_limit=math.inf).objective == pytest.approx(seconds, rel=1e-6)
    wide = everything_meets(12)
    assert eliminate(wide, ReorderTable(wide.reorders)) is None
    assert solve(wide, time_limit=math.inf).optimal


@pytest.mark.parametrize("choices", [1, 2])
def test_a_tensor_may_have_many_readers(choices: int) -> None:
    readers = tuple(f"read_{number}" for number in range(200))
    alternatives = [Alternative(("write",), {}, {"t": "a"}, 1e-6)]
    for number, reader in enumerate(readers):
        for fmt in ("bc"[number % 2], "d")[:choices]:
            alternatives.append(Alternative((reader,), {"t": (fmt,)}, {}, 1e-6))
    costs = dict.fromkeys(itertools.permutations("abcd", 2), 5e-6)
    problem = Problem(("write", *readers), tuple(alternatives), {"t": costs})
    solution = solve(problem)
    # one format for all readers where they have one in common, else two
    assert solution.optimal and solution.objective == pytest.approx(201e-6 + 5e-6 * (3 - choices))


def test_elimination_of_random_problems() -> None:
    narrow = 0
    for seed in range(3000, 3050):
        problem = random_problem(random.Random(seed))
        found = eliminate(problem, ReorderTable(problem.reorders))
        if found is not None:
            assert found[1] == pytest.approx(brute_force(problem), rel=1e-9, abs=1e-15), seed
            narrow += 1
    assert narrow > 25


def test_a_choice_is_improved_with_few_values_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmtprop.passes.optimal.elimination.LARGE_TABLE", 4096)
    for seed in range(3):
        problem = network(random.Random(seed), 40)
        table, best = ReorderTable(problem.reorders), solve(problem, time_limit=math.inf).objective
        chosen, kept, seconds = solve(problem, time_limit=0.0).chosen, Counter(), [math.inf]
        for _ in range(8):
            seconds.append(evaluate(problem, chosen, cheapest_conversions(problem, chosen, table)))
            assert seconds[-1] <= seconds[-2] * (1 + 1e-9)
            found = improve(problem, table, chosen, kept)
            assert found is not None
            chosen = found
        assert kept and seconds[1] > seconds[-1] and seconds[-1] <= 1.05 * best, seed


def test_a_bad_choice_of_a_wide_problem_is_repaired() -> None:
    wide = everything_meets(12)
    chosen = tuple(indices[place % len(indices)] for place, indices in enumerate(wide.covering().values()))
    bad, kept = evaluate(wide, chosen, cheapest_conversions(wide, chosen)), Counter()
    for _ in range(3):
        found = improve(wide, ReorderTable(wide.reorders), chosen, kept)
        assert found is not None
        chosen = found
    good = evaluate(wide, chosen, cheapest_conversions(wide, chosen))
    assert bad > 3 * good and good == pytest.approx(solve(wide, time_limit=math.inf).objective)


def assert_honest(problem: Problem, solution: Solution) -> None:
    """The solution can be executed, costs what it says, and its figures agree with each other."""
    assert evaluate(problem, solution.chosen, solution.conversions) == pytest.approx(solution.objective, rel=1e-12)
    assert 0.0 <= solution.bound <= solution.objective
    assert solution.gap == pytest.approx((solution.objective - solution.bound) / solution.objective)
    assert solution.optimal == (solution.gap == 0.0)


def test_a_network_of_200_ops() -> None:
    problem = network(random.Random(200), 200)
    solution = solve(problem, time_limit=math.inf)
    assert_honest(problem, solution)
    assert solution.optimal  # in about a second of computing
    regions = [index for index in solution.chosen if len(problem.alternatives[index].covers) > 1]
    assert regions and solution.conversions


@pytest.mark.slow
def test_a_network_of_1000_ops() -> None:
    problem = network(random.Random(1000), 1000)
    solution = solve(problem, time_limit=60.0)
    assert_honest(problem, solution)
    assert solution.seconds < 75.0  # it ends when it was told to, give or take what HiGHS does not interrupt


@pytest.mark.parametrize("time_limit", [0.0, 0.05, 0.4])
def test_when_the_time_ends_the_gap_is_honest(time_limit: float) -> None:
    problem = network(random.Random(60), 60)
    best = solve(problem, time_limit=math.inf)
    hurried = solve(problem, time_limit=time_limit)
    assert_honest(problem, hurried)
    assert hurried.bound <= best.objective * (1 + 1e-6) and best.bound <= hurried.objective * (1 + 1e-6)
    if time_limit == 0.0:
        assert not hurried.optimal and hurried.gap > 0.0


def test_without_time_small_problems_still_get_a_solution_and_a_true_bound() -> None:
    for seed in range(2000, 2050):
        problem = random_problem(random.Random(seed))
        expected = brute_force(problem)
        if expected < math.inf:
            solution = solve(problem, time_limit=0.0)
            assert solution.bound <= expected * (1 + 1e-6) and expected <= solution.objective * (1 + 1e-6), seed
        else:
            with pytest.raises(PassError):
                solve(problem, time_limit=0.0)


def test_never_worse_than_the_baseline() -> None:
    problem = network(random.Random(80), 80)
    best = solve(problem, time_limit=math.inf)
    hurried = solve(problem, time_limit=0.0)
    assert hurried.objective > best.objective
    assert solve(problem, time_limit=0.0, baseline=best.chosen).chosen == best.chosen
    assert solve(problem, time_limit=math.inf, baseline=hurried.chosen).objective <= best.objective * (1 + 1e-6)


def test_the_baseline_must_be_a_choice() -> None:
    problem = one_tensor(("b",), {("a", "b"): 1e-6})
    with pytest.raises(PassError, match="optimal: read_b is not executed; choose one of the alternatives that cover"):
        solve(problem, baseline=(0,))


def test_equal_costs_of_nothing() -> None:
    problem = Problem(("x",), (Alternative(("x",), {}, {"t": "a"}, 0.0), Alternative(("x",), {}, {"t": "b"}, 0.0)), {})
    solution = solve(problem)
    assert (solution.objective, solution.bound, solution.gap, solution.optimal) == (0.0, 0.0, 0.0, True)
    assert solve(Problem((), (), {})).chosen == ()


def test_cheapest_conversions_of_a_given_choice() -> None:
    problem = one_tensor(("a", "b"), {("a", "c"): 1e-6, ("c", "b"): 1e-6, ("a", "b"): 3e-6})
    assert cheapest_conversions(problem, (0, 1, 2)) == {"t": (("a", "c"), ("c", "b"))}
    with pytest.raises(PassError, match="t is written in a and needed in b; no reorders lead there"):
        cheapest_conversions(replace(problem, reorders={}), (0, 1, 2))


def written_and_read(**changes: object) -> Problem:
    problem = one_tensor(("b",), {("a", "b"): 1e-6})
    return replace(problem, **changes)  # type: ignore[arg-type]


WRITE = Alternative(("write",), {}, {"t": "a"}, 1e-6)
READ = Alternative(("read_b",), {"t": ("b",)}, {}, 1e-6)


@pytest.mark.parametrize(
    ("alternatives", "error", "message"),
    [
        ((WRITE,), PassError, "read_b can be executed in no way: no alternative covers it; a pin .*remove it"),
        (
            (replace(WRITE, writes={}), READ),
            GraphError,
            "every way to execute read_b reads .* no alternative writes: t",
        ),
        ((WRITE, replace(READ, writes={"t": "b"}, reads={})), GraphError, "t has two writers .* write and read_b"),
        ((WRITE, replace(READ, writes={"t": "b"})), GraphError, "read_b reads t, which it writes itself"),
        ((WRITE, replace(READ, covers=())), GraphError, "alternative 1 covers no op"),
        ((WRITE, replace(READ, covers=("r",))), GraphError, "alternative 1 covers r, which is not an op"),
        ((WRITE, replace(READ, covers=("read_b", "read_b"))), GraphError, "covers an op twice: read_b, read_b"),
        ((WRITE, replace(READ, cost=math.nan)), GraphError, "read_b costs nan s; a cost is finite and not negative"),
        ((WRITE, replace(READ, cost=-1.0)), GraphError, r"read_b costs -1.0 s; a cost is finite and not negative"),
        (
            (WRITE, replace(READ, reads={"t": ("c",)})),
            PassError,
            "t cannot get from write to read_b: it can be written in a and is read in c, but no reorders .* a pin",
        ),
    ],
)
def test_what_makes_no_sense(alternatives: tuple[Alternative, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="optimal: .*" + message):
        solve(written_and_read(alternatives=alternatives))


def test_ops_are_named_once() -> None:
    with pytest.raises(GraphError, match="write is listed twice among the ops"):
        solve(written_and_read(ops=("write", "read_b", "write")))


def test_reorders_have_a_cost() -> None:
    with pytest.raises(
        GraphError, match=r"the reorder of t from a to b costs inf s; .* impossible reorder is left out"
    ):
        solve(written_and_read(reorders={"t": {("a", "b"): math.inf}}))


def test_regions_that_leave_an_op_over() -> None:
    alternatives = (Alternative(("p", "q"), {}, {}, 1e-6), Alternative(("q", "r"), {}, {}, 1e-6))
    with pytest.raises(PassError, match=r"cannot be executed together with the rest: .*\+.* covers it alone"):
        solve(Problem(("p", "q", "r"), alternatives, {}))


@pytest.mark.parametrize(
    ("chosen", "conversions", "message"),
    [
        ((0,), {}, "read_b is not executed"),
        ((0, 0, 1), {}, "write is executed twice"),
        ((0, 2), {}, "2 is no alternative; there are 2"),
        ((0, 1), {}, "read_b reads t in b, which nothing makes"),
        ((0, 1), {"t": (("a", "c"),)}, "t cannot be reordered from a to c"),
        ((0, 1), {"t": (("b", "c"), ("a", "b"))}, "t is reordered from b to c before anything makes it in b"),
    ],
)
def test_evaluate_refuses_what_cannot_be_executed(
    chosen: tuple[int, ...], conversions: dict[str, tuple[tuple[str, str], ...]], message: str
) -> None:
    problem = written_and_read(reorders={"t": {("a", "b"): 1e-6, ("b", "c"): 1e-6}})
    with pytest.raises(PassError, match="optimal: " + message):
        evaluate(problem, chosen, conversions)
