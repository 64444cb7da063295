"""What it costs to run a node or a reorder on this machine: modelled, measured, remembered."""

from __future__ import annotations

from fmtprop.tuning.cache import TuningCache
from fmtprop.tuning.costs import MEASURING, TUNES, TunedCosts, Tuning, costs_for
from fmtprop.tuning.directory import cache_directory

__all__ = ["MEASURING", "TUNES", "TunedCosts", "Tuning", "TuningCache", "cache_directory", "costs_for"]
