"""ONNX models with ONNX Runtime's interface: a session, and the interface of ONNX's own test runner.

``fmtprop.compile("model.onnx")`` plans a model for fixed shapes. A session makes a plan for each new shape, takes and
returns numpy arrays by name, and runs models that a plan cannot express node by node. Both read the file by
:mod:`fmtprop.onnx.model`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmtprop.onnx.arrays import NodeArg as NodeArg
    from fmtprop.onnx.session import InferenceSession as InferenceSession
    from fmtprop.onnx.session import IOBinding as IOBinding
    from fmtprop.onnx.session import ModelMetadata as ModelMetadata

#: Names of this package, by the module that has each. They are imported when they are asked for: a session stands above
#: ``fmtprop.compile``, which reads ONNX files by this package, too; and the test runner's interface needs ``onnx``.
_HOMES = {
    "IOBinding": "session",
    "InferenceSession": "session",
    "ModelMetadata": "session",
    "NodeArg": "arrays",
}

__all__ = [*_HOMES, "backend"]


def __getattr__(name: str) -> object:
    if name != "backend" and name not in _HOMES:
        raise AttributeError(f"module 'fmtprop.onnx' has no attribute {name!r}")
    from fmtprop.system.collector import paused

    with paused():  # as in the package above: a pass over torch's objects takes a fifth of the import
        module = import_module(f"fmtprop.onnx.{_HOMES.get(name, name)}")
    return getattr(module, name, module)
