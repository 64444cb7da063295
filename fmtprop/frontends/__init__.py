"""Import of graphs from PyTorch modules, exported programs, graph files and built-in models; and graphs as modules."""

from fmtprop.frontends.files import load, save
from fmtprop.frontends.graph_module import as_module
from fmtprop.frontends.torch_export import from_torch

__all__ = ["as_module", "from_torch", "load", "save"]
