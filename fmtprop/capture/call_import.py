"""Import of one call of PyTorch's as nodes of a graph.

A call is passed to the importer that an op declares for its overload; without an importer, it becomes an ``aten`` node.
This module must not know how calls are found: :mod:`fmtprop.capture.fx_import` walks over programs,
:mod:`fmtprop.onnx.model.recording` records calls. :mod:`fmtprop.ops` owns the meaning of overloads.

A call that treats both parts of complex numbers alike is one of real tensors with one more axis.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fmtprop.capture.torch_call import UNCHECKED, TorchCall, add_constant, tensor_type
from fmtprop.errors import GraphError, ImportModelError, UnsupportedOpError
from fmtprop.ir import OPSET, Graph, Importer, TensorType, Value
from fmtprop.ir.tensors import data_type, materialise, torch_dtype
from fmtprop.layout import DataType
from fmtprop.ops.building import NATIVE_FLOATS
from fmtprop.ops.host import make_host_call
from fmtprop.ops.host_call import COMPLEX, STORAGE_OPS, Parts, draws_random_numbers
from fmtprop.ops.host_operator import NO_RESULT
from fmtprop.ops.pytorch import OpOverload
from fmtprop.ops.reorder import converted
from fmtprop.ops.view_attrs import permuted

#: overloads that move numbers, or add them
_ALIKE = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_view.default", "add.Tensor", "alias.default", "cat.default", "clone.default", "copy.default",
        "expand.default", "flip.default", "neg.default", "permute.default", "reshape.default", "roll.default",
        "select.int", "select_scatter.default", "slice.Tensor", "slice_scatter.default", "split.Tensor",
        "split_with_sizes.default", "squeeze.dim", "squeeze.dims", "stack.default", "sub.Tensor",
        "transpose.int", "unbind.int", "unsqueeze.default", "view.default",
    )
)  # fmt: skip

#: arguments with a size for each axis, and those with axes: from the end, these are one more away
_SIZES, _AXES = ("size", "shape"), ("dim", "dim0", "dim1", "dims")


def call_of_parts(target: str, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the call of parts; None if it is not the same call."""
    tensors = [name for name in ("self", "other", "src", "tensors") if name in args]
    flat = [one for name in tensors for one in (args[name] if isinstance(args[name], list) else [args[name]])]
    if target not in _ALIKE or not all(isinstance(one, Parts) for one in flat):
        return None
    if isinstance(args.get("alpha"), complex) or (target == "aten.roll.default" and not args["dims"]):
        return None
    made = {key: _real(value) for key, value in args.items()}
    made |= {key: [*args[key], 2] for key in _SIZES if key in args}
    made |= {key: _moved(args[key]) for key in _AXES if key in args}
    if target == "aten.permute.default":
        made["dims"].append(len(made["dims"]))
    return made


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(one) for one in value]
    return value.value if isinstance(value, Parts) else value


def _moved(axes: Any) -> Any:
    if isinstance(axes, list):
        return [_moved(axis) for axis in axes]
    return axes - 1 if axes < 0 else axes


_LOG = logging.getLogger(__name__)

#: results of a program's own constants are computed at import up to this size
_FOLDED_NBYTES = 2**24
#: integers that become floating numbers are left to a pass if there are as many as this: they may be a matrix's codes
_CODES = 2**14
#: most bytes of such results if the call has no operands or reads only a shape: it cannot be left to the plan
_MOST_MADE_NBYTES = 2**30
#: calls with results that have no numbers in memory: zeros are valid for the uninitialized ones, and reveal no other
#: program's numbers; forward-mode gradients begin with zeros without memory
_UNWRITTEN = frozenset(
    {
        "aten.empty_like.default",
        "aten.new_empty.default",
        "aten.empty.memory_format",
        "aten._efficientzerotensor.default",
    }
)
#: calls that read only the shape of a tensor
_SHAPE_ONLY = _UNWRITTEN | frozenset(
    f"aten.{name}.default" for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)
#: kinds of arguments that importers read as plain data
_SPELLED = ("ScalarType", "Device", "Layout", "MemoryFormat")


def importers() -> dict[str, tuple[str, Importer]]:
    """Collect every op's importers.

    >>> importers()["aten.relu.default"][0]
    'eltwise'
    """
    table: dict[str, tuple[str, Importer]] = {}
    for declaration in OPSET.values():
        for overload, importer in declaration.torch.items():
            if overload in table:
                raise GraphError(f"ops {table[overload][0]} and {declaration.name} both import {overload}")
            table[overload] = (declaration.name, importer)
    return table


@dataclass(slots=True)
class FoundCall:
    """A call of a program."""

    target: OpOverload
    #: every argument by its schema name; tensors are Values, parts of complex tensors :class:`Parts`
    args: dict[str, Any]
    #: tensors with the shapes and types of its results; None for a call without results
    recorded: Any
    name: str
    #: path of the module that makes the call, such as ``layer1.0.conv1``
    origin: str
    #: indices of the results that are read
    used: frozenset[int]
    #: whether it reads or returns a complex tensor
    is_complex: bool
    operand: Callable[[str], torch.Tensor]

    @property
    def where(self) -> str:
        """The call in messages."""
        return f"{self.name} in {self.origin}" if self.origin else self.name


