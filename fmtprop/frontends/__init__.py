"""Where graphs come from: PyTorch modules and exported programs, graph files, built-in models; and the way back."""

from fmtprop.frontends.files import load, save
from fmtprop.frontends.graph_module import as_module
from fmtprop.frontends.torch_export import from_torch

__all__ = ["as_module", "from_torch", "load", "save"]
