"""Import of graphs from PyTorch modules, exported programs, graph files and built-in models; and graphs as modules."""

from fmtprop.capture.files import load, save
from fmtprop.capture.graph_module import GraphModule
from fmtprop.capture.torch_export import from_torch

__all__ = ["GraphModule", "from_torch", "load", "save"]
