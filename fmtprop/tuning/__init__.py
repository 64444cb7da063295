"""What it costs to run a node or a reorder on this machine: modelled, measured, remembered."""

from __future__ import annotations

from fmtprop.tuning.costs import MEASURING, TUNES, TunedCosts, Tuning, costs_for

__all__ = ["MEASURING", "TUNES", "TunedCosts", "Tuning", "costs_for"]
