"""Targets that execute nodes: oneDNN through its C API, and plain PyTorch as reference and fallback."""

from fmtprop.targets.onednn import OneDnnTarget
from fmtprop.targets.reference import ReferenceTarget

__all__ = ["OneDnnTarget", "ReferenceTarget"]
