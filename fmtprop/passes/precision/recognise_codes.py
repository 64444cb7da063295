"""Products with a matrix that constants decode, such as those of torchao, GPTQ, AWQ and ONNX's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Dequantize, FakeQuantize, InnerProduct, MatMul, Reorder, emit
from fmtprop.ops.evaluate import evaluate_node
from fmtprop.ops.host_call import host_call
from fmtprop.ops.matmul_nbits import MatMulNBits, packed, row_blocks
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import constant, new_constant, shown
from fmtprop.passes.precision.compress_weights import LEAST_SIZE, multiply_codes

#: codes that a kernel decodes together: a group has a multiple of them
_UNIT = 32

#: a decoded number differs from the affine function of its code by at most so much of the largest one: roundings of f32
_TOLERANCE = 2.0**-20

#: codes of larger magnitude have no 8 bits, whatever is subtracted from them
_MOST = 2.0**15 - 1

#: a zero point so near to an integer is one
_NEARLY = 1e-3


class _Coded(NamedTuple):
    """A matrix [outputs, depth] of integers, and the scales and zero points of its groups [outputs, depth / group]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    group: int
    order: torch.Tensor | None


@dataclass(frozen=True)
class RecogniseCodes(NodePass):
    """Let products read the codes from which constants make their matrix.

    How a library stores and decodes its codes does not matter: the integers that become floating numbers on the way to
    the matrix are the codes, and the rest of the way is evaluated for two other codes. It must be the same affine
    function for the neighbours of a group. So a matrix is computed in f32, whatever the types of the library's steps
    are. If groups have their members anywhere in a row (GPTQ's ``g_idx``), the columns are sorted by groups, and so are
    those of src.

    Requires a well-formed graph before constants are folded. Ensures that no product of numbers that lie on no grid
    reads a large matrix decoded from codes in groups of whole units.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if not _may_read_codes(graph, node) or _is_fixed(graph, graph.inputs(node.name)["src"]):
            return
        matrix = graph.inputs(node.name)["weights"]
        way = _Way.to(graph, matrix)
        coded = None if way is None else way.coded(turned=isinstance(node.attrs, MatMul))
        found = None if coded is None else packed(coded.codes, coded.zero_points)
        if coded is None or found is None:
            return
        bits, codes, zero_points = found
        given = {"weights": codes, "scales": coded.scales, "zero_points": zero_points}
        made = {
            name: new_constant(graph, tensor, node, node.origin) for name, tensor in given.items() if tensor is not None
        }
        # the steps of a recurrent layer read one matrix
        for name, _ in graph.reading(matrix):
            reader = graph.node(name)
            if type(reader.attrs) is not type(node.attrs) or not _may_read_codes(graph, reader, matrix):
                continue
            inputs = {**graph.inputs(name), **made}
            if coded.order is not None:
                inputs["src"] = _sorted(graph, reader, inputs["src"], coded.order)
            multiply_codes(graph, reader, inputs, MatMulNBits(bits, coded.group))


def _may_read_codes(graph: Graph, node: Node, matrix: Value | None = None) -> bool:
    """Return whether a node is a product of numbers that are not quantized with a large matrix, such as a given one."""
    if not isinstance(node.attrs, InnerProduct | MatMul):
        return False
    inputs = graph.inputs(node.name)
    weights, src = graph.type_of(inputs["weights"]), graph.type_of(inputs["src"])
    if weights.ndim != 2 or weights.size < LEAST_SIZE or src.ndim < 2 or not src.dtype.is_floating:
        return False
    # two quantized operands are a product of bytes
    return matrix in (None, inputs["weights"]) and not isinstance(
        shown(graph, inputs["src"]).attrs, Dequantize | FakeQuantize
    )


def _is_fixed(graph: Graph, value: Value) -> bool:
    """Return whether a value depends on no input: a product of it is a constant, such as the sums of a zero point."""
    names = {value.node, *graph.ancestors(value.node)}
    return not any(graph.node(name).op == "input" for name in names)


class _Way:
    """The nodes by which constants make a matrix, in order."""

    def __init__(self, graph: Graph, matrix: Value, nodes: Sequence[Node]) -> None:
        self._graph, self._matrix, self._nodes = graph, matrix, nodes

    @classmethod
    def to(cls, graph: Graph, matrix: Value) -> _Way | None:
        """Return the way; None if the matrix is a constant itself, or depends on an input."""
        if graph.node(matrix.node).is_boundary:
            return None
        names = {matrix.node, *graph.ancestors(matrix.node)}
        nodes = graph.nodes(names)
        return None if any(node.op == "input" for node in nodes) else cls(graph, matrix, nodes)

    def coded(self, *, turned: bool) -> _Coded | None:
        """Return the codes; None if there are none. A matrix is [depth, outputs] where it is turned."""
        for value in self._integers():
            codes = self._evaluated(value, {})

            def decoded(numbers: torch.Tensor, at: Value = value) -> torch.Tensor:
                made = self._evaluated(self._matrix, {at: numbers})
                return made.t() if turned else made

            largest = int(codes.amax())
            if largest == 0:
                continue
            shift = decoded(torch.zeros_like(codes))
            # the scale by the largest code: the difference of two numbers has their errors
            groups = _Groups.of((decoded(torch.full_like(codes, largest)) - shift).div_(largest), shift)
            del shift
            found = None if groups is None else groups.coded(decoded(codes))
            if found is not None:
                return found
        return None

    def _integers(self) -> Iterator[Value]:
        """Yield the integers that become as many floating numbers as the matrix has."""
        size = self._graph.type_of(self._matrix).size
        for node in self._nodes:
            if node.op == "constant" or not node.results[0].dtype.is_floating:
                continue
            for value in self._graph.inputs(node.name).values():
                type_ = self._graph.type_of(value)
                if type_.size == size and not (type_.dtype.is_floating or type_.dtype is DataType.BOOLEAN):
                    yield value

    def _evaluated(self, wanted: Value, given: Mapping[Value, torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the way, in f32, with others in place of some; each is dropped after its last reader."""
        tensors, inputs = dict(given), {node.name: self._graph.inputs(node.name) for node in self._nodes}
        last = {value: node.name for node in self._nodes for value in inputs[node.name].values()}
        for node in self._nodes:
            first = Value(node.name)
            if first in given:
                continue
            if node.op == "constant":
                tensor = constant(self._graph, first)
                assert tensor is not None
                results: Sequence[torch.Tensor] = (tensor,)
            else:
                operands = {name: tensors[value] for name, value in inputs[node.name].items()}
                rounds = isinstance(node.attrs, Reorder) and node.results[0].dtype.is_floating
                results = (operands["src"],) if rounds else evaluate_node(node, operands)
            floats = (one.float() if one.is_floating_point() else one for one in results)
            tensors.update({Value(node.name, index): one for index, one in enumerate(floats)})
            if wanted in tensors:
                return tensors[wanted]
            for value in inputs[node.name].values():
                if last[value] == node.name:
                    del tensors[value]
        raise AssertionError(wanted)


