"""Import of graphs from PyTorch modules, exported programs, graph files and built-in models; and graphs as modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmtprop.capture.files import load as load
    from fmtprop.capture.files import save as save
    from fmtprop.capture.graph_module import GraphModule as GraphModule
    from fmtprop.capture.torch_export import from_torch as from_torch

#: names of this package, by the module that has each, which is imported when it is asked for: an ONNX file does without
#: the exporter of PyTorch
_HOMES = {"GraphModule": "graph_module", "from_torch": "torch_export", "load": "files", "save": "files"}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"fmtprop.capture.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fmtprop.capture' has no attribute {name!r}")
