"""Calls without a oneDNN op: any functional overload, of PyTorch or of another library, run on plain tensors.

Owns the op ``aten``, which makes a call (:mod:`fmtprop.ops.host_call`). With it, any exportable model can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from fmtprop.errors import FmtpropError, GraphError, UnsupportedOpError
from fmtprop.ir import Call, Category, Cost, OpDef, Operand, Sample, TensorType, Value
from fmtprop.ir.facets import ByPyTorch, Numbers
from fmtprop.ir.tensors import tensor_type, torch_dtype
from fmtprop.ops import host_facts
from fmtprop.ops.building import is_native, normalised_axis
from fmtprop.ops.host_call import HostCall, host_call
from fmtprop.ops.host_operator import make_call, operator
from fmtprop.ops.pytorch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    enable_python_dispatcher,
)
from fmtprop.ops.view_attrs import permuted
from fmtprop.ops.without_data import result_of
from fmtprop.system.printable import first_line

# ---------------------------------------------------------------- meaning

_DATA_DEPENDENT = "the shape of a result depends on the data; shapes must be known before the graph runs"


def infer(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[TensorType, ...]:
    """Return the types of all results, found by running the call on tensors without data."""
    return _infer(attrs, tuple(types.items()), torch.get_default_dtype())


@lru_cache(maxsize=4096)  # of an LSTM, PyTorch walks through each of its steps: 0.2 s, and each pass is verified
def _infer(attrs: HostCall, operands: tuple[tuple[str, TensorType], ...], _: torch.dtype) -> tuple[TensorType, ...]:
    types = dict(operands)
    results = _on_meta(attrs, types)
    if results is None:
        results = _on_fakes(attrs, types)
    return tuple(_result_type(attrs.target, index, result) for index, result in enumerate(results))


def _on_meta(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...] | None:
    """Return the results of the call on the meta device; None if it does not run there as on a CPU.

    Fake tensors run more calls and give reasons, but they load PyTorch's compiler: seconds, and 60 MB.
    """
    if not types:  # its results would be on a CPU
        return None
    meta = torch.device("meta")
    tensors = {name: torch.empty(t.dims, dtype=torch_dtype(t.dtype), device=meta) for name, t in types.items()}
    try:
        results = make_call(attrs, tensors, result_of)
    except (FmtpropError, RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not all(result.device == meta for result in results):
        return None
    # statistics in bf16 have the operands' type in PyTorch's kernels for the CPU, and f32 in those for other devices
    read, made = ({t.dtype for t in of if t.is_floating_point()} for of in (tensors.values(), results))
    return None if len(made) > 1 and len(read) == 1 and torch.float32 not in read else results


def _on_fakes(attrs: HostCall, types: Mapping[str, TensorType]) -> tuple[torch.Tensor, ...]:
    """Return the results of the call on fake tensors, with the dispatcher of torch.export.

    This dispatcher prefers PyTorch's decompositions in Python, which do not read numbers; `istft` in C++ checks the sum
    of its windows.
    """
    with FakeTensorMode(), enable_python_dispatcher():
        tensors = {name: torch.empty(t.dims, dtype=torch_dtype(t.dtype)) for name, t in types.items()}
        try:
            return make_call(attrs, tensors)
        except FmtpropError:
            raise
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise UnsupportedOpError(f"{attrs.target}: {_DATA_DEPENDENT}") from error
        # Whatever a kernel's checks or its shape function may raise about the operands.
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            given = ", ".join(f"{name} {t}" for name, t in types.items())
            raise UnsupportedOpError(f"{attrs.target} does not take {given}: {first_line(error)}") from error


def _result_type(target: str, index: int, result: torch.Tensor) -> TensorType:
    if not all(isinstance(size, int) for size in result.shape):
        raise UnsupportedOpError(f"{target}: {_DATA_DEPENDENT}")
    try:
        return tensor_type(result)
    except GraphError as error:
        raise UnsupportedOpError(f"{target}: result {index}: {error}") from error


def reference(attrs: HostCall, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Make the call; results may be views of the operands."""
    return make_call(attrs, tensors)


# ---------------------------------------------------------------- importer


def make_host_call(call: Call) -> tuple[Value, ...]:
    """Add the node of an unchanged call.

    Raises UnsupportedOpError if the call changes its arguments, is random, or has an argument or a result that a graph
    cannot hold.
    """
    attrs, inputs = host_call(call.target, call.args)
    first = call.emit("aten", inputs, attrs)
    return tuple(Value(first.node, index) for index in range(len(call.results)))


def _scan(call: Call) -> Value | None:
    """Emit a scan along the last axis: along another one, PyTorch takes up to 30 times as long."""
    src, type_ = call["self"], call.type(call["self"])
    if type_.ndim < 2 or not is_native(type_):
        return None
    axis = normalised_axis(call["dim"], type_.ndim)
    order = [other for other in range(type_.ndim) if other != axis] + [axis]
    attrs, inputs = host_call(call.target, {**call.args, "self": permuted(call, src, order), "dim": type_.ndim - 1})
    scanned = call.emit("aten", inputs, attrs)
    return permuted(call, scanned, [order.index(other) for other in range(type_.ndim)])


