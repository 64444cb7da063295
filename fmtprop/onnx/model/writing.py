"""An ONNX graph under construction: nodes, constants, names and types of values.

Owns the form of the written graph. The nodes of an op come from its declaration (:class:`fmtprop.ir.exporting.Onnx`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx
import torch
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.onnx.model.elements import array_of, number_of

#: opset of the written nodes: the first in which the operators of all declarations take all floats
OPSET: Final = 22


class GraphWriter:
    """The nodes and constants of a graph, in order. Implements :class:`fmtprop.ir.exporting.Writing`."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self._types: dict[str, TensorType] = {}
        self._taken: set[str] = set()
        self._numbers: dict[tuple[Any, ...], str] = {}
        #: source of each value that is a reshape
        self._reshaped: dict[str, str] = {}
        #: source and order of axes of each value that is a transposition
        self._transposed: dict[str, tuple[str, Sequence[int]]] = {}
        self._casts: dict[tuple[str, DataType], str] = {}
        #: name and data type of the node that is being written
        self.stem = ""
        self.dtype = DataType.F32

    def fresh(self, wanted: str) -> str:
        """Return a name that no other value has."""
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}.{number}"
        self._taken.add(name)
        return name

    def declare(self, value: str, type_: TensorType) -> None:
        """Record the type of a value."""
        self._taken.add(value)
        self._types[value] = type_

    def __call__(self, op_type: str, *inputs: str | None, **attributes: Any) -> str:
        """Add a node of the domain ``ai.onnx`` and return its result."""
        result = self.fresh(f"{self.stem}/{op_type}")
        given = [name or "" for name in inputs]
        while given and not given[-1]:
            given.pop()
        named = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, given, [result], name=result, **named))
        return result

    def append(self, node: onnx.NodeProto) -> None:
        """Add a finished node."""
        self.nodes.append(node)

    def type(self, value: str) -> TensorType:
        """Return the type of an operand."""
        return self._types[value]

    def constant(self, numbers: Any, dtype: str | None = None) -> str:
        """Return a constant of a number or nested lists; equal constants are added once."""
        wanted = self.dtype if dtype is None else DataType.from_any(dtype)
        key = (wanted, repr(numbers))
        if key not in self._numbers:
            name = self.fresh(f"constant_{len(self._numbers)}")
            self.weights(name, torch.tensor(numbers, dtype=torch_dtype(wanted), device="cpu"))
            self._numbers[key] = name
        return self._numbers[key]

    def weights(self, name: str, tensor: torch.Tensor) -> None:
        """Add a constant under its own name."""
        proto = numpy_helper.from_array(array_of(tensor.contiguous()), name)
        self.constants[name] = proto
        self.declare(name, tensor_type(tensor))

    def reshaped(self, value: str, dims: tuple[int, ...]) -> str:
        """Return the value with other dimensions; the value itself if it has them already."""
        source = self._reshaped.get(value, value)
        if self._types.get(source) is not None and self._types[source].dims == dims:
            return source
        result = self("Reshape", source, self.constant(list(dims), "s64"), allowzero=int(0 in dims) or None)
        self._reshaped[result] = source
        return result

    def transposed(self, value: str, order: Sequence[int]) -> str:
        """Return the value with its axes in another order; its source if that has this order."""
        source, before = self._transposed.get(value, (value, range(len(order))))
        whole = tuple(before[axis] for axis in order)
        if whole == tuple(range(len(order))):
            return source
        result = self("Transpose", source, perm=list(whole))
        self._transposed[result] = source, whole
        return result

    def cast(self, value: str, dtype: str) -> str:
        """Return the value in a data type; the value itself if it has it already."""
        wanted, type_ = DataType.from_any(dtype), self._types.get(value)
        if type_ is not None and type_.dtype is wanted:
            return value
        if (value, wanted) not in self._casts:
            result = self("Cast", value, to=number_of(torch_dtype(wanted)))
            if type_ is not None:
                self._types[result] = type_.with_dtype(wanted)
            self._casts[value, wanted] = result
        return self._casts[value, wanted]

    def rename(self, value: str, name: str, first: int) -> None:
        """Give a value another name in all nodes from the first on."""
        for node in self.nodes[first:]:
            for part in (node.input, node.output):
                for index, old in enumerate(part):
                    part[index] = name if old == value else old
        if value in self._reshaped:
            self._reshaped[name] = self._reshaped.pop(value)
        if value in self._transposed:
            self._transposed[name] = self._transposed.pop(value)
        self._casts = {key: name if made == value else made for key, made in self._casts.items()}

    def drop_dead(self, wanted: set[str]) -> None:
        """Remove nodes and constants that nothing reads."""
        kept = []
        for node in reversed(self.nodes):
            if wanted & set(node.output):
                kept.append(node)
                wanted |= set(read_by(node))
        self.nodes = kept[::-1]
        self.constants = {name: proto for name, proto in self.constants.items() if name in wanted}


def read_by(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node reads, those that its subgraphs read included."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            names |= {name for inner in attribute.g.node for name in read_by(inner)}
    return names - {""}


def note(proto: Any, facts: Mapping[str, str]) -> None:
    """Add metadata to a node, a value or a graph."""
    for key, value in facts.items():
        if value:
            proto.metadata_props.add(key=f"fmtprop.{key}", value=value)
