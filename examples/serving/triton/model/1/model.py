"""A plan behind Triton's Python backend: this file, ``model.fmtplan`` beside it, and ``config.pbtxt`` above.

Triton has the protocol, the queue, the batches and the instances; fmtprop must be installed in its Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

from fmtprop.errors import FmtpropError
from fmtprop.serving import Rows


class TritonPythonModel:
    """A plan as Triton calls it."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the plan in an instance."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        torch.set_num_threads(int(parameters.get("threads", {}).get("string_value", 1)))  # before the plan is loaded
        self._rows = Rows(str(Path(args["model_repository"]) / args["model_version"] / "model.fmtplan"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request: those of equal sizes run together, one that fails gets an error."""
        given = [
            [
                torch.from_numpy(pb_utils.get_input_tensor_by_name(request, spec.name).as_numpy().copy())
                for spec in self._rows.inputs
            ]
            for request in requests
        ]
        return [self._response(answer) for answer in self._rows.run_each(given)]

    def _response(self, answer: list[torch.Tensor] | FmtpropError) -> Any:
        if isinstance(answer, FmtpropError):
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(answer)))
        outputs = [
            pb_utils.Tensor(spec.name, one.numpy()) for spec, one in zip(self._rows.outputs, answer, strict=True)
        ]
        return pb_utils.InferenceResponse(output_tensors=outputs)
