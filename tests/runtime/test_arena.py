"""The arena planner: buffers alive together never share bytes, the rest share as much as they can."""

from __future__ import annotations

import random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmtprop.builtin import builtin_names
from fmtprop.capture import load
from fmtprop.compiling.stages import normalise
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.target import Setting
from fmtprop.runtime import build_plan
from fmtprop.runtime.arena import Lifetime, plan_arena
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.memory import ALIGNMENT_NBYTES, align
from tests.runtime.in_place import blocks_of, put_in_place

lifetimes = st.lists(
    st.builds(lambda n, a, d: Lifetime(n, a, a + d), st.integers(1, 5000), st.integers(0, 20), st.integers(0, 8)),
    max_size=40,
)


@given(lifetimes)
def test_buffers_alive_together_never_overlap(buffers):
    layout = plan_arena(buffers)
    for i, (a, x) in enumerate(zip(layout.offsets, buffers, strict=True)):
        for b, y in list(zip(layout.offsets, buffers, strict=True))[:i]:
            together = x.first <= y.last and y.first <= x.last
            assert not together or a + x.nbytes <= b or b + y.nbytes <= a


@given(lifetimes)
def test_offsets_are_aligned_and_inside(buffers):
    layout = plan_arena(buffers)
    assert all(offset % ALIGNMENT_NBYTES == 0 for offset in layout.offsets)
    assert all(o + b.nbytes <= layout.nbytes for o, b in zip(layout.offsets, buffers, strict=True))
    assert layout.peak_nbytes <= layout.nbytes


@given(lifetimes)
def test_the_bound_is_the_largest_sum_of_bytes_alive_at_one_step(buffers):
    alive = [sum(align(b.nbytes) for b in buffers if b.first <= step <= b.last) for step in range(30)]
    assert plan_arena(buffers).peak_nbytes == max(alive)


def test_what_no_simple_order_places_well_is_improved_on():
    # each of the five orders to begin with needs nine or more units; eight are alive at most
    buffers = [Lifetime(64 * n, a, b) for n, a, b in [(4, 3, 5), (2, 1, 1), (3, 0, 1), (3, 1, 2), (4, 2, 4)]]
    layout = plan_arena(buffers)
    assert (layout.nbytes, layout.peak_nbytes) == (8 * 64, 8 * 64)


def test_a_thousand_buffers_are_placed_near_the_bound_in_no_time():
    numbers = random.Random(0)
    starts = [numbers.randrange(1000) for _ in range(1000)]
    buffers = [Lifetime(numbers.randint(1, 10**5), a, a + numbers.randint(0, 6)) for a in starts]
    before = process_time()
    layout = plan_arena(buffers)
    assert process_time() - before < 1.0
    assert layout.nbytes <= 1.02 * layout.peak_nbytes


def plans(name: str):
    """Yield the plans of a built-in graph: two policies, and concats in place."""
    normal, _ = normalise(load(name))
    target, fallback = OneDnnTarget(), ReferenceTarget()
    for policy in ("plain", "propagate"):
        yield build_plan(AssignFormats(policy, Setting(target, fallback)).run(normal), target)
    blocked = AssignFormats("blocked", Setting(target, fallback), rule=blocks_of(8)).run(normal)
    yield build_plan(blocked, target)
    yield build_plan(put_in_place(blocked, target), target)


@pytest.mark.parametrize("name", ["concat", "residual", "mobilenet_v2", "shufflenet_v2"])
def test_the_arena_is_at_its_bound(name):
    for plan in plans(name):
        assert plan.arena_nbytes == plan.peak_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_names())
def test_the_arena_of_every_built_in_graph_is_at_its_bound(name):
    for plan in plans(name):
        assert plan.arena_nbytes == plan.peak_nbytes


def test_a_chain_needs_two_buffers():
    chain = [Lifetime(640, i, i + 1) for i in range(20)]
    assert plan_arena(chain).nbytes == 1280


def test_no_buffers_need_no_memory():
    assert plan_arena([]).nbytes == 0
