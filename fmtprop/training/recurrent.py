"""Recurrent layers of captured graphs, as calls that a plan can run as one primitive each.

PyTorch would trace them step by step; and its own primitive's workspace has another size than its declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fmtprop.ops.recurrent import KINDS, Kind, Recurrent
from fmtprop.ops.recurrent_training import gradients, workspace_nbytes

__all__ = ["whole_layers"]

#: PyTorch's function -> oneDNN's kind, and the activation
_FUNCTIONS = {
    "lstm": ("lstm", "tanh"),
    "gru": ("lbr_gru", "tanh"),
    "rnn_tanh": ("vanilla_rnn", "tanh"),
    "rnn_relu": ("vanilla_rnn", "relu"),
}


def whole_layers(module: fx.GraphModule) -> None:
    """Replace recurrent calls of a captured graph by calls of a layer each."""
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in _FUNCTIONS and not isinstance(node.target, _Layers):
            node.target = _Layers(node.target, *_FUNCTIONS[name])
    module.recompile()


class _Layers:
    """A recurrent function that calls `fmtprop::recurrent` for each layer, or itself where this has no such call."""

    def __init__(self, function: Callable[..., Any], kind: str, activation: str) -> None:
        self._function, self._kind, self._activation = function, KINDS[kind], activation
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        """Take and return what the function does."""
        if not self._applies(*args):
            return self._function(*args)
        return self._run(*args)

    def _applies(self, *args: Any) -> bool:
        if len(args) != 9 or not isinstance(args[2], list | tuple):  # a packed sequence
            return False
        src, first, parameters, has_biases, layers, _, _, bidirectional, _ = args
        tensors = [src, *(first if isinstance(first, list | tuple) else [first]), *parameters]
        f32 = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
        count = layers * (1 + bidirectional) * (4 if has_biases else 2)
        return f32 and len(parameters) == count and src.numel() > 0 and not torch.is_autocast_enabled("cpu")

    def _run(
        self, src: Tensor, first: Any, parameters: Sequence[Tensor], has_biases: bool, layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        kind, attrs = self._kind, Recurrent(bool(bidirectional), self._activation)
        states = list(first) if isinstance(first, list | tuple) else [first]
        src = src.transpose(0, 1) if batch_first else src
        ends: list[list[Tensor]] = [[] for _ in states]
        count, directions = 4 if has_biases else 2, attrs.directions
        for layer in range(layers):
            at = layer * directions
            own = [parameters[place * count : (place + 1) * count] for place in range(at, at + directions)]
            given = [state[at : at + directions].unsqueeze(0).contiguous() for state in states]
            src, *after = _layer(kind, attrs, src.contiguous(), given, *_learned(kind, own))
            for found, state in zip(ends, after, strict=False):
                found.append(state.squeeze(0))
            if train and dropout and layer < layers - 1:
                src = torch.nn.functional.dropout(src, dropout)
        src = src.transpose(0, 1) if batch_first else src
        return src, *(torch.cat(found) for found in ends)


def _learned(kind: Kind, directions: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return oneDNN's weights and bias of a layer, from PyTorch's by direction."""
    count = len(kind.gates)

    def gates(place: int) -> Tensor:
        rows = torch.stack([one[place].reshape(count, -1, *one[place].shape[1:]) for one in directions])
        if kind.gates == tuple(range(count)):
            return rows
        parts = rows.unbind(1)  # its gradient is one call, that of slices several
        return torch.stack([parts[gate] for gate in kind.gates], 1)

    # (directions, gates, states, inputs) -> (1, directions, inputs, gates, states)
    w, u = (gates(place).permute(0, 3, 1, 2).unsqueeze(0).contiguous() for place in (0, 1))
    if len(directions[0]) == 2:
        return w, u, w.new_zeros((1, len(directions), kind.biases, w.shape[-1]))
    first, second = gates(2), gates(3)
    if kind.biases == count:
        return w, u, (first + second).unsqueeze(0)
    *both, last = first.unbind(1)  # those of the new gate stay apart
    *others, other = second.unbind(1)
    sums = [a + b for a, b in zip(both, others, strict=True)]
    return w, u, torch.stack([*sums, last, other], 1).unsqueeze(0)


