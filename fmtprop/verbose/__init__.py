"""The log of any program that runs oneDNN (``ONEDNN_VERBOSE``): the times of primitives and reorders.

Works on text only: neither torch nor oneDNN is loaded. ``parse.py`` reads lines, ``ledger.py`` adds them up,
``findings.py`` reports avoidable executions.
"""

from __future__ import annotations

from fmtprop.verbose.ledger import Ledger
from fmtprop.verbose.parse import Execution, executions_of, parse_line

__all__ = ["Execution", "Ledger", "executions_of", "parse_line"]
