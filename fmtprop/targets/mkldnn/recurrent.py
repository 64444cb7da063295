"""Recurrent layers by PyTorch's own oneDNN, which is often newer than the library beside it.

PyTorch has operators for one direction of an LSTM, forward and backward. Only this gradient can read the workspace of
this forward pass, so the workspace has a format of its own: as with a primitive's, no reorder leads to it, and both
passes run alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fmtprop.ir.node import Node
from fmtprop.ir.op import opdef
from fmtprop.ir.ports import result_names
from fmtprop.ir.tensors import torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.recurrent import Recurrent
from fmtprop.ops.workspace import WORKSPACE
from fmtprop.passes.target import Candidate, Request
from fmtprop.targets.mkldnn.dispatcher import computes_in, has_kernel
from fmtprop.targets.mkldnn.function import TorchFunction

_FORWARD, _BACKWARD = "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"

#: PyTorch's number of an LSTM; its oneDNN layers of other kinds do not run
_LSTM = 2

#: oneDNN's (layers, directions, inputs, gates, states) in the order of PyTorch's weights, (gates, states, inputs)
_WEIGHTS = "abdec"

_DTYPES = (DataType.F32, DataType.BF16)

Tensors = Mapping[str, torch.Tensor]


def recurrent_candidates(node: Node, request: Request) -> Iterator[Candidate]:
    """Yield PyTorch's way to run a pass of an LSTM, if it serves the request."""
    if not isinstance(node.attrs, Recurrent) or "src_iter_c" not in request:
        return
    dtype, results = request["src_layer"].dtype, result_names(node)
    if dtype not in _DTYPES or not computes_in(dtype) or not has_kernel(_BACKWARD, "CPU"):
        return
    layer = _Layer.of(node.attrs, request)
    formats = {name: layer.format(name, desc) for name, desc in request.items()}
    if any(desc.kind != "any" and desc != formats[name] for name, desc in request.items() if name != WORKSPACE.name):
        return
    operands = {name: desc for name, desc in formats.items() if name not in results}
    is_backward, trains = (
        any(one.is_workspace for one in part) for part in (opdef(node.op).operands, opdef(node.op).results)
    )
    run = layer.backward if is_backward else layer.train if trains else layer.infer

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return run(dict(zip(operands, tensors, strict=True)))

    impl = _BACKWARD if is_backward else _FORWARD
    handle = TorchFunction(call, takes_any_numbers=True, workspace=layer.workspace)
    yield Candidate("mkldnn", impl, operands, tuple(formats[name] for name in results), 0.0, False, handle)


@dataclass(frozen=True)
class _Layer:
    """An LSTM layer of some sizes.

    Parameters
    ----------
    directions, times, batch, channels, states : int
        Its sizes.
    dtype : DataType
        Type of the sequence and the weights.
    """

    directions: int
    times: int
    batch: int
    channels: int
    states: int
    dtype: DataType

    @classmethod
    def of(cls, attrs: Recurrent, request: Request) -> _Layer:
        """Return the layer of a node."""
        src = request["src_layer"]
        times, batch, channels = src.dims
        return cls(attrs.directions, times, batch, channels, request["weights_iter"].dims[-1], src.dtype)

    def format(self, name: str, desc: MemoryDesc) -> MemoryDesc:
        """Return the format in which PyTorch reads or writes a tensor."""
        if name == WORKSPACE.name:
            # about the size of its numbers: the operator alone knows the padding
            numbers = self.directions * self.times * self.batch * 8 * self.states
            return MemoryDesc.opaque(desc.dims, desc.dtype, numbers * self.dtype.nbytes, f"workspace of {_FORWARD}")
        return MemoryDesc(desc.dims, desc.dtype, tag=_WEIGHTS if "weights" in name else None)

    # ---------------------------------------------------------------- passes

    def infer(self, given: Tensors) -> Sequence[torch.Tensor]:
        """Return sequence and states."""
        return self._forward(given, trains=False)

    def train(self, given: Tensors) -> Sequence[torch.Tensor]:
        """Return sequence, states and workspace."""
        return self._forward(given, trains=True)

    def backward(self, given: Tensors) -> Sequence[torch.Tensor]:
        """Return the gradients of sequence, states, weights and bias."""
        found = []
        for direction, workspace in enumerate(given[WORKSPACE.name].chunk(self.directions)):
            part = slice(direction * self.states, (direction + 1) * self.states)
            dst, diff_dst = (given[name][..., part].contiguous() for name in ("dst_layer", "diff_dst_layer"))
            h, c, after_h, after_c, diff_h, diff_c = (
                given[name][0, direction : direction + 1]
                for name in ("src_iter", "src_iter_c", "dst_iter", "dst_iter_c", "diff_dst_iter", "diff_dst_iter_c")
            )
            found.append(
                torch.ops.aten.mkldnn_rnn_layer_backward.default(
                    given["src_layer"], *self._learned(given, direction), h, c, dst, after_h, after_c, diff_dst, diff_h,
                    diff_c, bool(direction), _LSTM, self.states, 1, True, True, False, [], False, workspace,
                )
            )  # fmt: skip
        diff_src, diff_w, diff_u, diff_bias, _, diff_states, diff_cells = zip(*found, strict=True)
        return (
            diff_src[0] if self.directions == 1 else torch.add(*diff_src),
            _beside(diff_states, 1),
            _beside(diff_cells, 1),
            self._as_onednn(diff_w),
            self._as_onednn(diff_u),
            _beside([one.view(1, 4, self.states) for one in diff_bias], 1),
        )

    def workspace(self) -> torch.Tensor:
        """Return the workspace of a forward pass over zeros."""
        cells = torch.zeros((1, self.directions, self.batch, self.states), device="cpu")
        src = torch.zeros((self.times, self.batch, self.channels), dtype=torch_dtype(self.dtype), device="cpu")
        given = {
            "src_layer": src,
            "src_iter": cells.to(src.dtype),
            "src_iter_c": cells,
            "weights_layer": src.new_zeros((1, self.directions, self.channels, 4, self.states)),
            "weights_iter": src.new_zeros((1, self.directions, self.states, 4, self.states)),
            "bias": cells.new_zeros((1, self.directions, 4, self.states)),
        }
        return self._forward(given, trains=True)[-1]

    def _forward(self, given: Tensors, *, trains: bool) -> Sequence[torch.Tensor]:
        found = []
        for direction in range(self.directions):
            h, c = (given[name][0, direction : direction + 1] for name in ("src_iter", "src_iter_c"))
            with torch.set_grad_enabled(trains):  # PyTorch makes a workspace only if gradients are recorded
                one = torch.ops.aten.mkldnn_rnn_layer.default(
                    given["src_layer"], *self._learned(given, direction), h, c, bool(direction), [], _LSTM, self.states,
                    1, True, False, False, trains,
                )  # fmt: skip
            found.append(one)
        dst, states, cells, workspace = zip(*found, strict=True)
        results = _joined(dst, -1), _beside(states, 1), _beside(cells, 1)
        return (*results, _joined(workspace, 0)) if trains else results

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

    def _as_onednn(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return weights, or gradients of these, of each direction as oneDNN's."""
        return _beside([one.view(1, 4, self.states, -1) for one in weights], 1).permute(0, 1, 4, 2, 3)


def _joined(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def _beside(parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    return parts[0].unsqueeze(axis) if len(parts) == 1 else torch.stack(list(parts), axis)