@dataclass(frozen=True)
class _Groups:
    """Groups of neighbours, whose numbers are `scales` times codes plus `shift`, both [outputs, depth / group]."""

    scales: torch.Tensor
    shift: torch.Tensor
    group: int
    #: an order of columns in which the members of a group are neighbours
    order: torch.Tensor | None

    @classmethod
    def of(cls, scales: torch.Tensor, shift: torch.Tensor) -> _Groups | None:
        """Return the groups of whole units in which scales and shifts [outputs, depth] are equal; None without any."""
        order, group = None, _group(scales, shift)
        if group % _UNIT and (order := _by_groups(scales, shift)) is not None:
            scales, shift = (one.index_select(1, order) for one in (scales, shift))
            group = _group(scales, shift)
        if group % _UNIT:
            return None
        return cls(scales[:, ::group].contiguous(), shift[:, ::group].contiguous(), group, order)

    def coded(self, numbers: torch.Tensor) -> _Coded | None:
        """Return what numbers [outputs, depth] are; None if they are no codes."""
        codes = torch.empty(numbers.shape, dtype=torch.int16)
        for block in row_blocks(*numbers.shape):
            rows = numbers[block] if self.order is None else numbers[block].index_select(1, self.order)
            found = self._codes(rows, self.scales[block].unsqueeze(-1), self.shift[block].unsqueeze(-1))
            if found is None:
                return None
            codes[block] = found
        zero_points = -self.shift / torch.where(self.scales == 0, 1.0, self.scales)
        whole = zero_points.round()
        zero_points = torch.where((zero_points - whole).abs() < _NEARLY, whole, zero_points)
        return _Coded(codes, self.scales, zero_points, self.group, self.order)

    def _codes(self, rows: torch.Tensor, scales: torch.Tensor, shift: torch.Tensor) -> torch.Tensor | None:
        numbers = rows.reshape(len(rows), -1, self.group)
        codes = ((numbers - shift) / torch.where(scales == 0, 1.0, scales)).round_()
        largest = numbers.abs().amax(-1, keepdim=True).maximum(shift.abs())
        near = (codes * scales + shift - numbers).abs_() <= _TOLERANCE * largest
        # NaN and infinities neither
        return codes.flatten(1) if bool((near & (codes.abs() <= _MOST)).all()) else None


def _group(*tensors: torch.Tensor) -> int:
    """Return the largest size of groups of neighbours in which all numbers of each row are equal."""
    changed = [(one[:, 1:] != one[:, :-1]).any(0) for one in tensors]
    places = torch.stack(changed).any(0).nonzero().flatten() + 1
    return gcd(tensors[0].shape[1], *places.tolist())


def _by_groups(*tensors: torch.Tensor) -> torch.Tensor | None:
    """Return an order of columns in which equal ones are neighbours; None if few are equal."""
    columns = torch.cat(tensors).t().contiguous()
    _, member = torch.unique(columns, dim=0, return_inverse=True)
    sizes = torch.bincount(member)
    return member.argsort(stable=True) if bool((sizes % _UNIT == 0).all()) else None


def _sorted(graph: Graph, before: Node, src: Value, order: torch.Tensor) -> Value:
    """Return src with its columns in another order."""
    places = new_constant(graph, order, before, before.origin)
    last = graph.type_of(src).ndim - 1
    attrs, operands = host_call("aten.index_select.default", {"self": src, "dim": last, "index": places})
    return emit(graph, "aten", operands, attrs, origin=before.origin, before=before.name)
