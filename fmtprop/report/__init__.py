"""What a plan does and what it costs: decisions, reorders, policies side by side. Reads artefacts, decides nothing."""

from fmtprop.report.comparison import TOLERANCES, Comparison
from fmtprop.report.counterfactual import Counterfactual
from fmtprop.report.ledger import ReorderRow
from fmtprop.report.model import Report, StepRow

__all__ = ["TOLERANCES", "Comparison", "Counterfactual", "ReorderRow", "Report", "StepRow"]
