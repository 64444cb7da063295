"""Branches and loops: the import unrolls them; a model that runs node by node runs them directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fmtprop.onnx.model import limits
from fmtprop.onnx.model.elements import torch_dtype
from fmtprop.onnx.model.operators.values import DataDependentError, axis_of, flag, integer, is_known, known

#: a function that runs a subgraph on its arguments, in the scope of its node
_Run = Callable[[Any, Sequence[Any]], "list[Any]"]


def _if(condition: Tensor, *, then_branch: Any, else_branch: Any, run: _Run) -> Any:
    if is_known(condition):
        return tuple(run(then_branch if flag(condition, "cond") else else_branch, []))
    # neither branch does anything but compute, so both may run; the walk refuses nodes that could fail in one of them
    pairs = list(zip(run(then_branch, []), run(else_branch, []), strict=True))
    for one, other in pairs:
        same = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        if not same or one.dtype != other.dtype:
            raise DataDependentError("the branch that is taken, and with it the shape of a result,")
    return tuple(torch.where(condition.reshape(()), one, other) for one, other in pairs)


def _loop(
    trips: Tensor | None = None, condition: Tensor | None = None, *carried: Any, body: Any, run: _Run, wanted: int
) -> Any:
    most = None if trips is None else integer(trips, "M, the trip count,")
    alive = condition is None or flag(condition, "cond")
    state, rows, count = list(carried), list[list[Any]](), 0
    kept_nbytes = 0
    scanned = len(body.outputs) - 1 - len(state)
    while alive and (most is None or count < most):
        going, *results = run(body, [known(count), known(True), *state])
        state, row = results[: len(state)], results[len(state) :]
        rows.append(row)
        kept_nbytes += _nbytes(row)
        count += 1
        if kept_nbytes + _nbytes(state) > limits.LOOP_NBYTES:
            raise ValueError(
                f"after {count} rounds its state and rows have {kept_nbytes + _nbytes(state)} bytes; they may have "
                f"{limits.LOOP_NBYTES}"
            )
        alive = flag(going, "cond, whether the loop goes on,")
    if not rows:
        return (*state, *map(_no_rows, body.output_types[len(body.output_types) - scanned :]))
    return (*state, *(torch.stack(column) for column in zip(*rows, strict=True)))


def _no_rows(type_: Any) -> Tensor:
    """Return the rows of a loop without iterations: of the declared shape, with 0 elements on unknown axes."""
    tensor = type_.tensor_type
    if not tensor.HasField("shape"):
        raise NotImplementedError("a loop that collects rows, but has no iterations to give their shape,")
    dims = [dim.dim_value for dim in tensor.shape.dim]
    return torch.empty([0, *dims], dtype=torch_dtype(tensor.elem_type, "a row of the loop"))


def _nbytes(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _scan(
    *values: Any,
    body: Any,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] | None = None,
    scan_input_directions: Sequence[int] | None = None,
    scan_output_axes: Sequence[int] | None = None,
    scan_output_directions: Sequence[int] | None = None,
    run: _Run,
) -> Any:
    first = len(values) - num_scan_inputs
    if not 0 <= first < len(values):
        raise ValueError(f"num_scan_inputs is {num_scan_inputs}, but there are {len(values)} inputs")
    state, sources = list(values[:first]), values[first:]
    axes = [axis_of(a, s.ndim) for a, s in zip(scan_input_axes or [0] * len(sources), sources, strict=True)]
    lengths = {source.shape[axis] for source, axis in zip(sources, axes, strict=True)}
    if len(lengths) != 1:
        raise ValueError(f"scan inputs have {sorted(lengths)} elements along their axes; all must have as many")
    turned = scan_input_directions or [0] * len(sources)
    rows: list[list[Any]] = []
    length = lengths.pop()
    for step in range(length):
        places = [length - 1 - step if back else step for back in turned]
        parts = [s.select(axis, place) for s, axis, place in zip(sources, axes, places, strict=True)]
        results = run(body, [*state, *parts])
        state = results[:first]
        rows.append(results[first:])
    outputs = []
    if not rows:
        empty = list(map(_no_rows, body.output_types[first:]))
        ends = scan_output_axes or [0] * len(empty)
        return (*state, *(part.movedim(0, to) for part, to in zip(empty, ends, strict=True)))
    for number, column in enumerate(zip(*rows, strict=True)):
        back = (scan_output_directions or [0] * len(column))[number] if scan_output_directions else 0
        axis = scan_output_axes[number] if scan_output_axes else 0
        outputs.append(torch.stack(column[::-1] if back else column, axis))
    return (*state, *outputs)


def _scan_8(
    lengths: Tensor | None, *values: Any, body: Any, num_scan_inputs: int, directions: Any = None, run: _Run
) -> Any:
    """Scan each row of a batch: the operator's first definition."""
    if lengths is not None:
        raise NotImplementedError("sequences of different lengths")

    def row(place: int) -> Any:
        sources = (value[place] for value in values)
        return _scan(*sources, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, run=run)

    rows = [row(place) for place in range(values[0].shape[0])]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


OPERATORS: Final[dict[str, Callable[..., Any]]] = {"If": _if, "Loop": _loop, "Scan": _scan_8, "Scan-9": _scan}
