"""Runs of a kernel's work."""

from __future__ import annotations

from fmtprop.jit import StandaloneWork


def statuses(work: StandaloneWork) -> list[int]:
    """Make the calls until one fails; return their statuses."""
    found: list[int] = []
    for function, *arguments in work.calls:
        found.append(function(*arguments) or 0)
        if found[-1]:
            break
    return found
