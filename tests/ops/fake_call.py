"""A Call as the frontend would hand it to an importer: normalised arguments of one ATen overload on a real graph."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

import fmtprop.ops  # noqa: F401  # fills the registry
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Value
from fmtprop.ir.op import OPSET, opdef
from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops import emit


def _function(target: str) -> Any:
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


class FakeCall:
    """One call ``target(*args, **kwargs)``; TensorType arguments become graph inputs, torch tensors constants."""

    def __init__(self, target: str, *args: Any, **kwargs: Any) -> None:
        self.target = target
        self.graph = Graph("test")
        self._inputs: list[Value] = []
        function = _function(target)
        self.results = self._results(function, args, kwargs)
        self.used = frozenset({0})
        given = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)} | kwargs
        self.args = {}
        for argument in function._schema.arguments:
            value = given.get(argument.name, argument.default_value)
            self.args[argument.name] = self._argument(value)

    def _results(self, function: Any, args: Any, kwargs: Any) -> tuple[TensorType, ...]:
        with FakeTensorMode() as mode:
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            args, kwargs = tree_map_only(
                TensorType, lambda t: torch.empty(t.dims, dtype=torch_dtype(t.dtype)), (args, kwargs)
            )
            results, _ = tree_flatten(function(*args, **kwargs))
        return tuple(map(tensor_type, results))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorType):
            value = self.graph.input(f"x{len(self._inputs)}", value)
            self._inputs.append(value)
        elif isinstance(value, torch.Tensor):
            value = self.graph.constant(self.graph.fresh_name("constant"), tensor_type(value), value)
        elif isinstance(value, torch.dtype):
            value = DataType.from_any(value)
        elif isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, (list, tuple)):
            value = [self._argument(item) for item in value]
        return value

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def type(self, value: Value) -> TensorType:
        return self.graph.type_of(value)

    def unrounded(self, value: Value) -> Value:
        return value

    def emit(self, op: str, inputs: Any, attrs: Any) -> Value:
        return emit(self.graph, op, inputs, attrs)

    def scalar(self, value: Value) -> float | None:
        data = self.graph.constants.get(value.node)
        return data.item() if data is not None and data.numel() == 1 else None

    def constant(self, data: Any, dtype: str = "f32") -> Value:
        tensor = torch.tensor(data, dtype=torch_dtype(DataType(dtype)))
        type_ = TensorType(tuple(tensor.shape), dtype)
        return self.graph.constant(self.graph.fresh_name("constant"), type_, tensor)

    def tensor(self, value: Value) -> Any:
        return self.graph.constants.get(value.node)

    def run(self) -> Any:
        """Call the importer that is registered for the target; None where there is none or it declines."""
        for declaration in OPSET.values():
            if self.target in declaration.torch:
                return declaration.torch[self.target](self)
        return None

    def ops(self) -> list[str]:
        """Return the ops that the importer added."""
        return [node.op for node in self.graph.nodes() if not node.is_boundary]

    def evaluate(self, value: Value, *inputs: torch.Tensor) -> torch.Tensor:
        """Evaluate a value of the graph by the references alone."""
        tensors = {i: t for i, t in zip(self._inputs, inputs, strict=True)}
        tensors |= {Value(name): data for name, data in self.graph.constants.items()}
        for node in self.graph.nodes():
            if not node.is_boundary:
                operands = {k: tensors[v] for k, v in self.graph.inputs(node.name).items()}
                for index, result in enumerate(opdef(node.op).reference(node.attrs, operands)):
                    tensors[Value(node.name, index)] = result
        return tensors[value]


def random_tensor(type_: TensorType, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    """Return a seeded tensor of a type."""
    generator = torch.Generator().manual_seed(7)
    data = torch.rand(type_.dims, generator=generator) * (high - low) + low
    return data.to(torch_dtype(type_.dtype))


def check_import(target: str, *args: Any, low: float = -1.0, high: float = 1.0, **kwargs: Any) -> FakeCall:
    """Import a call, evaluate what it emitted by references, and compare every result with torch's own answer.

    ``rtol`` and ``atol`` loosen the comparison; all other keywords are arguments of the call.
    """
    tolerance = {name: kwargs.pop(name) for name in ("rtol", "atol") if name in kwargs}
    call = FakeCall(target, *args, **kwargs)
    answer = call.run()
    assert answer is not None, f"{target} was declined"
    tensors = [random_tensor(call.type(v), low, high) for v in call._inputs]
    feed = iter(tensors)
    args, kwargs = tree_map_only(TensorType, lambda _: next(feed), (args, kwargs))
    expected, _ = tree_flatten(_function(target)(*args, **kwargs))
    answers = [answer] if isinstance(answer, Value) else list(answer)
    assert len(answers) == len(expected)
    for mine, theirs, type_ in zip(answers, expected, call.results, strict=True):
        if mine is None:
            continue
        assert call.type(mine) == type_
        got = call.evaluate(mine, *tensors)
        assert got.dtype == theirs.dtype
        torch.testing.assert_close(got, theirs, **tolerance)
    return call