def _places(call: Call) -> Value | None:
    """Emit the places of a maximum: for these alone, PyTorch takes up to 25 times as long along an axis of planes.

    On [1, 2, 64, 64], it takes 0.38 ms for argmax and 0.015 ms for both results of max; on [1, 21, 161, 193], 4.7 ms
    and 1.3 ms; on rows 0.9 to 1.1 times max's time in f32, 2 to 4 times in bf16 (Zen 4, one thread). On integers
    in rows it takes less than max. Both give the first of equal places, and NaN's.
    """
    if call["dim"] is None or not call.type(call["self"]).dtype.is_floating:
        return None
    name = call.target.split(".")[1].removeprefix("arg")
    attrs, inputs = host_call(f"aten.{name}.dim", call.args)
    return Value(call.emit("aten", inputs, attrs).node, 1)


def _filled_places(call: Call) -> Value | None:
    """Emit a choice between a number and the tensor: to fill the marked places, PyTorch copies the tensor first.

    On [2, 6, 128, 128] and a mask of [2, 1, 1, 128], it takes 0.19 ms to fill and 0.11 ms to choose, on a transposed
    tensor 0.32 ms and 0.16 ms (Zen 4, one thread).
    """
    src, value = call["self"], call["value"]
    type_ = call.type(src)
    if isinstance(value, Value) or not (type_.dtype.is_floating or isinstance(value, int)):
        return None
    number = call.constant(value, type_.dtype.value)
    attrs, inputs = host_call("aten.where.self", {"condition": call["mask"], "self": number, "other": src})
    return call.emit("aten", inputs, attrs)


#: Python's operators -> the same functions under names with an overload for given memory
_BITWISE = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def _bitwise(call: Call) -> Value | None:
    """Emit a function of bits by its own name: by the operator's, a step makes one more tensor, which takes 3 us."""
    _, name, overload = call.target.split(".")
    name, other = name.strip("_"), call["other"]
    types = [call.type(value).dtype for value in (call["self"], other) if isinstance(value, Value)]
    if isinstance(other, float) or any(dtype.is_floating for dtype in types):
        return None  # older PyTorch takes a shift of those for a product
    kind = "Tensor_Scalar" if name.endswith("shift") and overload == "Scalar" else overload
    attrs, inputs = host_call(f"aten.{_BITWISE[name]}.{kind}", call.args)
    return call.emit("aten", inputs, attrs)


# ---------------------------------------------------------------- samples and declaration


def samples() -> Iterable[Sample]:
    """Yield calls with one operand, a list of operands, several results and an infinite argument."""

    def sample(target: str, arguments: Mapping[str, Any], types: Mapping[str, TensorType]) -> Sample:
        attrs, _ = host_call(target, arguments)
        return Sample(target.split(".")[1], attrs, types)

    x, y = Value("x"), Value("y")
    image = TensorType((2, 17, 5, 7))
    yield sample("aten.cumsum.default", {"self": x, "dim": 1}, {"src_0": image})
    yield sample("aten.roll.default", {"self": x, "shifts": [1, 2], "dims": [2, 3]}, {"src_0": image})
    yield sample("aten.where.self", {"condition": x, "self": y, "other": y}, {
        "src_0": TensorType((3, 40), "boolean"), "src_1": TensorType((3, 40)),
    })  # fmt: skip
    yield sample("aten.topk.default", {"self": x, "k": 3}, {"src_0": TensorType((3, 40))})
    yield sample("aten.nan_to_num.default", {"self": x, "posinf": math.inf}, {"src_0": TensorType((3, 40))})


ATEN = OpDef(
    name="aten",
    attrs=HostCall,
    operands=(Operand("src", "MULTIPLE_SRC", optional=True, variadic=True),),
    category=Category.HOST,
    infer=infer,
    reference=reference,
    numbers=Numbers(checkable=host_facts.checkable, narrows=host_facts.narrows, positions=host_facts.positions),
    cost=Cost(window=host_facts.window, picks=host_facts.picks),
    pytorch=ByPyTorch(
        any_strides=host_facts.any_strides,
        repeated=host_facts.repeated,
        changed=host_facts.changed,
        overwritten=host_facts.overwritten,
        operator=operator,
    ),
    torch={
        **{f"aten.{name}.default": _scan for name in ("cumsum", "cumprod", "logcumsumexp")},
        **{f"aten.{name}.default": _places for name in ("argmax", "argmin")},
        "aten.masked_fill.Scalar": _filled_places,
        **{f"aten.__{name}__.{kind}": _bitwise for name in _BITWISE for kind in ("Tensor", "Scalar")},
    },
    samples=samples,
)
