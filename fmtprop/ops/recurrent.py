"""Recurrent layers: oneDNN's vanilla RNN, LSTM and GRU, one layer of one or two directions per node.

PyTorch's GRU is oneDNN's linear-before-reset one, with other places of the gates.

A cell, one step of a sequence, is products and element-wise functions: oneDNN's recurrent layers take longer for one
step, 20 us for a small cell, since they serve whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, Any

import torch

from fmtprop.errors import ShapeError, UnsupportedOpError
from fmtprop.ir import Attrs, Call, Importer, Linear, TensorType, Value
from fmtprop.ir.facets import Numbers
from fmtprop.ir.op import Category, Lowering, NativeAttr, Natives, OpDef, Operand, Primitive, Sample
from fmtprop.layout import DataType
from fmtprop.ops.arguments import computable
from fmtprop.ops.binary import Binary
from fmtprop.ops.building import primitive_of
from fmtprop.ops.concat import Concat
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.view_attrs import expanded, permuted, reshaped, windowed

if TYPE_CHECKING:
    from fmtprop.ir.importing import Importer


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


# ---------------------------------------------------------------- attributes


@dataclass(frozen=True)
class Recurrent(Attrs):
    """Attributes of a recurrent layer.

    oneDNN developer guide, "RNN".
    """

    #: whether a second direction goes through the sequence from its end; its results follow the first one's along the
    #: channels
    bidirectional: bool = False
    #: ``"tanh"`` or ``"relu"``: the function of a vanilla RNN. The other kinds have their own.
    activation: str = "tanh"

    def __post_init__(self) -> None:
        if self.activation not in ("tanh", "relu"):
            raise ShapeError(f"activation of a recurrent layer is {self.activation!r}; it must be 'tanh' or 'relu'")

    @property
    def directions(self) -> int:
        """Number of directions."""
        return 2 if self.bidirectional else 1


# ---------------------------------------------------------------- meaning


@dataclass(frozen=True)
class Kind:
    """A kind of layer."""

    #: `name`, `problem`: oneDNN's name, and the class of :mod:`fmtprop.dnnl`
    name: str
    problem: str
    #: for each gate of oneDNN's weights, its place in PyTorch's. PyTorch has them in this order, too, or two swapped:
    #: so the same order leads back.
    gates: tuple[int, ...]
    biases: int
    #: operands and results with a state of the layer, without ``src_`` and ``dst_``
    states: tuple[str, ...] = ("iter",)
    #: whether plans in a narrower type have it in f32
    stays_wide: bool = False

    def infer(self, attrs: Recurrent, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
        """Return the types of dst_layer, (T, N, directions x H), and of the states, (1, directions, N, H)."""
        src, weights = types["src_layer"], types["weights_iter"]
        if src.ndim != 3 or weights.ndim != 5:
            raise ShapeError(
                f"src_layer has {src.ndim} axes and weights_iter {weights.ndim}; they must be 3, (T, N, channels), and "
                "5, (1, directions, states, gates, states)"
            )
        (times, batch, channels), states, count = src.dims, weights.dims[-1], attrs.directions
        state = (1, count, batch, states)
        expected = {
            "weights_layer": (1, count, channels, len(self.gates), states),
            "weights_iter": (1, count, states, len(self.gates), states),
            "bias": (1, count, self.biases, states),
            **{f"src_{name}": state for name in self.states},
        }
        for name, dims in expected.items():
            if types[name].dims != dims:
                raise ShapeError(f"{name} has dims {types[name].dims} but this {self.name} needs {dims}")
        return (
            src.with_dims((times, batch, count * states)),
            *(types[f"src_{name}"].with_dims(state) for name in self.states),
        )

    def reference(self, attrs: Recurrent, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Evaluate by PyTorch's layer, bf16 and f16 in f32."""
        dtype = torch.promote_types(tensors["src_layer"].dtype, torch.float32)
        wide = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        src = wide["src_layer"]
        parameters: list[torch.Tensor] = []
        for direction in range(attrs.directions):
            for name in ("weights_layer", "weights_iter"):
                weights = wide[name][0, direction].permute(1, 2, 0)[list(self.gates)]
                parameters.append(weights.flatten(0, 1).contiguous())
            bias = wide["bias"][0, direction]
            rest = torch.zeros_like(bias[: len(self.gates)])
            if self.biases > len(self.gates):
                rest[-1] = bias[-1]
            order = list(self.gates)
            parameters += [bias[order].flatten(), rest[order].flatten()]
        states = [wide[f"src_{name}"][0].contiguous() for name in self.states]
        how = True, 1, 0.0, False, attrs.bidirectional, False
        results: Any
        if self.name == "lstm":
            results = torch.lstm(src.contiguous(), states, parameters, *how)
        else:
            function = torch.gru if self.name == "lbr_gru" else _VANILLA[attrs.activation]
            results = function(src.contiguous(), states[0], parameters, *how)
        dst, *after = results
        return (
            dst.to(tensors["src_layer"].dtype),
            *(state[None].to(tensors[f"src_{name}"].dtype) for state, name in zip(after, self.states, strict=True)),
        )

    def samples(self) -> Iterable[Sample]:
        """Yield layers of one and two directions, with one and several sequences."""
        yield Sample("one", Recurrent(), self.problem_types(5, 1, 8, 16, 1))
        yield Sample("odd", Recurrent(), self.problem_types(3, 4, 7, 5, 1))
        yield Sample("both_directions", Recurrent(bidirectional=True), self.problem_types(4, 3, 6, 10, 2))

    def problem_types(
        self, times: int, batch: int, channels: int, states: int, directions: int
    ) -> dict[str, TensorType]:
        """Return the types of the operands of a layer."""
        gates = len(self.gates)
        return {
            "src_layer": TensorType((times, batch, channels)),
            **{f"src_{name}": TensorType((1, directions, batch, states)) for name in self.states},
            "weights_layer": TensorType((1, directions, channels, gates, states)),
            "weights_iter": TensorType((1, directions, states, gates, states)),
            "bias": TensorType((1, directions, self.biases, states)),
        }


