"""What a plan does and what it costs: decisions, reorders, policies side by side. Reads artefacts, decides nothing."""

from fmtprop.report.comparison import TOLERANCES, Comparison
from fmtprop.report.model import ReorderRow, Report, StepRow

__all__ = ["TOLERANCES", "Comparison", "ReorderRow", "Report", "StepRow"]
