"""Recurrent networks: PyTorch's own if they compute the same, else a loop over time steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fmtprop.onnx.model.operators.attributes import passed_to
from fmtprop.onnx.model.operators.values import data, is_known

_Activation = Callable[[Tensor], Tensor]

#: matrices of one or two directions, a tensor or several
Matrices = Tensor | Sequence[Tensor]

#: name -> number of directions
DIRECTIONS: Final = {"forward": 1, "reverse": 1, "bidirectional": 2}

#: numbers -> whole numbers and their scale
Rounded = Callable[[Tensor], tuple[Tensor, Tensor]]


def _affine(alpha: float, beta: float) -> _Activation:
    return lambda x: alpha * x + beta


#: name -> the function for an alpha and a beta, and their defaults
ACTIVATIONS: Final[dict[str, tuple[Callable[[float, float], _Activation], float, float]]] = {
    "relu": (lambda a, b: torch.relu, 0.0, 0.0),
    "tanh": (lambda a, b: torch.tanh, 0.0, 0.0),
    "sigmoid": (lambda a, b: torch.sigmoid, 0.0, 0.0),
    "affine": (_affine, 1.0, 0.0),
    "leakyrelu": (lambda a, b: lambda x: F.leaky_relu(x, a), 0.01, 0.0),
    "thresholdedrelu": (lambda a, b: lambda x: torch.where(x > a, x, torch.zeros_like(x)), 1.0, 0.0),
    "scaledtanh": (lambda a, b: lambda x: a * torch.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda a, b: lambda x: torch.clamp(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda a, b: lambda x: F.elu(x, a), 1.0, 0.0),
    "softsign": (lambda a, b: F.softsign, 0.0, 0.0),
    "softplus": (lambda a, b: F.softplus, 0.0, 0.0),
}
#: functions that read alpha, and functions that read beta: the attributes have one number for each
_READ_ALPHA: Final = frozenset({"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"})
_READ_BETA: Final = frozenset({"affine", "scaledtanh", "hardsigmoid"})


def _functions(
    names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> list[_Activation]:
    first, second = iter(alphas or ()), iter(betas or ())
    found = []
    for name in map(str.lower, names):
        if name not in ACTIVATIONS:
            raise ValueError(f"activation {name!r} is none of {', '.join(ACTIVATIONS)}")
        make, alpha, beta = ACTIVATIONS[name]
        a = next(first, alpha) if name in _READ_ALPHA else alpha
        b = next(second, beta) if name in _READ_BETA else beta
        found.append(make(a, b))
    return found


@dataclass(frozen=True)
class _Direction:
    """The recurrent weights of one direction, (gates * hidden, hidden), and their bias, (gates * hidden,)."""

    r: Tensor
    rb: Tensor
    peepholes: Tensor | None
    functions: list[_Activation]


#: of a direction, the gates' part from the input, and the state
_Step = Callable[[_Direction, Tensor, Sequence[Tensor]], "tuple[Tensor, ...]"]


def _clipped(x: Tensor, clip: float | None) -> Tensor:
    return x if clip is None else torch.clamp(x, -clip, clip)


def _rnn_step(clip: float | None) -> _Step:
    def step(one: _Direction, from_x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (one.functions[0](_clipped(from_x + F.linear(state[0], one.r, one.rb), clip)),)

    return step


def _gru_step(clip: float | None, linear_before_reset: bool) -> _Step:
    def step(one: _Direction, from_x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (h,) = state
        f, g = one.functions
        n = h.shape[-1]
        gates = F.linear(h, one.r[: 2 * n], one.rb[: 2 * n]) + from_x[:, : 2 * n]
        z, r = f(_clipped(gates[:, :n], clip)), f(_clipped(gates[:, n:], clip))
        if linear_before_reset:
            inner = r * F.linear(h, one.r[2 * n :], one.rb[2 * n :])
        else:
            inner = F.linear(r * h, one.r[2 * n :], one.rb[2 * n :])
        candidate = g(_clipped(from_x[:, 2 * n :] + inner, clip))
        return ((1 - z) * candidate + z * h,)

    return step


def _lstm_step(clip: float | None, input_forget: bool, rounded: Rounded | None = None) -> _Step:
    def step(one: _Direction, from_x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        h, c = state
        f, g, out = one.functions
        if rounded is None:
            gates = from_x + F.linear(h, one.r, one.rb)
        else:
            whole, scale = rounded(h)
            gates = F.linear(whole, one.r) * scale + (from_x + one.rb)
        n = h.shape[-1]
        if one.peepholes is None:
            i, o, forget = f(_clipped(gates[:, : 3 * n], clip)).chunk(3, -1)
            forget = 1 - i if input_forget else forget
            c = forget * c + i * g(_clipped(gates[:, 3 * n :], clip))
            return o * out(c), c
        pi, po, pf = one.peepholes.chunk(3, -1)
        i, o, forget, cell = gates.chunk(4, -1)
        i = f(_clipped(i + pi * c, clip))
        forget = 1 - i if input_forget else f(_clipped(forget + pf * c, clip))
        c = forget * c + i * g(_clipped(cell, clip))
        o = f(_clipped(o + po * c, clip))
        return o * out(c), c

    return step


def _walk(
    from_x: Tensor, one: _Direction, state: tuple[Tensor, ...], step: _Step, lengths: Tensor | None, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return all hidden states (time, batch, hidden), and the last state of each sequence."""
    outputs: list[Tensor] = []
    times = range(from_x.shape[0])
    for time in reversed(times) if reverse else times:
        after = step(one, from_x[time], state)
        if lengths is None:
            state = after
            outputs.append(after[0])
            continue
        alive = (time < lengths).reshape(-1, 1)
        state = tuple(torch.where(alive, new, old) for new, old in zip(after, state, strict=True))
        outputs.append(torch.where(alive, after[0], torch.zeros_like(after[0])))
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _run(
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None,
    lengths: Tensor | None,
    initial: Sequence[Tensor | None],
    peepholes: Tensor | None,
    functions: list[_Activation],
    step: _Step,
    direction: str,
    layout: int,
) -> tuple[Tensor, ...]:
    count = DIRECTIONS[direction]
    each = len(functions) // count
    hidden = r[0].shape[-1]
    if layout:
        x = x.transpose(0, 1)
    zeros = x.new_zeros(x.shape[1], hidden)
    ys, finals = [], []
    for k in range(count):
        wb, rb = (x.new_zeros(2 * w[0].shape[0]) if b is None else b[k]).chunk(2)
        held = None if peepholes is None else peepholes[k]
        one = _Direction(r[k], rb, held, functions[k * each : (k + 1) * each])
        state = tuple(zeros if h is None else (h[:, k] if layout else h[k]) for h in initial)
        # all times at once: the weights are read once
        y, final = _walk(F.linear(x, w[k], wb), one, state, step, lengths, direction == "reverse" or k == 1)
        ys.append(y)
        finals.append(final)
    result = torch.stack(ys, 1)  # time, direction, batch, hidden
    last = [torch.stack(states, 1 if layout else 0) for states in zip(*finals, strict=True)]
    return result.permute(2, 0, 1, 3) if layout else result, *last


