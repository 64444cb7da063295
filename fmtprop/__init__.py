"""fmtprop: global memory-format planning for neural networks on oneDNN.

Names are loaded on first use (PEP 562): ``import fmtprop`` and ``import fmtprop.layout`` load neither torch
nor the oneDNN library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_EXPORTS = {
    "MemoryDesc": "fmtprop.layout",
    "DataType": "fmtprop.layout",
    "pack": "fmtprop.layout",
    "unpack": "fmtprop.layout",
    "directml": "fmtprop.dialects.directml",
    "xla": "fmtprop.dialects.xla",
    "compile": "fmtprop.api",
    "tradeoff": "fmtprop.api",
    "Accuracy": "fmtprop.compiling.sensitivity",
    "load_plan": "fmtprop.compiling.loading",
    "explain": "fmtprop.dynamo",
    "optimize": "fmtprop.dynamo.optimized",
    "quantize": "fmtprop.capture.quantizing",
    "explain_torch": "fmtprop.lens.explain",
    "inspect": "fmtprop.targets.mkldnn",
    "CompiledModel": "fmtprop.compiling.compiled",
    "DynamicModel": "fmtprop.compiling.dynamic",
    "Tune": "fmtprop.compiling.options",
    # by way of the ops: reading a graph from networkx needs their declarations
    "Graph": "fmtprop.ops",
    "onnx": "fmtprop.onnx",
    "from_torch": "fmtprop.capture",
    "load": "fmtprop.capture",
    "save": "fmtprop.capture",
    "FmtpropError": "fmtprop.errors",
    "ShapeError": "fmtprop.errors",
    "FormatError": "fmtprop.errors",
    "UnsupportedOpError": "fmtprop.errors",
    "OptionError": "fmtprop.errors",
    "GraphError": "fmtprop.errors",
    "VerifyError": "fmtprop.errors",
    "PassError": "fmtprop.errors",
    "ImportModelError": "fmtprop.errors",
    "InputError": "fmtprop.errors",
    "PlanError": "fmtprop.errors",
    "LibraryError": "fmtprop.errors",
    "LoadError": "fmtprop.errors",
    "DnnlError": "fmtprop.errors",
    "HandleError": "fmtprop.errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from fmtprop import onnx as onnx
    from fmtprop.api import compile as compile
    from fmtprop.api import tradeoff as tradeoff
    from fmtprop.capture import from_torch as from_torch
    from fmtprop.capture import load as load
    from fmtprop.capture import save as save
    from fmtprop.capture.quantizing import quantize as quantize
    from fmtprop.compiling.compiled import CompiledModel as CompiledModel
    from fmtprop.compiling.dynamic import DynamicModel as DynamicModel
    from fmtprop.compiling.loading import load_plan as load_plan
    from fmtprop.compiling.options import Tune as Tune
    from fmtprop.compiling.sensitivity import Accuracy as Accuracy
    from fmtprop.dynamo import explain as explain
    from fmtprop.dynamo.optimized import optimize as optimize
    from fmtprop.errors import (
        DnnlError as DnnlError,
    )
    from fmtprop.ir import Graph as Graph
    from fmtprop.layout import DataType as DataType
    from fmtprop.layout import MemoryDesc as MemoryDesc
    from fmtprop.layout import pack as pack
    from fmtprop.layout import unpack as unpack
    from fmtprop.lens.explain import explain_torch as explain_torch
    from fmtprop.targets.mkldnn import inspect as inspect


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fmtprop' has no attribute {name!r}")
    from fmtprop.system.collector import paused

    with paused():  # torch's objects, which are no garbage: a pass over them takes 0.1 s
        module = import_module(_EXPORTS[name])
    value = module if module.__name__.rpartition(".")[2] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
