"""Reports on plans: decisions, reorders, costs, and comparisons of policies. Reads artefacts, decides nothing."""

from fmtprop.report.comparison import TOLERANCES, Comparison, outputs_of
from fmtprop.report.counterfactual import Counterfactual
from fmtprop.report.ledger import ReorderRow
from fmtprop.report.model import Report, StepRow

__all__ = ["TOLERANCES", "Comparison", "Counterfactual", "ReorderRow", "Report", "StepRow", "outputs_of"]