_VANILLA: Mapping[str, Callable[..., Any]] = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}
_RNN = Kind("vanilla_rnn", "VanillaRnn", (0,), 1)
_LSTM = Kind("lstm", "Lstm", (0, 1, 2, 3), 4, ("iter", "iter_c"))
#: oneDNN's code for bf16 writes outside of its memory (:mod:`fmtprop.targets.known_bad`), and PyTorch's takes long
_GRU = Kind("lbr_gru", "LbrGru", (1, 0, 2), 4, stays_wide=True)

#: the kinds by oneDNN's names
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (_RNN, _LSTM, _GRU)}


def products(src: tuple[int, ...], weights: tuple[int, ...], dst: tuple[int, ...]) -> float:
    """Return the products of a layer, from the dims of src_layer and weights_layer."""
    _, directions, channels, gates, states = weights
    return float(src[0] * src[1] * directions * gates * states * (channels + states))


def loses(attrs: Recurrent) -> frozenset[str]:
    """Return the special values that a layer loses."""
    return frozenset({"nan", "inf"}) if attrs.activation == "relu" else frozenset()


def check_factor(operand: str, dims: tuple[int, ...]) -> float:
    """Return a factor for the numbers of a check: the state's products shrink, and activations do not saturate."""
    if operand == "weights_iter":
        return 2.0 ** -ceil(log2(2 * dims[2]))
    return 2.0 ** -ceil(log2(dims[2]) / 2) if operand == "weights_layer" else 1.0


def fields_of(attrs: Recurrent) -> Mapping[str, Any]:
    """Return the fields of oneDNN's problem that are no tensors."""
    return {
        "direction": "bidirectional_concat" if attrs.bidirectional else "unidirectional_left2right",
        "activation": f"eltwise_{attrs.activation}",
    }


def check_types(descs: Natives) -> None:
    """Refuse f16: oneDNN's recurrent layers in this type are not tested."""
    if any(desc.data_type == DataType.F16.value for desc in descs.values()):
        raise UnsupportedOpError("a recurrent layer runs in f32 or bf16")


def operand(name: str) -> Operand:
    """Return the declaration of an operand or a result; cell states and gradients stay f32."""
    wide = name.endswith("_iter_c") or name.startswith("diff_")
    return Operand(name, name.upper(), parameter="weights" in name or "bias" in name, wide=wide)


def _primitive(kind: Kind) -> Primitive:
    lower = primitive_of(kind.problem, fields_of)

    def primitive(attrs: Recurrent, descs: Natives, attr: NativeAttr) -> Lowering:
        check_types(descs)
        return lower(attrs, descs, attr)

    return primitive


# ---------------------------------------------------------------- importers


