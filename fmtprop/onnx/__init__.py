"""ONNX models with ONNX Runtime's interface: a session, and the interface of ONNX's own test runner.

``fmtprop.compile("model.onnx")`` plans a model for fixed shapes. A session makes a plan for each new shape, takes and
returns numpy arrays by name, and runs models that a plan cannot express node by node.
"""

from __future__ import annotations

from fmtprop.onnx.arrays import NodeArg
from fmtprop.onnx.session import InferenceSession, IOBinding, ModelMetadata

__all__ = ["IOBinding", "InferenceSession", "ModelMetadata", "NodeArg", "backend"]


def __getattr__(name: str) -> object:
    # it needs the package onnx
    if name == "backend":
        from importlib import import_module

        return import_module("fmtprop.onnx.backend")
    raise AttributeError(f"module 'fmtprop.onnx' has no attribute {name!r}")