def _layer(
    kind: Kind, attrs: Recurrent, src: Tensor, states: list[Tensor], w: Tensor, u: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    sources = zip(kind.states, states, strict=True)
    dims = {"src_layer": src.shape, **{f"src_{name}": state.shape for name, state in sources}}
    dims |= {"weights_layer": w.shape, "weights_iter": u.shape, "bias": bias.shape}
    nbytes = workspace_nbytes(kind, attrs, {name: tuple(map(int, size)) for name, size in dims.items()})
    dst, h, c, _ = _recurrent(src, states, w, u, bias, kind.name, attrs.bidirectional, attrs.activation, nbytes)
    return dst, h, c


# ---------------------------------------------------------------- the calls


@torch.library.custom_op("fmtprop::recurrent", mutates_args=())
def _recurrent(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor, kind: str,
    bidirectional: bool, activation: str, workspace_nbytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    one, attrs = KINDS[kind], Recurrent(bidirectional, activation)
    dst, h, *c = one.reference(attrs, _named(one, src, states, weights_layer, weights_iter, bias))
    cell = c[0] if c else src.new_empty(0)
    return dst, h.contiguous(), cell.contiguous(), torch.empty(workspace_nbytes, dtype=torch.uint8)


@_recurrent.register_fake
def _(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor, kind: str,
    bidirectional: bool, activation: str, workspace_nbytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    times, batch, _ = src.shape
    dst = src.new_empty((times, batch, (1 + bidirectional) * weights_iter.shape[-1]))
    h, *c = (torch.empty_like(state) for state in states)
    cell = c[0] if c else src.new_empty(0)
    return dst, h, cell, src.new_empty((workspace_nbytes,), dtype=torch.uint8)


@torch.library.custom_op("fmtprop::recurrent_backward", mutates_args=())
def _recurrent_backward(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor,
    results: list[Tensor], workspace: Tensor, diffs: list[Tensor], kind: str, bidirectional: bool, activation: str,
    workspace_nbytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    one, attrs = KINDS[kind], Recurrent(bidirectional, activation)
    tensors = _named(one, src, states, weights_layer, weights_iter, bias)
    tensors |= dict(zip(("diff_dst_layer", *(f"diff_dst_{name}" for name in one.states)), diffs, strict=True))
    found = [gradient.contiguous() for gradient in gradients(one, attrs, tensors)]
    cell = found[2] if len(states) == 2 else src.new_empty(0)
    return found[0], found[1], cell, found[-3], found[-2], found[-1]


@_recurrent_backward.register_fake
def _(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor,
    results: list[Tensor], workspace: Tensor, diffs: list[Tensor], kind: str, bidirectional: bool, activation: str,
    workspace_nbytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cell = torch.empty_like(states[1]) if len(states) == 2 else src.new_empty(0)
    w, u, b = (torch.empty_like(tensor) for tensor in (weights_layer, weights_iter, bias))
    return torch.empty_like(src), torch.empty_like(states[0]), cell, w, u, b


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    src, states, *learned = inputs[:5]
    ctx.count, ctx.how = len(states), inputs[5:]
    dst, h, c, workspace = output
    ctx.save_for_backward(src, *states, *learned, dst, *(h, c)[: ctx.count], workspace)


def _differentiate(ctx: Any, *diffs: Any) -> Any:
    src, *rest = ctx.saved_tensors
    states, (w, u, bias), (dst, *after) = rest[: ctx.count], rest[ctx.count : ctx.count + 3], rest[ctx.count + 3 : -1]
    given = [torch.zeros_like(t) if d is None else d.contiguous() for t, d in zip((dst, *after), diffs, strict=False)]
    found = _recurrent_backward(src, states, w, u, bias, [dst, *after], rest[-1], given, *ctx.how)
    return found[0], list(found[1 : 1 + ctx.count]), *found[3:], None, None, None, None


_recurrent.register_autograd(_differentiate, setup_context=_save)


def _named(kind: Kind, src: Tensor, states: Sequence[Tensor], *learned: Tensor) -> dict[str, Tensor]:
    return {
        "src_layer": src,
        **{f"src_{name}": state for name, state in zip(kind.states, states, strict=True)},
        **dict(zip(("weights_layer", "weights_iter", "bias"), learned, strict=True)),
    }
