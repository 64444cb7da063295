"""Make sure that a race has plans to compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fmtprop.compiling import entrants


def unlike_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `propagate` be a policy whose reorders nobody would pay for, so that no other plan is like it."""
    usual = entrants.greedy
    monkeypatch.setattr(entrants, "greedy", lambda policy, *model: replace(usual("naive", *model), name=policy))
