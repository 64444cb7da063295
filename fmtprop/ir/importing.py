"""Interface between a frontend and an op's importer: one normalised call of the source framework.

Importers are plain functions ``(call) -> Value | tuple of Value | None``; they never import a framework. ``None``
declines the call, which then runs unchanged on the reference target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fmtprop.ir.node import Attrs, Value
from fmtprop.ir.types import TensorType


class Call(Protocol):
    """One call in the source program."""

    #: overload name, such as ``"aten.conv2d.default"``
    target: str
    #: every argument by its schema name, including defaults. Graph tensors are :class:`Value`, lists of tensors are
    #: lists of Value, other arguments plain Python (ints, floats, bools, strings, None, lists). Known dtypes are
    #: :class:`~fmtprop.layout.DataType`.
    args: Mapping[str, Any]
    results: tuple[TensorType, ...]
    #: indices of the results that are read
    used: frozenset[int]

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its schema name."""

    def type(self, value: Value) -> TensorType:
        """Return the logical type of a value."""

    def unrounded(self, value: Value) -> Value:
        """Return the f32 value of which a value is the conversion, or the value itself."""

    def emit(self, op: str, inputs: Mapping[str, Value | None], attrs: Attrs) -> Value:
        """Add a node (absent operands are None), infer its type and return its first result."""

    def scalar(self, value: Value) -> float | None:
        """Return the number of a one-element constant, else None."""

    def constant(self, data: Any, dtype: str = "f32") -> Value:
        """Add a small constant from nested lists or a number."""

    def tensor(self, value: Value) -> Any:
        """Return the torch tensor of a constant value, or None if the value is computed."""


Importer = Callable[[Call], "Value | tuple[Value | None, ...] | None"]
