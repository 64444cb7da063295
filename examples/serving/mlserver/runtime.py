"""Plans behind MLServer: ``cd examples/serving/mlserver && mlserver start .``, with your plan's path in the settings.

MLServer has the protocol, the batches (``max_batch_size``, ``max_batch_time``) and the metrics. The settings have no
parallel workers: MLServer 1.7's do not start with uvloop 0.23.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor

from fmtprop.errors import InputError
from fmtprop.serving import Rows
from fmtprop.serving.protocol import model_metadata


class PlanRuntime(MLModel):
    """A plan as MLServer calls it."""

    async def load(self) -> bool:
        """Load the plan in a worker."""
        torch.set_num_threads(self.settings.parameters.extra.get("threads", 1))  # before the plan is loaded
        self._rows = Rows(self.settings.parameters.uri, self.name)
        known = model_metadata(self.name, self._rows.inputs, self._rows.outputs)
        self.inputs = [MetadataTensor(**row) for row in known["inputs"]]
        self.outputs = [MetadataTensor(**row) for row in known["outputs"]]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run the model."""
        given = {one.name: one for one in payload.inputs}
        missing = [spec.name for spec in self._rows.inputs if spec.name not in given]
        if missing:
            raise InferenceError(f"input {missing[0]!r} is missing")
        try:
            tensors = [
                torch.from_numpy(np.array(NumpyCodec.decode_input(given[spec.name]))) for spec in self._rows.inputs
            ]
            results = await asyncio.to_thread(self._rows.run, tensors)
        except (InputError, TypeError, ValueError) as error:
            raise InferenceError(str(error)) from error
        outputs = [
            NumpyCodec.encode_output(spec.name, one.numpy())
            for spec, one in zip(self._rows.outputs, results, strict=True)
        ]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)
