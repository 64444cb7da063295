"""The backend of ``torch.compile``: graphs that TorchDynamo captures run as plans, or in PyTorch.

``torch.compile(model, backend="fmtprop")`` finds :func:`backend` by its entry point. :func:`explain` shows the
captured graphs and the executor of each. Lower rooms own formats, plans and their execution.
"""

from __future__ import annotations

from fmtprop.dynamo.backend import backend
from fmtprop.dynamo.explanation import Explanation, explain

__all__ = ["Explanation", "backend", "explain"]
