"""The backend interface of ONNX, for its test runner and for programs that use any backend.

Examples
--------
>>> import numpy as np, onnx
>>> import fmtprop.onnx.backend as backend
>>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
>>> backend.run_model(onnx.parser.parse_model(text), [np.float32([-1, 2])], policy="propagate")
(array([0., 2.], dtype=float32),)

References
----------
``onnx/backend/base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from fmtprop.onnx.session import InferenceSession

__all__ = ["FmtpropBackend", "prepare", "run_model", "run_node", "supports_device"]


class FmtpropRep(BackendRep):  # type: ignore[misc]
    """A model that is ready to run."""

    def __init__(self, session: InferenceSession) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs for inputs in order, by name, or for a single one."""
        names = [arg.name for arg in self.session.get_inputs()]
        if isinstance(inputs, Mapping):
            feed = dict(inputs)
        elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
            feed = dict(zip(names, inputs, strict=False))
        else:
            feed = {names[0]: inputs}
        return tuple(self.session.run(None, feed))


class FmtpropBackend(Backend):  # type: ignore[misc]
    """fmtprop as a backend of ONNX."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> FmtpropRep:
        """Return a model that is ready to run.

        Parameters
        ----------
        model : onnx.ModelProto
            The model.
        device : str
            ``"CPU"``.
        **options : object
            Of :func:`fmtprop.compile`.

        Returns
        -------
        FmtpropRep
            Its ``run`` takes the inputs in order, by name, or a single one, and returns a tuple of arrays.

        Raises
        ------
        ImportModelError
            The model is invalid or not supported.
        """
        return FmtpropRep(InferenceSession(model, **options))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Prepare a model and run it once.

        Parameters
        ----------
        model : onnx.ModelProto
            The model.
        inputs : sequence, mapping or numpy.ndarray
            In order, by name, or a single one.
        device : str
            ``"CPU"``.
        **options : object
            Of :func:`fmtprop.compile`.

        Returns
        -------
        tuple
            Numpy arrays; lists of them for sequences.
        """
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Run one node on arrays in the order of its inputs.

        Parameters
        ----------
        node : onnx.NodeProto
            The node, of the newest opset unless ``opset_version`` is given.
        inputs : sequence of numpy.ndarray
            Its inputs.
        device : str
            ``"CPU"``.
        outputs_info : object
            Not needed.
        **options : object
            Of :func:`fmtprop.compile`, and ``opset_version``.

        Returns
        -------
        tuple
            Numpy arrays.
        """
        version = options.pop("opset_version", onnx.defs.onnx_opset_version())
        named = dict(zip([name for name in node.input if name], inputs, strict=True))
        infos = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in named.items()
        ]
        outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", infos, outputs)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(node.domain, version)])
        return cls.run_model(onnx.shape_inference.infer_shapes(model), list(named.values()), device, **options)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether models run on a device: only on the CPU.

        Parameters
        ----------
        device : str
            Such as ``"CPU"`` or ``"CUDA:1"``.

        Returns
        -------
        bool
        """
        return device.partition(":")[0] == "CPU"


prepare = FmtpropBackend.prepare
run_model = FmtpropBackend.run_model
run_node = FmtpropBackend.run_node
supports_device = FmtpropBackend.supports_device