@dataclass(frozen=True)
class _Import:
    """Importer of a call of PyTorch: its layers become a chain of nodes."""

    kind: Kind
    activation: str = "tanh"

    def __call__(self, call: Call) -> tuple[Value | None, ...] | None:
        """Return the sequence, and the states after it if they are read."""
        first = call["hx"]
        states = list(first) if isinstance(first, Sequence) else [first]
        layers, attrs = int(call["num_layers"]), Recurrent(bool(call["bidirectional"]), self.activation)
        tensors, count = list(call["params"]), 4 if call["has_biases"] else 2
        if len(tensors) != layers * attrs.directions * count:
            return None  # projections
        drops = call["train"] and call["dropout"] and layers > 1
        if drops or not computable(call, call["input"], *states, *tensors) or 0 in call.results[0].dims:
            return None
        src = call["input"]
        src = permuted(call, src, (1, 0, 2)) if call["batch_first"] else src
        ends: list[list[Value]] = [[] for _ in states]
        step = attrs.directions * count
        for layer in range(layers):
            directions = [tensors[at : at + count] for at in range(layer * step, (layer + 1) * step, count)]
            inputs = {"src_layer": src, **self._parameters(call, directions)}
            for name, state in zip(self.kind.states, states, strict=True):
                part = windowed(call, state, 0, layer * attrs.directions, attrs.directions)
                inputs[f"src_{name}"] = reshaped(call, part, (1, *call.type(part).dims))
            src = call.emit(self.kind.name, inputs, attrs)
            for index, found in enumerate(ends, 1):
                after = Value(src.node, index)
                found.append(reshaped(call, after, call.type(after).dims[1:]))
        results = [_joined(call, found, 0) if index in call.used else None for index, found in enumerate(ends, 1)]
        return permuted(call, src, (1, 0, 2)) if call["batch_first"] else src, *results

    def _parameters(self, call: Call, directions: Sequence[Sequence[Value]]) -> dict[str, Value]:
        gates, states = len(self.kind.gates), call.type(directions[0][1]).dims[-1]
        found = {}
        for place, name in enumerate(("weights_layer", "weights_iter")):
            rows = [
                reshaped(call, one[place], (1, gates, states, call.type(one[place]).dims[-1])) for one in directions
            ]
            weights = self._gates(call, _joined(call, rows, 0))
            channels = call.type(weights).dims[-1]
            weights = permuted(call, weights, (0, 3, 1, 2))
            found[name] = reshaped(call, weights, (1, len(directions), channels, gates, states))
        return found | {"bias": self._bias(call, directions, states)}

    def _bias(self, call: Call, directions: Sequence[Sequence[Value]], states: int) -> Value:
        gates = len(self.kind.gates)
        shape = (1, len(directions), self.kind.biases, states)
        if len(directions[0]) == 2:
            return expanded(call, call.constant([[[[0.0]]]]), shape)
        given = [
            self._gates(call, _joined(call, [reshaped(call, one[place], (1, gates, states)) for one in directions], 0))
            for place in (2, 3)
        ]
        bias = call.emit("binary", {"src_0": given[0], "src_1": given[1]}, Binary("add"))
        if self.kind.biases > gates:  # those of the new gate stay apart
            both = windowed(call, bias, 1, 0, gates - 1)
            bias = _joined(call, [both, *(windowed(call, one, 1, gates - 1, 1) for one in given)], 1)
        return reshaped(call, bias, shape)

    def _gates(self, call: Call, value: Value) -> Value:
        """Return a tensor with its gates, along axis 1, in oneDNN's order."""
        if self.kind.gates == tuple(range(len(self.kind.gates))):
            return value
        return _joined(call, [windowed(call, value, 1, gate, 1) for gate in self.kind.gates], 1)


def _joined(call: Call, parts: Sequence[Value], axis: int) -> Value:
    if len(parts) == 1:
        return parts[0]
    return call.emit("concat", {f"src_{index}": part for index, part in enumerate(parts)}, Concat(axis))


# ---------------------------------------------------------------- declarations


def _declared(kind: Kind, torch_calls: Mapping[str, Importer]) -> OpDef:
    states = (f"src_{name}" for name in kind.states)
    results = (f"dst_{name}" for name in kind.states)
    return OpDef(
        name=kind.name,
        attrs=Recurrent,
        operands=tuple(map(operand, ("src_layer", *states, "weights_layer", "weights_iter", "bias"))),
        results=tuple(map(operand, ("dst_layer", *results))),
        category=Category.COMPUTE,
        infer=kind.infer,
        reference=kind.reference,
        primitive=_primitive(kind),
        linear=Linear(products, by_columns=True, roles=("src_layer", "weights_layer", "dst_layer"), by_steps=True),
        numbers=Numbers(factor=check_factor, stays_wide=kind.stays_wide, loses=loses),
        samples=kind.samples,
        torch=torch_calls,
    )


VANILLA_RNN = _declared(
    _RNN,
    {f"aten.rnn_{activation}.input": _Import(_RNN, activation) for activation in _VANILLA}
    | {f"aten.rnn_{activation}_cell.default": rnn_cell(activation) for activation in _VANILLA},
)
LSTM = _declared(_LSTM, {"aten.lstm.input": _Import(_LSTM), "aten.lstm_cell.default": lstm_cell})
LBR_GRU = _declared(_GRU, {"aten.gru.input": _Import(_GRU), "aten.gru_cell.default": gru_cell})
