"""The exact solver against brute force, and what it says when there is nothing to solve."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from fmtprop.errors import PassError
from fmtprop.passes.optimal import Alternative, Problem, evaluate, solve
from fmtprop.passes.optimal.problem import find_cycle

FORMATS = ("abcd", "acdb", "aBcd8b", "aBcd16b")


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
    formats = FORMATS[: rng.randint(1, 4)]
    count = rng.randint(1, 8)
    ops = [f"op_{number}" for number in range(count)]
    reads: list[list[str]] = []
    for number in range(count):
        before = [f"t_{other}" for other in range(max(0, number - rng.choice((1, 2, 8))), number)]
        reads.append(rng.sample(before, min(len(before), rng.choice((0, 1, 1, 1, 2, 2, 3)))))
    alternatives = []

    def formats_read() -> tuple[str, ...]:
        return tuple(rng.sample(formats, 2)) if len(formats) > 1 and rng.random() < 0.15 else (rng.choice(formats),)

    for number, op in enumerate(ops):
        for _ in range(1 if rng.random() < 0.2 else rng.randint(1, 4)):
            alternatives.append(
                Alternative(
                    covers=(op,),
                    reads={tensor: formats_read() for tensor in reads[number]},
                    writes={f"t_{number}": rng.choice(formats)},
                    cost=rng.choice((0.0, rng.uniform(0, 10))) * 1e-6,
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
                cost=rng.uniform(0, 15) * 1e-6,
            )
        )
    present = rng.choice((1.0, 0.9, 0.6))
    scale = rng.choice((0.3, 3.0, 10.0))
    reorders = {
        f"t_{number}": {
            pair: rng.uniform(0.01, 1) ** rng.choice((1, 3)) * scale * 1e-6
            for pair in itertools.permutations(formats, 2)
            if rng.random() < present
        }
        for number in range(count)
    }
    rng.shuffle(alternatives)
    return Problem(tuple(ops), tuple(alternatives), reorders)


@pytest.mark.parametrize("block", range(6))
def test_no_choice_is_better_than_the_solution(block: int) -> None:
    solved = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = random_problem(random.Random(seed))
        expected = brute_force(problem)
        if expected == math.inf:
            with pytest.raises(PassError, match="optimal: "):
                solve(problem)
            continue
        solution = solve(problem)
        assert solution.objective == pytest.approx(expected, rel=1e-6, abs=1e-15), seed
        assert evaluate(problem, solution.chosen, solution.conversions) == pytest.approx(solution.objective, rel=1e-12)
        assert solution.optimal and solution.gap == 0.0 and solution.bound == solution.objective, seed
        solved += 1
    assert solved > 60
