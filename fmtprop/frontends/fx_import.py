"""Import of an exported program's calls as nodes of a graph.

This module owns the walk over the fx graph. It normalises each call by its schema and passes it to the importer that
an op declares for the overload; without an importer, the call becomes an ``aten`` node. :mod:`fmtprop.ops` owns the
meaning of overloads, :mod:`fmtprop.frontends.exporting` the export of programs.
"""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fmtprop.errors import GraphError, ImportModelError, UnsupportedOpError
from fmtprop.frontends.torch_call import TorchCall, add_constant, check_real, tensor_type
from fmtprop.ir.graph import Graph
from fmtprop.ir.importing import Importer
from fmtprop.ir.node import Value
from fmtprop.ir.op import OPSET
from fmtprop.ir.tensors import data_type, torch_dtype
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops.building import NATIVE_FLOATS
from fmtprop.ops.host import NO_RESULT, make_host_call
from fmtprop.ops.host_call import COMPLEX, STORAGE_OPS, Parts, draws_random_numbers
from fmtprop.ops.view_attrs import permuted

__all__ = ["Calls", "import_calls", "importers"]

_LOG = logging.getLogger(__name__)

#: results of a program's own constants are computed at import up to this size
_FOLDED_NBYTES = 2**24
#: most bytes of such results if the call has no operands or reads only a shape: it cannot be left to the plan
_MOST_MADE_NBYTES = 2**30
#: calls with uninitialized results: zeros are valid, and reveal no other program's numbers
_UNWRITTEN = frozenset({"aten.empty_like.default", "aten.new_empty.default", "aten.empty.memory_format"})
#: calls that read only the shape of a tensor
_SHAPE_ONLY = _UNWRITTEN | frozenset(
    f"aten.{name}.default" for name in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
)


