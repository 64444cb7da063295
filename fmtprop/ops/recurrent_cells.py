"""Importers of recurrent cells: a step of a sequence as products and element-wise functions.

oneDNN's recurrent layers take longer for one step, 20 us for a small cell, since they serve whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmtprop.ir import Call, Importer, Value
from fmtprop.ops.arguments import computable
from fmtprop.ops.binary import Binary
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.view_attrs import windowed


def _products(call: Call) -> tuple[Value, Value] | None:
    """Return the products of the input and of the state with their weights."""
    state, *_ = states = call["hx"] if isinstance(call["hx"], Sequence) else [call["hx"]]
    given = [call[name] for name in ("input", "w_ih", "w_hh", "b_ih", "b_hh")]
    if not computable(call, *states, *given) or 0 in call.results[0].dims or 0 in call.type(given[0]).dims:
        return None
    src, w_ih, w_hh, b_ih, b_hh = given
    products = [
        call.emit("inner_product", {"src": one, "weights": weights, "bias": bias}, InnerProduct())
        for one, weights, bias in ((src, w_ih, b_ih), (state, w_hh, b_hh))
    ]
    return products[0], products[1]


def _of(call: Call, alg: str, a: Value, b: Value | None = None) -> Value:
    if b is None:
        return call.emit("eltwise", {"src": a}, Eltwise(alg))
    return call.emit("binary", {"src_0": a, "src_1": b}, Binary(alg))


def _gates(call: Call, value: Value, first: int, count: int = 1) -> Value:
    """Return gates, beside each other along the channels."""
    states = call.results[0].dims[1]
    return windowed(call, value, 1, first * states, count * states)


def rnn_cell(alg: str) -> Importer:
    """Return the importer of a vanilla cell with this function."""

    def cell(call: Call) -> Value | None:
        products = _products(call)
        return None if products is None else _of(call, alg, _of(call, "add", *products))

    return cell


def lstm_cell(call: Call) -> tuple[Value, Value] | None:
    """Import a cell of an LSTM: its gates are input, forget, cell, output."""
    products = _products(call)
    if products is None:
        return None
    gates = _of(call, "add", *products)
    both = _of(call, "logistic", _gates(call, gates, 0, 2))
    kept = _of(call, "mul", _gates(call, both, 1), call["hx"][1])
    added = _of(call, "mul", _gates(call, both, 0), _of(call, "tanh", _gates(call, gates, 2)))
    cell = _of(call, "add", kept, added)
    return _of(call, "mul", _of(call, "logistic", _gates(call, gates, 3)), _of(call, "tanh", cell)), cell


def gru_cell(call: Call) -> Value | None:
    """Import a cell of a GRU: its gates are reset, update, new."""
    products = _products(call)
    if products is None:
        return None
    src, state = products
    both = _of(call, "logistic", _of(call, "add", _gates(call, src, 0, 2), _gates(call, state, 0, 2)))
    new = _of(call, "mul", _gates(call, both, 0), _gates(call, state, 2))
    new = _of(call, "tanh", _of(call, "add", new, _gates(call, src, 2)))
    return _of(call, "add", _of(call, "mul", _of(call, "sub", call["hx"], new), _gates(call, both, 1)), new)
