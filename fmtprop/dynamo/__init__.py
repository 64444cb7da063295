"""The backend of ``torch.compile``: graphs that TorchDynamo captures run as plans, or as PyTorch would.

``torch.compile(model, backend="fmtprop")`` finds :func:`backend` by its entry point. :func:`explain` says which graphs
were captured, and what runs each of them. Formats, plans and their execution are the rooms' below.
"""

from __future__ import annotations

from fmtprop.dynamo.backend import backend
from fmtprop.dynamo.explanation import Explanation, explain

__all__ = ["Explanation", "backend", "explain"]
