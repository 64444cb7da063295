"""The log of any program that runs oneDNN (``ONEDNN_VERBOSE``): what each primitive and each reorder took.

Knows text alone: neither torch nor oneDNN is loaded. ``parse.py`` reads lines, ``ledger.py`` adds them up,
``findings.py`` says what should not be there.
"""

from __future__ import annotations

from fmtprop.verbose.ledger import Ledger
from fmtprop.verbose.parse import Execution, executions_of, parse_line

__all__ = ["Execution", "Ledger", "executions_of", "parse_line"]
