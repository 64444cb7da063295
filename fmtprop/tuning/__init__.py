"""Costs of nodes and reorders on this machine: modelled, measured, recorded."""

from __future__ import annotations

from fmtprop.tuning.costs import KNOWN, MEASURING, NOMINAL, TUNES, Basis, TunedCosts, Tuning, costs_for

__all__ = ["KNOWN", "MEASURING", "NOMINAL", "TUNES", "Basis", "TunedCosts", "Tuning", "costs_for"]
