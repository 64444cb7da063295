"""The arena planner: buffers alive together never share bytes, the rest share as much as they can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fmtprop.runtime.arena import ALIGNMENT, Lifetime, plan_arena

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
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(o + b.nbytes <= layout.nbytes for o, b in zip(layout.offsets, buffers, strict=True))
    assert layout.peak_nbytes <= layout.nbytes


def test_a_chain_needs_two_buffers():
    chain = [Lifetime(640, i, i + 1) for i in range(20)]
    assert plan_arena(chain).nbytes == 1280


def test_no_buffers_need_no_memory():
    assert plan_arena([]).nbytes == 0