def importers() -> dict[str, tuple[str, Importer]]:
    """Collect every op's importers.

    Returns
    -------
    dict
        ATen overload name to the name of the op and its importer.

    Raises
    ------
    GraphError
        Two ops claim one overload.

    Examples
    --------
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


# ---------------------------------------------------------------- the walk


class Nodes(Protocol):
    """The calls of a program."""

    @property
    def nodes(self) -> Iterable[Any]:
        """The calls in order."""
        ...


class Calls(Protocol):
    """A functional program: no mutation, no aliasing."""

    @property
    def graph(self) -> Nodes:
        """Its calls."""
        ...


def import_calls(graph: Graph, module: Calls, values: Mapping[str, Any], outputs: int | None = None) -> list[Any]:
    """Add a node for every call of an fx graph.

    Parameters
    ----------
    graph : Graph
        The graph that grows.
    module : torch.fx.GraphModule, or object with a graph
        A functional program: no mutation, no aliasing.
    values : mapping of str to object
        Meaning of each placeholder: a :class:`Value`, or a fixed plain number. Of each ``get_attr`` node too, if the
        module does not have its tensor.
    outputs : int, optional
        Number of the first results that leave the graph, so must be real; by default all.

    Returns
    -------
    list
        The program's results: Values, plain numbers, and parts of complex tensors that do not leave the graph.

    Raises
    ------
    ImportModelError
        A call cannot be expressed; the message names the call and its module.
    """
    walk = _Walk(graph, values)
    for node in module.graph.nodes:
        if node.op == "output":
            for argument in node.args[0][:outputs]:
                if isinstance(argument, fx.Node):
                    check_real(argument.meta.get("val"), f"output {argument.name}")
            return [walk.plain(argument) for argument in node.args[0]]
        if node.op == "get_attr" and node.name not in walk.values:
            walk.attribute(node, module)
            continue
        walk.visit(node)
    raise ImportModelError("the exported program has no output")


class _Walk:
    def __init__(self, graph: Graph, values: Mapping[str, Any]) -> None:
        self.graph = graph
        self.table = importers()
        #: constants that the program makes itself
        self.made: set[Value] = set()
        self.values: dict[str, Any] = dict(values)

    def attribute(self, node: fx.Node, module: Calls) -> None:
        """Add a tensor attribute of the program. Other attributes are branches, which are refused at their use."""
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, torch.Tensor):
            check_real(value, f"tensor {node.target}")
            self.values[node.name] = add_constant(self.graph, value.clone(), "")

    def visit(self, node: fx.Node) -> None:
        if node.name in self.values or node.op == "placeholder":
            return  # placeholders are known
        if node.op != "call_function":
            raise ImportModelError(f"{_where(node)}: {node.op} is not part of an exported program")
        target = node.target
        if target is operator.getitem:
            source, index = (self.plain(argument) for argument in node.args)
            self.values[node.name] = source[index]
        elif isinstance(target, OpOverload):
            self.values[node.name] = self.call(node, target)
        elif isinstance(target, HigherOrderOperator) and isinstance((*node.args, None)[0], OpOverload):
            op = node.args[0]  # in the exporter's functional form
            raise ImportModelError(f"{_where(node)}: {op} changes its arguments in place; use one that does not")
        elif isinstance(target, HigherOrderOperator):
            raise ImportModelError(
                f"{_where(node)}: control flow ({target}) cannot be in a graph, which runs every op once; "
                "take the branch or unroll the loop in Python before exporting"
            )
        else:
            name = getattr(target, "__name__", str(target))
            raise ImportModelError(
                f"{_where(node)}: {name} computes with sizes at run time; shapes must be static: export without "
                "dynamic_shapes"
            )

    def plain(self, argument: Any) -> Any:
        """Replace fx nodes by their values, and torch's containers and types by plain ones."""
        if isinstance(argument, fx.Node):
            if argument.name not in self.values:
                raise ImportModelError(f"{_where(argument)}: its value is not part of the graph")
            return self.values[argument.name]
        if isinstance(argument, list | tuple):
            return [self.plain(item) for item in argument]
        return argument

    # ------------------------------------------------------------------ calls

    def call(self, node: fx.Node, target: OpOverload) -> Any:
        name = str(target)
        args = {key: self.plain(value) for key, value in _by_schema(node, target).items()}
        recorded = node.meta.get("val")
        if recorded is None:
            return self._check_only(node, name)
        if draws_random_numbers(target, args):
            raise ImportModelError(
                f"{_where(node)}: {name} draws random numbers; a graph is a function of its inputs. Export the model "
                "in eval mode, or pass the random tensor as an input"
            )
        if name.split(".")[1] in STORAGE_OPS:
            args = self._as_stored(node, target, args)
        several = isinstance(recorded, list | tuple)
        results = recorded if several else [recorded]
        types = tuple(self._result_type(node, name, value, i) for i, value in enumerate(results))
        made: Sequence[Value | None]
        if self._is_known(name, args, types):
            nbytes = sum(type_.nbytes for type_ in types)
            if nbytes > _MOST_MADE_NBYTES:
                raise ImportModelError(
                    f"{_where(node)}: {name} makes a constant of {nbytes} bytes, {_MOST_MADE_NBYTES} are allowed: pass "
                    "it as an input"
                )
            made = self._evaluate(node, target, args)
        else:
            made = self._convert(node, target, args, types)
        found = [
            Parts(value) if value is not None and result is not None and result.is_complex() else value
            for value, result in zip(made, results, strict=False)
        ]
        return found if several else found[0]

    def _as_stored(self, node: fx.Node, target: OpOverload, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call that reads its tensor's storage, with the tensor's axes in storage order.

        A graph's tensors are row-major and begin at the start of their storage; PyTorch's can have other strides.
        """
        name = target._schema.arguments[0].name
        source = _by_schema(node, target)[name]
        recorded = source.meta["val"]
        strides, start = recorded.stride(), recorded.storage_offset()
        order = sorted(range(recorded.ndim), key=lambda axis: (-strides[axis], axis))
        if recorded.is_complex():
            raise ImportModelError(
                f"{_where(node)}: {target} reads the memory of a complex tensor; use slices and views"
            )
        in_place = start == 0 or args.get("storage_offset") is None
        if in_place and recorded.is_contiguous():
            return args
        # a call that writes to the storage would have to undo the permutation in its result
        if not in_place or "scatter" in str(target) or not recorded.permute(order).is_contiguous():
            raise ImportModelError(
                f"{_where(node)}: {target} reads the memory of {source.name}, which has strides {tuple(strides)} and "
                f"offset {start} in PyTorch; a graph's tensors are row-major and alone in their memory: call "
                ".clone(memory_format=torch.contiguous_format) on it first, and adapt strides and offset"
            )
        call = TorchCall(self.graph, str(target), args, (), _origin(node))
        return {**args, name: permuted(call, args[name], order)}

    def _check_only(self, node: fx.Node, name: str) -> None:
        # The exporter has made static checks already; a check on values would need a node without a result.
        if "tensor_metadata" not in name:
            warnings.warn(f"{_where(node)}: run-time check {name} is left out of the graph", UserWarning, stacklevel=2)

    def _result_type(self, node: fx.Node, name: str, value: Any, index: int) -> TensorType:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise ImportModelError(
                f"{_where(node)}: {name} turns a tensor into a Python number; keep it a tensor (no .item(), no branch "
                "or size that depends on values)"
            )
        return NO_RESULT if value is None else tensor_type(value, f"{_where(node)}: result {index} of {name}")

    def _is_known(self, name: str, args: Mapping[str, Any], types: tuple[TensorType, ...]) -> bool:
        """Return whether a call's results are known at import: masks, positions and scalars that the program makes.

        A pass folds constants, but importers see only the constants that are known at import.
        """
        operands = set(_values_in(args))
        if not operands or name in _SHAPE_ONLY:
            return True
        small = sum(type_.nbytes for type_ in types) <= _FOLDED_NBYTES
        return small and all(self._is_literal(value) for value in operands)

    def _is_literal(self, value: Value) -> bool:
        weights = value not in self.made and self.graph.type_of(value).dtype.is_floating
        return value.node in self.graph.constants and not weights

    def _evaluate(self, node: fx.Node, target: OpOverload, args: Mapping[str, Any]) -> tuple[Value, ...]:
        """Run a call at import; its results become constants."""
        _check_device(node, args)

        def real(argument: Any) -> Any:
            if isinstance(argument, Parts):
                return torch.view_as_complex(real(argument.value).contiguous())
            if isinstance(argument, Value):
                data, type_ = self.graph.constants.get(argument.node), self.graph.type_of(argument)
                # only its shape is read
                return torch.empty((), dtype=torch_dtype(type_.dtype)).expand(type_.dims) if data is None else data
            return [real(item) for item in argument] if isinstance(argument, list) else argument

        with torch.no_grad():
            made = target(**{key: real(argument) for key, argument in args.items()})
        tensors = made if isinstance(made, list | tuple) else [made]
        if str(target) in _UNWRITTEN:
            tensors = [torch.zeros_like(tensor) for tensor in tensors]
        values = tuple(add_constant(self.graph, tensor, _origin(node)) for tensor in tensors)
        self.made |= set(values)
        return values

    def _convert(
        self, node: fx.Node, target: OpOverload, args: Mapping[str, Any], types: tuple[TensorType, ...]
    ) -> tuple[Value | None, ...]:
        _check_device(node, args)
        parts = args.get("self") if str(target) == "aten.view_as_real.default" else None
        if isinstance(parts, Parts):
            return (parts.value,)
        if str(target) == "aten.view_as_complex.default":
            return (args["self"],)
        used = _used_results(node, len(types))
        call = TorchCall(self.graph, str(target), _spelled(args), types, _origin(node), used)
        found = None if _is_complex(node) else self._by_importer(call)
        if found is not None:
            return found
        try:
            return make_host_call(call)
        except UnsupportedOpError as error:
            raise ImportModelError(f"{_where(node)}: {error}") from error

    def _by_importer(self, call: TorchCall) -> tuple[Value | None, ...] | None:
        """Call the importer of the overload; None if it declines or makes results of other types."""
        if call.target not in self.table:
            return None
        made = self.table[call.target][1](call)
        if made is None:
            return None
        found = (made,) if isinstance(made, Value) else made
        for index, expected in enumerate(call.results):
            value = found[index] if index < len(found) else None
            if value is None and index not in call.used:
                continue
            if value is None:  # the op does not make this result, such as the indices of maxima
                return None
            if call.type(value) != expected and not (index and _is_wider(call.type(value), expected)):
                where = f" from {call.origin}" if call.origin else ""  # the model itself has no name
                _LOG.warning(
                    "%s%s: importer of op %s made result %d as %s, the exporter says %s; runs as aten instead",
                    call.target, where, self.table[call.target][0], index, call.type(value), expected,
                )  # fmt: skip
                return None
        return tuple(found)


# ---------------------------------------------------------------- reading fx nodes


def _by_schema(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    """Return every argument of a call by its schema name, including defaults."""
    args: dict[str, Any] = {}
    given, named = node.args, node.kwargs
    for position, (name, by_keyword, default) in enumerate(_arguments(target)):
        if position < len(given) and not by_keyword:
            args[name] = given[position]
        else:
            args[name] = named.get(name, default)
    return args


@cache
def _arguments(target: OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    """Return name, whether it is by keyword only, and default of each argument: PyTorch makes new objects of them."""
    return tuple((at.name, at.kwarg_only, at.default_value) for at in target._schema.arguments)


def _spelled(value: Any) -> Any:
    """Replace torch's types: dtypes by :class:`DataType`, devices, layouts and memory formats by strings."""
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return name if name in COMPLEX else data_type(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    return value


def _is_complex(node: fx.Node) -> bool:
    """Return whether a call reads or returns a complex tensor."""
    recorded = [at.meta.get("val") for at in (node, *node.all_input_nodes)]
    flat = [item for value in recorded for item in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(item, torch.Tensor) and item.is_complex() for item in flat)


def _values_in(argument: Any) -> Iterator[Value]:
    if isinstance(argument, Value | Parts):
        yield argument.value if isinstance(argument, Parts) else argument
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from _values_in(item)
    elif isinstance(argument, list):
        for item in argument:
            yield from _values_in(item)


def _is_wider(made: TensorType, recorded: TensorType) -> bool:
    """Return whether a result is f32 and recorded as bf16: under autocast, the record of statistics is wrong."""
    return made.dims == recorded.dims and made.dtype is DataType.F32 and recorded.dtype in NATIVE_FLOATS


def _used_results(node: fx.Node, count: int) -> frozenset[int]:
    """Return the indices of the results of a call that are read."""
    used: set[int] = set()
    for user in node.users:
        index: Any = user.args[1] if user.target is operator.getitem else None
        used |= set(range(count)) if index is None else {index % count}
    return frozenset(used)


def _check_device(node: fx.Node, args: Mapping[str, Any]) -> None:
    device = args.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise ImportModelError(
            f"{_where(node)}: {node.target} makes a tensor on device {device}; fmtprop runs on the CPU: export the "
            "model there"
        )


def _origin(node: fx.Node) -> str:
    """Return the path of the module that makes the call (gradients: the forward call), such as ``layer1.0.conv1``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    # strict export may spell it as Python: L['self'].layer1[0].conv1
    if "[" not in path:
        return path.lstrip(".")
    path = re.sub(r"^L\['(self|fn)'\]\.?", "", path)
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).lstrip(".")


def _where(node: fx.Node) -> str:
    origin = _origin(node)
    return f"{node.name} in {origin}" if origin else str(node.name)
