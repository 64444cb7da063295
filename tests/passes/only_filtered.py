"""Make the solver choose Winograd's filtering whatever it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fmtprop.passes.optimal.ways import Enumeration


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

    def alone(self: Enumeration, name: str, candidate: object) -> None:
        if wanted():
            self.ways[name].clear()
            offer(self, name, candidate)

    monkeypatch.setattr(Enumeration, "offer", alone)
    monkeypatch.setattr("fmtprop.passes.optimal.assign._is_composed", lambda alternative: False)
