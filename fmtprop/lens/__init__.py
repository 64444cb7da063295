"""PyTorch's hidden reorders: which module and which line of a program cause them, and what would save them.

``tracer.py`` watches operators and reads oneDNN's log between two of them, ``findings.py`` adds up what it saw,
``variants.py`` runs a model in other ways, ``script.py`` runs a program under the tracer. Nothing here changes a model.
"""

from __future__ import annotations

from fmtprop.lens.explain import explain_torch
from fmtprop.lens.findings import Lens, OperatorRow
from fmtprop.lens.variants import Variant

__all__ = ["Lens", "OperatorRow", "Variant", "explain_torch"]
