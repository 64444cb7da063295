"""Recurrent layers of captured graphs, as calls that a plan can run as one primitive each.

PyTorch would trace them step by step; and its own primitive's workspace has another size than its declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmtprop.ops.recurrent import KINDS, Kind, Recurrent
from fmtprop.ops.recurrent_training import gradients

#: PyTorch's function -> oneDNN's kind, and the activation
_FUNCTIONS = {
    "lstm": ("lstm", "tanh"),
    "gru": ("lbr_gru", "tanh"),
    "rnn_tanh": ("vanilla_rnn", "tanh"),
    "rnn_relu": ("vanilla_rnn", "relu"),
}

#: names of the functions
RECURRENT = tuple(_FUNCTIONS)

_DTYPES = (torch.float32, torch.bfloat16)


def whole_recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's function as one call for each of its layers."""
    return _Layers(function, *_FUNCTIONS[function.__name__])


class _Layers:
    """A recurrent function that calls `fmtprop::recurrent` for each layer, or itself where this has no such call."""

    def __init__(self, function: Callable[..., Any], kind: str, activation: str) -> None:
        self._function, self._kind, self._activation = function, KINDS[kind], activation
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        """Take the function's arguments; return its results."""
        dtype = self._dtype(*args)
        return self._function(*args) if dtype is None else self._run(dtype, *args)

    def _dtype(self, *args: Any) -> torch.dtype | None:
        """Return the type in which layers compute; None if the function itself is called."""
        if len(args) != 9 or not isinstance(args[2], list | tuple):  # a packed sequence
            return None
        src, first, parameters, has_biases, layers, _, _, bidirectional, _ = args
        tensors = [src, *(first if isinstance(first, list | tuple) else [first]), *parameters]
        is_cast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_cast else src.dtype
        known = {torch.float32, torch.bfloat16} if is_cast else {dtype}
        fits = dtype in _DTYPES and all(one.dtype in known and one.device.type == "cpu" for one in tensors)
        count = layers * (1 + bidirectional) * (4 if has_biases else 2)
        return dtype if fits and len(parameters) == count and src.numel() > 0 else None

    def _run(
        self, dtype: torch.dtype, src: Tensor, first: Any, parameters: Sequence[Tensor], has_biases: bool, layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        kind, attrs = self._kind, Recurrent(bool(bidirectional), self._activation)
        states = list(first) if isinstance(first, list | tuple) else [first]
        # under autocast, PyTorch keeps a GRU's state as it comes
        made = torch.promote_types(dtype, states[0].dtype) if kind.name == "lbr_gru" else dtype
        types = [dtype, torch.float32]  # of the state and the cell state
        src = src.transpose(0, 1) if batch_first else src
        ends: list[list[Tensor]] = [[] for _ in states]
        count, directions = 4 if has_biases else 2, attrs.directions
        for layer in range(layers):
            at = layer * directions
            own = [parameters[place * count : (place + 1) * count] for place in range(at, at + directions)]
            given = [
                state[at : at + directions].unsqueeze(0).to(type_).contiguous()
                for state, type_ in zip(states, types, strict=False)
            ]
            src = src.to(dtype).contiguous()
            if kind.name != "lstm":  # PyTorch's operator for an LSTM saves all
                src, given[0] = _kept(src, own, 0), _kept(given[0], own, 1)
            how = kind.name, attrs.bidirectional, attrs.activation
            src, *after = _recurrent(src, given, *_learned(kind, own, dtype), *how)[:3]
            src = src.to(made)
            for found, state in zip(ends, after, strict=False):
                found.append(state.squeeze(0).to(made))
            if train and dropout and layer < layers - 1:
                src = torch.nn.functional.dropout(src, dropout)
        src = src.clone()  # the gradient reads the numbers; the caller may change them
        src = src.transpose(0, 1) if batch_first else src
        return src, *(torch.cat(found) for found in ends)


def _kept(operand: Tensor, directions: Sequence[Sequence[Tensor]], place: int) -> Tensor:
    """Return an operand of products; a copy, which the caller cannot change, if PyTorch would not save the operand."""
    return operand if any(one[place].requires_grad for one in directions) else operand.clone()


def _learned(kind: Kind, directions: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return oneDNN's weights of a type, and its bias in f32, of a layer, from PyTorch's by direction."""
    count = len(kind.gates)

    def gates(place: int) -> Tensor:
        type_ = dtype if place < 2 else torch.float32
        rows = torch.stack([one[place].to(type_).reshape(count, -1, *one[place].shape[1:]) for one in directions])
        if kind.gates == tuple(range(count)):
            return rows
        parts = rows.unbind(1)  # its gradient is one call, that of slices several
        return torch.stack([parts[gate] for gate in kind.gates], 1)

    # (directions, gates, states, inputs) -> (1, directions, inputs, gates, states)
    w, u = (gates(place).permute(0, 3, 1, 2).unsqueeze(0).contiguous() for place in (0, 1))
    if len(directions[0]) == 2:
        return w, u, w.new_zeros((1, len(directions), kind.biases, w.shape[-1]), dtype=torch.float32)
    first, second = gates(2), gates(3)
    if kind.biases == count:
        return w, u, (first + second).unsqueeze(0)
    *both, last = first.unbind(1)  # those of the new gate stay apart
    *others, other = second.unbind(1)
    sums = [a + b for a, b in zip(both, others, strict=True)]
    return w, u, torch.stack([*sums, last, other], 1).unsqueeze(0)


# ---------------------------------------------------------------- the calls


@torch.library.custom_op("fmtprop::recurrent", mutates_args=())
def _recurrent(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor, kind: str,
    bidirectional: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    one, attrs = KINDS[kind], Recurrent(bidirectional, activation)
    dst, h, *c = one.reference(attrs, _named(one, src, states, weights_layer, weights_iter, bias))
    cell = c[0] if c else src.new_empty(0)
    return dst, h.contiguous(), cell.contiguous(), torch.empty(1, dtype=torch.uint8)


@_recurrent.register_fake
def _(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor, kind: str,
    bidirectional: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    times, batch, _ = src.shape
    dst = src.new_empty((times, batch, (1 + bidirectional) * weights_iter.shape[-1]))
    h, *c = (torch.empty_like(state) for state in states)
    cell = c[0] if c else src.new_empty(0)
    return dst, h, cell, src.new_empty((1,), dtype=torch.uint8)


@torch.library.custom_op("fmtprop::recurrent_backward", mutates_args=())
def _recurrent_backward(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor,
    results: list[Tensor], workspace: Tensor, diffs: list[Tensor], kind: str, bidirectional: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    one, attrs = KINDS[kind], Recurrent(bidirectional, activation)
    tensors = _named(one, src, states, weights_layer, weights_iter, bias)
    tensors |= dict(zip(("diff_dst_layer", *(f"diff_dst_{name}" for name in one.states)), diffs, strict=True))
    found = [gradient.contiguous() for gradient in gradients(one, attrs, tensors)]
    cell = found[2] if len(states) == 2 else found[0].new_empty(0)
    return found[0], found[1], cell, found[-3], found[-2], found[-1]


@_recurrent_backward.register_fake
def _(
    src: Tensor, states: list[Tensor], weights_layer: Tensor, weights_iter: Tensor, bias: Tensor,
    results: list[Tensor], workspace: Tensor, diffs: list[Tensor], kind: str, bidirectional: bool, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, h, w, u, b, *c = (
        torch.empty_like(one, dtype=torch.float32)
        for one in (src, states[0], weights_layer, weights_iter, bias, *states[1:])
    )
    return x, h, c[0] if c else x.new_empty(0), w, u, b


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    src, states, *learned = inputs[:5]
    ctx.count, ctx.how = len(states), inputs[5:]
    dst, h, c, workspace = output
    ctx.save_for_backward(src, *states, *learned, dst, *(h, c)[: ctx.count], workspace)


def _differentiate(ctx: Any, *diffs: Any) -> Any:
    src, *rest = ctx.saved_tensors
    states, (w, u, bias), (dst, *after) = rest[: ctx.count], rest[ctx.count : ctx.count + 3], rest[ctx.count + 3 : -1]
    given = [
        torch.zeros_like(t, dtype=torch.float32) if d is None else d.float().contiguous()
        for t, d in zip((dst, *after), diffs, strict=False)
    ]
    found = _recurrent_backward(src, states, w, u, bias, [dst, *after], rest[-1], given, *ctx.how)
    inputs = zip((src, *states, w, u, bias), (*found[: 1 + ctx.count], *found[3:]), strict=True)
    x, *rest = (gradient.to(one.dtype) for one, gradient in inputs)
    return x, list(rest[: ctx.count]), *rest[ctx.count :], None, None, None


_recurrent.register_autograd(_differentiate, setup_context=_save)


def _named(kind: Kind, src: Tensor, states: Sequence[Tensor], *learned: Tensor) -> dict[str, Tensor]:
    return {
        "src_layer": src,
        **{f"src_{name}": state for name, state in zip(kind.states, states, strict=True)},
        **dict(zip(("weights_layer", "weights_iter", "bias"), learned, strict=True)),
    }
