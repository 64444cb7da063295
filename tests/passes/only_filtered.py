"""Make the solver choose Winograd's filtering whatever it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fmtprop.passes.optimal.ways import Enumeration, Way
from fmtprop.passes.target import Candidate


def only_filtered(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[], bool] = lambda: True) -> None:
    """Leave no other way to run a convolution that can be filtered, or some of them.

    Parameters
    ----------
    monkeypatch : pytest.MonkeyPatch
        Undoes it.
    wanted : callable, optional
        Asked once for each such convolution; where it says no, only the direct ways are left.
    """
    offer = Enumeration.offer
    asked: dict[tuple[int, str], tuple[Enumeration, bool]] = {}  # kept alive, so that no other has its id

    def alone(self: Enumeration, name: str, candidate: Candidate) -> None:
        key = (id(self), name)
        if key not in asked:
            asked[key] = self, wanted()
            if asked[key][1]:
                self.ways[name].clear()
        if asked[key][1]:
            offer(self, name, candidate)

    monkeypatch.setattr(Enumeration, "offer", alone)
    monkeypatch.setattr(Way, "is_composed", False)  # no solution without them is looked for
