"""Reports on plans: decisions, reorders, costs, and comparisons of policies. Reads artefacts, decides nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmtprop.report.comparison import TOLERANCES as TOLERANCES
    from fmtprop.report.comparison import Comparison as Comparison
    from fmtprop.report.comparison import outputs_of as outputs_of
    from fmtprop.report.counterfactual import Counterfactual as Counterfactual
    from fmtprop.report.ledger import ReorderRow as ReorderRow
    from fmtprop.report.model import Report as Report
    from fmtprop.report.model import StepRow as StepRow

#: names of this package, by the module that has each; imported when asked for: a plan needs no report
_HOMES = {
    "TOLERANCES": "comparison",
    "Comparison": "comparison",
    "Counterfactual": "counterfactual",
    "ReorderRow": "ledger",
    "Report": "model",
    "StepRow": "model",
    "outputs_of": "comparison",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"fmtprop.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fmtprop.report' has no attribute {name!r}")
