"""Inputs that decide which nodes run: the scalars behind the conditions of branches and the lengths of loops.

Must not know plans: a caller fixes the values of these inputs, and then only the branches that are taken are traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fmtprop.onnx.model.steps import Body, NodeStep

if TYPE_CHECKING:
    from fmtprop.onnx.model.program import OnnxProgram

#: operators that run subgraphs, and how many of their first operands decide what runs
_DECIDED = {"If": 1, "Loop": 2}


def deciding_inputs(program: OnnxProgram) -> tuple[str, ...]:
    """Return the names of the scalar inputs, of whole numbers or booleans, on which branches and loops depend."""
    sources: dict[str, list[str]] = {}
    waiting: list[str] = []
    for step in _steps(program.body):
        read = list(_read(step))
        sources |= dict.fromkeys(step.outputs, read)
        sources |= {name: read for body in _bodies(step) for name in body.inputs}
        if not step.domain:
            waiting += step.inputs[: _DECIDED.get(step.op, 0)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources.get(name, [])
    return tuple(info.name for info in program.inputs if info.name in found and _is_scalar(info.type))


def _steps(body: Body) -> Iterator[NodeStep]:
    for step in body.steps:
        yield step
        for inner in _bodies(step):
            yield from _steps(inner)


def _read(step: NodeStep) -> Iterator[str]:
    """Yield the names that a step and its subgraphs read."""
    yield from step.inputs
    for inner in _bodies(step):
        yield from inner.outputs
        for one in inner.steps:
            yield from _read(one)


def _bodies(step: NodeStep) -> Iterator[Body]:
    return (value for value in step.attributes.values() if isinstance(value, Body))


def _is_scalar(type_: object) -> bool:
    from onnx import TensorProto

    tensor = type_.tensor_type  # type: ignore[attr-defined]
    whole = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
    dims = tensor.shape.dim
    return tensor.HasField("shape") and tensor.elem_type in whole and all(dim.dim_value == 1 for dim in dims)
