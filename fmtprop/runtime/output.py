"""An output of a run."""

from __future__ import annotations

import torch

from fmtprop.ops.pytorch import empty_strided
from fmtprop.runtime.boundary import Endpoint
from fmtprop.targets.bound import Place


class Output:
    """How the tensor of an output is made, and whether the plan writes to it directly.

    `place`: position of the result in the plan's memory. `is_written`: whether the plan writes the result to the
    caller's tensor. `is_made`: whether the result is a whole tensor that is there: one that a step makes and nothing
    else uses, or an input that steps have changed.
    """

    __slots__ = ("endpoint", "is_made", "is_written", "like", "memory", "place")

    def __init__(self, endpoint: Endpoint, place: Place, is_written: bool, is_made: bool) -> None:
        self.endpoint, self.place, self.is_written, self.is_made = endpoint, place, is_written, is_made
        self.memory = place.memory
        #: the arguments of an allocation
        self.like = endpoint.dims, endpoint.strides, endpoint.dtype

    def new(self) -> torch.Tensor:
        """Return a new tensor for the result."""
        return empty_strided(*self.like)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a run can write the result straight to a tensor of the caller's."""
        return self.endpoint.holds(tensor) and (torch.is_inference_mode_enabled() or not tensor.is_inference())

    def copied(self) -> torch.Tensor:
        """Return a new tensor with a copy of the result."""
        result = self.place.tensor()
        if result.layout is not torch.strided:
            return result.clone()
        return self.new().copy_(result)  # a clone would remove gaps between elements