def _reordered(weights: Tensor, order: Sequence[int]) -> Tensor:
    parts = weights.chunk(len(order), 0)
    return torch.cat([parts[gate] for gate in order])


def _whole(
    kind: str,
    order: Sequence[int],
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None,
    initial: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return the result of PyTorch's own recurrent network: states (time, batch, directions * hidden), and the last."""
    weights: list[Tensor] = []
    for k in range(len(w)):
        weights += [_reordered(w[k], order), _reordered(r[k], order)]
        if b is not None:
            weights += [_reordered(half, order) for half in b[k].chunk(2)]
    state: Any = list(initial) if kind == "lstm" else initial[0]
    function = getattr(torch, kind)
    return function(x, state, weights, b is not None, 1, 0.0, False, len(w) == 2, False)  # type: ignore[no-any-return]


#: what is added to a gate of a frozen step: beyond what a sigmoid tells from 0 and 1, and within 16-bit floats
_FROZEN = 1e4


def _one_way(
    kind: str,
    order: Sequence[int],
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    initial: Sequence[Tensor],
    *,
    is_reverse: bool,
    wanted: int,
) -> tuple[Tensor, ...]:
    """Return the states of one direction, (time, batch, hidden), and the last of each sequence.

    A network that begins at the end is one that begins at the start of reversed sequences. The last hidden state is
    that of the last step of a sequence. Nothing gives its cell but steps behind it that keep it: their input gate is 0
    and their forget gate 1, by one more column of the input, which is 1 there.
    """
    run = partial(_whole, kind, order)
    held = None if b is None else b[None]
    if lengths is None:
        y, *final = run(x.flip(0) if is_reverse else x, w[None], r[None], held, initial)
        return y.flip(0) if is_reverse else y, *final
    lengths = lengths.to(torch.int64).clamp(0, len(x))
    steps = torch.arange(len(x)).reshape(-1, 1)
    alive = steps < lengths
    places = torch.where(alive, lengths - 1 - steps, steps)[..., None]
    if is_reverse:
        x = x.gather(0, places.expand(*x.shape))
    if kind == "lstm" and wanted > 2:
        i, out, forget, cell = w.new_full((len(w), 1), _FROZEN).chunk(4)
        column = torch.cat([-i, out * 0, forget, cell * 0])
        x = torch.where(alive[..., None], x, torch.zeros_like(x))  # a NaN behind a sequence would reach the cell
        x, w = torch.cat([x, (~alive)[..., None].to(x.dtype)], -1), torch.cat([w, column], -1)
    y, *final = run(x, w[None], r[None], held, initial)
    last = (lengths - 1).clamp(0).reshape(1, -1, 1).expand(1, *y.shape[1:])
    final[0] = torch.where((lengths > 0)[:, None], y.gather(0, last), initial[0])
    if is_reverse:
        y = y.gather(0, places.expand(*y.shape))
    return torch.where(alive[..., None], y, torch.zeros_like(y)), *final


def _by_pytorch(
    kind: str,
    order: Sequence[int],
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None,
    lengths: Tensor | None,
    initial: Sequence[Tensor | None],
    *,
    direction: str,
    layout: int,
    wanted: int,
) -> tuple[Tensor, ...]:
    """Return the states (time, direction, batch, hidden) by PyTorch's own recurrent networks, and the last ones."""
    hidden = r[0].shape[-1]
    if layout:
        x, initial = x.transpose(0, 1), [None if h is None else h.transpose(0, 1) for h in initial]
    states = [x.new_zeros(len(w), x.shape[1], hidden) if h is None else h for h in initial]
    if lengths is None and direction != "reverse":
        y, *final = _whole(kind, order, x, w, r, b, states)
        y = y.reshape(*y.shape[:2], len(w), hidden).permute(0, 2, 1, 3)
    else:
        ways = [
            _one_way(
                kind, order, x, w[k], r[k], None if b is None else b[k], lengths, [h[k : k + 1] for h in states],
                is_reverse=direction == "reverse" or k == 1, wanted=wanted,
            )
            for k in range(len(w))
        ]  # fmt: skip
        y = torch.stack([way[0] for way in ways], 1)
        final = [torch.cat(of_ways) for of_ways in list(zip(*ways, strict=True))[1:]]
    return (y.permute(2, 0, 1, 3), *(h.transpose(0, 1) for h in final)) if layout else (y, *final)


#: PyTorch's own networks: the functions of one direction -> its name, and the order of ONNX's gates
_ByFunctions = Mapping[tuple[str, ...], tuple[str, Sequence[int]]]


def _layer(
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None,
    lengths: Tensor | None,
    initial: Sequence[Tensor | None],
    usual: Sequence[str],
    make_step: Callable[[float | None], _Step],
    by_functions: _ByFunctions,
    peepholes: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    wanted: int = 3,
) -> tuple[Tensor, ...]:
    """Return all hidden states, and the last states."""
    if hidden_size is not None and hidden_size != r[0].shape[-1]:
        raise ValueError(f"hidden_size is {hidden_size}, but R has shape {(len(r), *r[0].shape)}")
    names = [name.lower() for name in activations or [*usual] * len(w)]
    one = tuple(names[: len(usual)])
    if direction not in DIRECTIONS or DIRECTIONS[direction] != len(w):
        raise ValueError(f"direction {direction!r} is not {', '.join(DIRECTIONS)}, or W has {len(w)} directions")
    if lengths is not None and is_known(lengths) and bool((data(lengths, "sequence_lens") >= x.shape[layout]).all()):
        lengths = None
    if clip is None and one in by_functions and names == [*one] * (len(names) // len(one)):
        kind, order = by_functions[one]
        return _by_pytorch(kind, order, x, w, r, b, lengths, initial, direction=direction, layout=layout, wanted=wanted)
    functions = _functions(names, activation_alpha, activation_beta)
    return _run(x, w, r, b, lengths, initial, peepholes, functions, make_step(clip), direction, layout)


@passed_to(_layer)
def _rnn(
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    own: _ByFunctions = {("tanh",): ("rnn_tanh", [0]), ("relu",): ("rnn_relu", [0])}
    return _layer(x, w, r, b, lengths, [initial_h], ["Tanh"], _rnn_step, own, **attributes)


@passed_to(_layer)
def _gru(
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    linear_before_reset: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    own: _ByFunctions = {("sigmoid", "tanh"): ("gru", [1, 0, 2])} if linear_before_reset else {}
    step = partial(_gru_step, linear_before_reset=bool(linear_before_reset))
    return _layer(x, w, r, b, lengths, [initial_h], ["Sigmoid", "Tanh"], step, own, **attributes)


@passed_to(_layer)
def lstm(
    x: Tensor,
    w: Matrices,
    r: Matrices,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    peepholes: Tensor | None = None,
    rounded: Rounded | None = None,
    *,
    input_forget: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return all hidden states, the last hidden state and the last cell; `rounded`: of states before R."""
    plain = rounded is None and peepholes is None and not input_forget
    own: _ByFunctions = {("sigmoid", "tanh", "tanh"): ("lstm", [0, 2, 3, 1])} if plain else {}
    step = partial(_lstm_step, input_forget=bool(input_forget), rounded=rounded)
    initial, usual = [initial_h, initial_c], ["Sigmoid", "Tanh", "Tanh"]
    return _layer(x, w, r, b, lengths, initial, usual, step, own, peepholes, **attributes)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {"RNN": _rnn, "GRU": _gru, "LSTM": lstm}