class CallImporter:
    """Importer of a program's calls in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: the importers of the calls so far, by overload
        self.found: dict[str, tuple[str, Importer | None]] = {}
        #: constants that the program makes itself
        self.made: set[Value] = set()

    def add(self, call: FoundCall) -> Any:
        """Add the nodes of a call."""
        recorded, facts = call.recorded, _facts(call.target)
        if recorded is None:
            return _check_only(call, facts.name)
        if facts.may_be_random and draws_random_numbers(call.target, call.args):
            raise ImportModelError(
                f"{call.where}: {facts.name} draws random numbers; a graph is a function of its inputs. Export the "
                "model in eval mode, or pass the random tensor as an input"
            )
        if facts.reads_storage:
            call.args = self._as_stored(call)
        several = isinstance(recorded, list | tuple)
        results = recorded if several else (recorded,)
        types = tuple(_result_type(call, facts.name, value, index) for index, value in enumerate(results))
        made: Sequence[Value | None]
        if self._is_known(facts.name, call.args, types):
            nbytes = sum(type_.nbytes for type_ in types)
            if nbytes > _MOST_MADE_NBYTES:
                raise ImportModelError(
                    f"{call.where}: {facts.name} makes a constant of {nbytes} bytes, {_MOST_MADE_NBYTES} are allowed: "
                    "pass it as an input"
                )
            made = self._evaluate(call)
        else:
            made = self._convert(call, facts, types)
        if call.is_complex:
            made = [
                Parts(value) if value is not None and result is not None and result.is_complex() else value  # type: ignore[misc]
                for value, result in zip(made, results, strict=False)
            ]
        return list(made) if several else made[0]

    def _as_stored(self, call: FoundCall) -> dict[str, Any]:
        """Return the arguments of a call that reads its tensor's storage, with the tensor's axes in storage order.

        A graph's tensors are row-major and begin at the start of their storage; PyTorch's can have other strides.
        """
        target, args = call.target, call.args
        name = target._schema.arguments[0].name
        recorded = call.operand(name)
        strides, start = recorded.stride(), recorded.storage_offset()
        order = sorted(range(recorded.ndim), key=lambda axis: (-strides[axis], axis))
        if recorded.is_complex():
            raise ImportModelError(f"{call.where}: {target} reads the memory of a complex tensor; use slices and views")
        in_place = start == 0 or args.get("storage_offset") is None
        if in_place and recorded.is_contiguous():
            return args
        # a call that writes to the storage would have to undo the permutation in its result
        if not in_place or "scatter" in str(target) or not recorded.permute(order).is_contiguous():
            raise ImportModelError(
                f"{call.where}: {target} reads the memory of its argument {name}, which has strides {tuple(strides)} "
                f"and offset {start} in PyTorch; a graph's tensors are row-major and alone in their memory: call "
                ".clone(memory_format=torch.contiguous_format) on it first, and adapt strides and offset"
            )
        made = TorchCall(self.graph, str(target), args, (), call.origin)
        return {**args, name: permuted(made, args[name], order)}

    def _is_known(self, name: str, args: Mapping[str, Any], types: tuple[TensorType, ...]) -> bool:
        """Return whether a call's results are known at import: masks, positions and scalars that the program makes.

        A pass folds constants, but importers see only the constants that are known at import.
        """
        operands = _values_in(args)
        if name in _SHAPE_ONLY or not (first := next(operands, None)):
            return True
        if not self._is_literal(first) or not all(map(self._is_literal, operands)):
            return False
        are_codes = name in OPSET["dequantize"].torch or any(map(self._may_be_codes, (first, *operands)))
        if are_codes and any(type_.dtype.is_floating for type_ in types):
            return False
        return sum(type_.nbytes for type_ in types) <= _FOLDED_NBYTES

    def _may_be_codes(self, value: Value) -> bool:
        type_ = self.graph.type_of(value)
        return type_.size >= _CODES and not (type_.dtype.is_floating or type_.dtype is DataType.BOOLEAN)

    def _is_literal(self, value: Value) -> bool:
        if value.node not in self.graph.constants:
            return False
        return value in self.made or not self.graph.type_of(value).dtype.is_floating

    def _evaluate(self, call: FoundCall) -> tuple[Value, ...]:
        """Run a call at import; its results become constants."""
        _check_device(call)

        def real(argument: Any) -> Any:
            if isinstance(argument, Parts):
                return torch.view_as_complex(real(argument.value).contiguous())
            if isinstance(argument, Value):
                data, type_ = self.graph.constants.get(argument.node), self.graph.type_of(argument)
                if data is None:  # only its shape is read
                    return torch.empty((), dtype=torch_dtype(type_.dtype)).expand(type_.dims)
                return materialise(data, type_)
            return [real(item) for item in argument] if isinstance(argument, list) else argument

        with torch.no_grad():
            made = call.target(**{key: real(argument) for key, argument in call.args.items()})
        tensors = made if isinstance(made, list | tuple) else [made]
        if str(call.target) in _UNWRITTEN:
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        values = tuple(add_constant(self.graph, tensor, call.origin) for tensor in tensors)
        self.made |= set(values)
        return values

    def _convert(self, call: FoundCall, facts: _Facts, types: tuple[TensorType, ...]) -> tuple[Value | None, ...]:
        _check_device(call)
        if facts.name == "aten.view_as_real.default" and isinstance(call.args["self"], Parts):
            return (call.args["self"].value,)
        if facts.name == "aten.view_as_complex.default":
            return (call.args["self"],)
        parts = call_of_parts(facts.name, call.args) if call.is_complex else None
        args = call.args if parts is None else parts
        if facts.spelled:
            args = {**args, **{name: _spelled(args[name]) for name in facts.spelled}}
        made = TorchCall(self.graph, facts.name, args, types, call.origin, call.used)
        found = None if call.is_complex and parts is None else self._by_importer(made)
        if found is not None:
            return found
        try:
            return make_host_call(made)
        except UnsupportedOpError as error:
            raise ImportModelError(f"{call.where}: {error}") from error

    def _by_importer(self, call: TorchCall) -> tuple[Value | None, ...] | None:
        """Call the importer of the overload; None if it declines or makes results of other types."""
        if call.target not in self.found:  # one look-up in each declaration takes less time than a table of all
            claims = ((op.name, op.torch[call.target]) for op in OPSET.values() if call.target in op.torch)
            self.found[call.target] = next(claims, ("", None))
        op, importer = self.found[call.target]
        made = None if importer is None else importer(call)
        if made is None:
            return None
        found = [made] if isinstance(made, Value) else [*made]
        for index, expected in enumerate(call.results):
            value = found[index] if index < len(found) else None
            if value is None and index not in call.used:
                continue
            if value is None:  # the op does not make this result, such as the indices of maxima
                return None
            if index and _is_wider(call.type(value), expected):
                if not any(call.type(read).dtype is DataType.F32 for read in _values_in(call.args)):
                    narrow = converted(call, value, expected.dtype)
                    if narrow is None:
                        return None
                    found[index] = narrow
            elif call.type(value) != expected:
                where = f" from {call.origin}" if call.origin else ""  # the model itself has no name
                _LOG.warning(
                    "%s%s: importer of op %s made result %d as %s, the exporter says %s; runs as aten instead",
                    call.target, where, op, index, call.type(value), expected,
                )  # fmt: skip
                return None
        return tuple(found)


# ---------------------------------------------------------------- facts about overloads and arguments


@dataclass(frozen=True, slots=True)
class _Facts:
    """An overload's properties, which PyTorch computes anew at each request."""

    name: str
    may_be_random: bool
    reads_storage: bool
    #: arguments with types, devices, layouts or memory formats
    spelled: tuple[str, ...]


