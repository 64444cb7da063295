"""Recurrent layers by PyTorch's own oneDNN, which is often newer than the library beside it.

PyTorch has an operator for one direction of an LSTM. It serves inference only: in training, oneDNN's own pair runs the
layer, or PyTorch the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fmtprop.ir import Node, result_names
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.recurrent import LSTM, Recurrent
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.mkldnn.dispatcher import computes_in, has_kernel
from fmtprop.targets.mkldnn.function import TorchFunction

_OPERATOR = "aten::mkldnn_rnn_layer"

#: PyTorch's number of an LSTM; its oneDNN layers of other kinds do not run
_LSTM = 2

#: oneDNN's (layers, directions, inputs, gates, states) in the order of PyTorch's weights, (gates, states, inputs)
_WEIGHTS = "abdec"

_DTYPES = (DataType.F32, DataType.BF16)

Tensors = Mapping[str, torch.Tensor]


def recurrent_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield PyTorch's way to run an LSTM, if it serves the request."""
    if node.op != LSTM.name or not isinstance(node.attrs, Recurrent):
        return
    dtype, results = request["src_layer"].dtype, result_names(node)
    if dtype not in _DTYPES or not computes_in(dtype) or not has_kernel(_OPERATOR, "CPU"):
        return
    layer = _Layer.of(node.attrs, request)
    formats = {name: layer.format(name, desc) for name, desc in request.items()}
    if any(desc.kind != "any" and desc != formats[name] for name, desc in request.items()):
        return
    operands = {name: desc for name, desc in formats.items() if name not in results}

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return layer(dict(zip(operands, tensors, strict=True)))

    written = tuple(formats[name] for name in results)
    yield Candidate("mkldnn", _OPERATOR, operands, written, 0.0, False, TorchFunction(call, takes_any_numbers=True))


@dataclass(frozen=True)
class _Layer:
    """An LSTM layer of some sizes."""

    directions: int
    states: int

    @classmethod
    def of(cls, attrs: Recurrent, request: Request) -> _Layer:
        """Return the layer of a node."""
        return cls(attrs.directions, request["weights_iter"].dims[-1])

    def format(self, name: str, desc: MemoryDesc) -> MemoryDesc:
        """Return the format in which PyTorch reads or writes a tensor."""
        return MemoryDesc(desc.dims, desc.dtype, tag=_WEIGHTS if "weights" in name else None)

    def __call__(self, given: Tensors) -> Sequence[torch.Tensor]:
        """Return sequence and states."""
        found = []
        for direction in range(self.directions):
            h, c = (given[name][0, direction : direction + 1] for name in ("src_iter", "src_iter_c"))
            one = torch.ops.aten.mkldnn_rnn_layer.default(
                given["src_layer"], *self._learned(given, direction), h, c, bool(direction), [], _LSTM, self.states,
                1, True, False, False, False,
            )  # fmt: skip
            found.append(one[:3])
        dst, states, cells = zip(*found, strict=True)
        joined = dst[0] if len(dst) == 1 else torch.cat(list(dst), -1)
        return joined, _beside(states, 1), _beside(cells, 1)

    # ---------------------------------------------------------------- parameters

    def _learned(self, given: Tensors, direction: int) -> tuple[torch.Tensor, ...]:
        """Return weights and biases of a direction as PyTorch's; it adds two biases."""
        w, u = (
            given[name][0, direction].permute(1, 2, 0).reshape(4 * self.states, -1)
            for name in ("weights_layer", "weights_iter")
        )
        return w, u, given["bias"][0, direction].flatten(), self._no_bias

    @cached_property
    def _no_bias(self) -> torch.Tensor:
        return torch.zeros(4 * self.states, device="cpu")


def _beside(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0].unsqueeze(axis) if len(parts) == 1 else torch.stack(list(parts), axis)
