"""ATen calls for importers: one normalised call, and the types of its tensors.

This module owns the torch side of :class:`fmtprop.ir.importing.Call`. It must not know fx or how calls are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fmtprop.errors import GraphError, ImportModelError, ShapeError
from fmtprop.ir import Attrs, Graph, TensorType, Value, tensors
from fmtprop.ir.tensors import materialise, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops import emit
from fmtprop.ops.pytorch import OpOverload

#: data types of constants that importers may read as numbers
_SCALAR_DTYPES = frozenset({DataType.F32, DataType.F64, DataType.BF16, DataType.F16, DataType.S32, DataType.S64})

#: what it means to the user that a check of the model's is left out
UNCHECKED = "inputs that it would refuse raise no error"


def tensor_type(value: Any, label: str | Callable[[], str]) -> TensorType:
    """Return the logical type of a torch tensor, real or fake.

    `label`: description in messages: ``"input x"``, or a function that makes it.

    A complex tensor has the type of its parts.
    """
    try:
        if isinstance(value, torch.Tensor):
            return tensors.tensor_type(parts_of(value) if value.dtype.is_complex else value)
        problem = f"its value is a {type(value).__name__}, only tensors can be in a graph"
    except GraphError as error:
        problem = str(error)
    except ShapeError:
        axis, size = next((axis, size) for axis, size in enumerate(value.shape) if not isinstance(size, int))
        problem = (
            f"the size of axis {axis} is not a number ({size}); shapes must be static: export without dynamic_shapes, "
            "and avoid ops whose result's shape depends on values (nonzero, x[mask], unique), or call "
            'torch.compile(model, backend="fmtprop"), which leaves them to PyTorch'
        )
    raise ImportModelError(f"{label if isinstance(label, str) else label()}: {problem}")


def check_real(value: Any, label: str) -> None:
    """Refuse a complex tensor as an input or output of the model."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        raise ImportModelError(
            f"{label} is {value.dtype}; inputs and outputs are real: pass torch.view_as_real of it, and call "
            "torch.view_as_complex on the other side"
        )


def parts_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's form in a graph: a complex tensor becomes its parts, along one more axis."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


# ---------------------------------------------------------------- one call


@cache
def _arguments(target: OpOverload) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Return the names of arguments by position, and all with their defaults: PyTorch makes new objects of them."""
    arguments = target._schema.arguments
    by_position = tuple(at.name for at in arguments if not at.kwarg_only)
    return by_position, tuple((at.name, at.default_value) for at in arguments)


def by_schema(target: OpOverload, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return every argument of a call by its schema name, including defaults; None if they do not fit.

    >>> by_schema(torch.ops.aten.relu.default, [7], {}), by_schema(torch.ops.aten.relu.default, [7], {"x": 8})
    ({'self': 7}, None)
    """
    by_position, arguments = _arguments(target)
    args = dict(zip(by_position, given, strict=False))
    unplaced = len(given) - len(args)
    for name, default in arguments[len(args) :]:
        args[name] = named.get(name, default) if named else default
    return args if not unplaced and (not named or named.keys() <= args.keys()) else None


@dataclass
class TorchCall:
    """A normalised call, the argument of importers (:class:`fmtprop.ir.importing.Call`)."""

    graph: Graph
    target: str
    #: every argument by its schema name
    args: Mapping[str, Any]
    results: tuple[TensorType, ...]
    origin: str = ""
    #: indices of the results that are read
    used: frozenset[int] = frozenset({0})

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its schema name."""
        return self.args[name]

    def type(self, value: Value) -> TensorType:
        """Return the logical type of a value."""
        return self.graph.type_of(value)

    def unrounded(self, value: Value) -> Value:
        """Return the f32 value of which a value is the conversion, or the value itself."""
        if self.graph.node(value.node).op != "reorder":
            return value
        src = self.graph.inputs(value.node)["src"]
        return src if self.type(src).dtype is DataType.F32 else value

    def emit(self, op: str, inputs: Mapping[str, Value | None], attrs: Attrs) -> Value:
        """Add a node, infer its type and return its first result."""
        return emit(self.graph, op, inputs, attrs, origin=self.origin)

    def scalar(self, value: Value) -> float | None:
        """Return the number of a one-element constant, else None."""
        type_ = self.type(value)
        if type_.size != 1 or type_.dtype not in _SCALAR_DTYPES:
            return None
        tensor = self.tensor(value)
        return None if tensor is None else float(tensor.item())

    def constant(self, data: Any, dtype: str = "f32") -> Value:
        """Add a small constant from nested lists or a number."""
        tensor = torch.tensor(data, dtype=torch_dtype(DataType(dtype)))
        return add_constant(self.graph, tensor, self.origin)

    def tensor(self, value: Value) -> torch.Tensor | None:
        """Return the torch tensor of a constant value, or None if the value is computed."""
        data = self.graph.constants.get(value.node)
        return None if data is None else materialise(data, self.type(value))


def add_constant(graph: Graph, tensor: torch.Tensor, origin: str) -> Value:
    """Add a tensor that the program makes itself, or its parts, under a numbered name."""
    type_ = tensor_type(tensor, "constant")
    return graph.constant(graph.fresh_name("constant"), type_, parts_of(tensor.detach()).contiguous(), origin=origin)