@cache
def _facts(target: OpOverload) -> _Facts:
    name = str(target)
    spelled = [at.name for at in target._schema.arguments if any(kind in str(at.real_type) for kind in _SPELLED)]
    random = torch.Tag.nondeterministic_seeded in target.tags
    return _Facts(name, random, name.split(".")[1] in STORAGE_OPS, tuple(spelled))


def _check_only(call: FoundCall, name: str) -> None:
    # The exporter has made static checks already; a check on values would need a node without a result.
    if "tensor_metadata" not in name:
        message = f"{call.where}: run-time check {name} is left out of the graph: {UNCHECKED}"
        warnings.warn(message, UserWarning, stacklevel=2)


def _result_type(call: FoundCall, name: str, value: Any, index: int) -> TensorType:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ImportModelError(
            f"{call.where}: {name} turns a tensor into a Python number; keep it a tensor (no .item(), no branch "
            "or size that depends on values)"
        )
    return NO_RESULT if value is None else tensor_type(value, lambda: f"{call.where}: result {index} of {name}")


def _spelled(value: Any) -> Any:
    """Replace torch's types: dtypes by :class:`DataType`, devices, layouts and memory formats by strings."""
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return name if name in COMPLEX else data_type(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    return value


def _values_in(argument: Any) -> Iterator[Value]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Parts):
        yield argument.value
    elif isinstance(argument, Mapping):
        for item in argument.values():
            if item.__class__ is not int and item is not None:
                yield from _values_in(item)
    elif isinstance(argument, list) and not (argument and argument[0].__class__ is int):
        for item in argument:
            yield from _values_in(item)


def _is_wider(made: TensorType, recorded: TensorType) -> bool:
    """Return whether a result is f32 and recorded as bf16.

    These are statistics. The record is wrong if an operand is f32, as parameters are under autocast: the kernel makes
    f32 then.
    """
    return made.dims == recorded.dims and made.dtype is DataType.F32 and recorded.dtype in NATIVE_FLOATS


def _check_device(call: FoundCall) -> None:
    device = call.args.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise ImportModelError(
            f"{call.where}: {call.target} makes a tensor on device {device}; fmtprop runs on the CPU: export the "
            "model there"
        )
