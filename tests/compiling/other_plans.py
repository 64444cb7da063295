"""Make sure that a contest has plans to compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fmtprop.compiling import contestants


def unlike_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `propagate` be a policy whose reorders nobody would pay for, so that no other plan is like it."""
    usual = contestants.greedy
    monkeypatch.setattr(contestants, "greedy", lambda policy, *model: replace(usual("naive", *model), name=policy))
