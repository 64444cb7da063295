"""Import of an ONNX program as a graph: it is traced on tensors without data, then imported like any PyTorch program.

This module owns the shapes of inputs, and the names of inputs, weights and outputs.
:mod:`fmtprop.onnx.model.operators` owns the meaning of nodes, :mod:`fmtprop.capture.fx_import` the import of
PyTorch's calls.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from fmtprop.capture.call_import import CallImporter, FoundCall
from fmtprop.capture.torch_call import by_schema, parts_of, tensor_type
from fmtprop.capture.torch_log import held_back
from fmtprop.errors import FmtpropError, GraphError, ImportModelError
from fmtprop.ir.deferred import SMALL_NBYTES
from fmtprop.ir.graph import Graph
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.op import Category, opdef
from fmtprop.ir.tensors import tensors_in
from fmtprop.onnx.model import limits
from fmtprop.onnx.model.elements import element_type, torch_dtype, type_name
from fmtprop.onnx.model.operators.values import is_known, is_repeated
from fmtprop.onnx.model.program import ContradictionError, OnnxProgram
from fmtprop.onnx.model.recording import Recorded, RecordedTensor, Recording
from fmtprop.onnx.model.rest import Rest
from fmtprop.ops.host_call import Parts


def dims_of(info: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Return the declared dimensions of an input: numbers, names of dynamic axes, None for unnamed ones."""
    if info.type.WhichOneof("value") != "tensor_type":
        kind = str(info.type.WhichOneof("value") or "nothing").removesuffix("_type")
        raise ImportModelError(
            f"input {info.name} is a {kind}, and a graph's inputs are tensors; fmtprop.onnx.InferenceSession runs such "
            "a model node by node"
        )
    if not info.type.tensor_type.HasField("shape"):
        return None
    dims = info.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)


def fixed_dims(info: onnx.ValueInfoProto, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the dimensions of an input as numbers."""
    declared = dims_of(info)
    given = shapes.get(info.name)
    dims = _declared(info.name, declared) if given is None else _given(info.name, declared, given)
    if (count := math.prod(filter(None, dims))) > limits.AXIS_ELEMENTS:  # strides are products of sizes
        raise ImportModelError(f"input {info.name} has {count} elements; it may have {limits.AXIS_ELEMENTS}")
    return dims


def _given(name: str, declared: tuple[int | str | None, ...] | None, given: Sequence[int]) -> tuple[int, ...]:
    """Return the caller's dimensions if they are sizes that the model allows."""
    dims = tuple(given) if isinstance(given, Sequence) else (-1,)
    if any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in dims):
        raise ImportModelError(f"shapes[{name!r}] is {given!r}; it must be a tuple of sizes")
    if declared is not None:
        fits = len(declared) == len(dims) and all(
            not isinstance(want, int) or want == have for want, have in zip(declared, dims, strict=True)
        )
        if not fits:
            words = ", ".join(str(d or "?") for d in declared)
            raise ImportModelError(f"shapes[{name!r}] is {dims}, but the model declares ({words})")
    return dims


def _declared(name: str, dims: tuple[int | str | None, ...] | None) -> tuple[int, ...]:
    """Return the dimensions if all are numbers; else refuse them."""
    if dims is not None and all(isinstance(dim, int) for dim in dims):
        return tuple(dim for dim in dims if isinstance(dim, int))
    words = ", ".join(str(dim or "?") for dim in dims or ())
    shown = "no shape" if dims is None else f"the dynamic shape ({words})"
    sizes = (1, 3, 224, 224) if dims is None else tuple(dim if isinstance(dim, int) else 1 for dim in dims)
    given = f"{name}={','.join(map(str, sizes))}"
    raise ImportModelError(
        f"input {name} has {shown}; a plan has fixed shapes: pass them, such as shapes={{{name!r}: {sizes}}}, in the "
        f"command line --shape {shlex.quote(given)}, or use fmtprop.onnx.InferenceSession, which plans "
        "for each shape that it meets"
    )


def graph_of(
    program: OnnxProgram,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Import a program as a graph.

    Result: inputs and outputs have the model's names; a node's ``origin`` is the name of its ONNX node.
    """
    return head_of(program, shapes, fixed, splits=False)[0]


@dataclass(frozen=True)
class Split:
    """What follows behind the graph of a program's first nodes: the last ones.

    `names`: the values that the graph's outputs are, in order. `known`: other values that the last nodes read.
    """

    rest: Rest
    names: tuple[str, ...]
    known: dict[str, Any]

    def finish(self, program: OnnxProgram, made: Sequence[torch.Tensor], *, owned: bool = True) -> list[Any]:
        """Return the model's outputs of those of the graph."""
        values = self.known | dict(zip(self.names, made, strict=True))
        return program.finish(self.rest.steps, values, owned=owned)


def head_of(
    program: OnnxProgram,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, torch.Tensor] | None = None,
    *,
    splits: bool = True,
) -> tuple[Graph, Split | None]:
    """Import the nodes of a program that a graph can have, all of which but some at the end must be such.

    Raises ImportModelError as :func:`graph_of`, also where no node of the graph would be compute-intensive.
    """
    if shapes and not isinstance(shapes, Mapping):
        raise ImportModelError(f"shapes is {shapes!r}; it must map inputs to tuples of sizes")
    wanted = dict(shapes or {})
    infos = program.inputs
    unknown = sorted(set(wanted) - {info.name for info in infos})
    if unknown:
        raise ImportModelError(
            f"shapes names {unknown[0]!r}; the model's inputs are {', '.join(i.name for i in infos)}"
        )
    recording = Recording()
    inputs: dict[str, RecordedTensor] = {}
    fixed = fixed or {}
    for info in infos:
        if info.name in fixed:
            continue
        dims = fixed_dims(info, wanted)
        number = info.type.tensor_type.elem_type
        dtype = torch_dtype(number, f"input {info.name}")
        if dtype.is_complex:
            raise ImportModelError(f"input {info.name} is {type_name(number)}; a graph's inputs are real")
        inputs[info.name] = recording.input(dims, dtype)
    with held_back(), torch.no_grad(), recording.on():
        results, rest = program.trace({**inputs, **fixed}, recording, splits=splits)
    try:
        with torch.DisableTorchFunctionSubclass():  # from here on, nothing is recorded
            outputs = list(zip((info.name for info in program.outputs), results, strict=True))
            if rest is None:
                _check_outputs(outputs, program)
                return _imported(program, recording, inputs, outputs), None
            own = [(name, made) for name, made in outputs if name not in rest.made]
            _check_outputs([pair for pair in own if pair[1] is not None], program)
            return _split(program, recording, inputs, dict(own), rest)
    except ImportModelError:
        raise
    except FmtpropError as error:  # an attribute that PyTorch lets pass on tensors without data
        raise ImportModelError(f"{program.name}: {error}") from error


def _split(
    program: OnnxProgram,
    recording: Recording,
    inputs: Mapping[str, RecordedTensor],
    outputs: Mapping[str, Any],
    rest: Rest,
) -> tuple[Graph, Split]:
    """Import the first nodes, whose outputs are what the others read, and what is an output of the model."""
    read = {**rest.read, **outputs}
    made = {name: value for name, value in read.items() if not is_known(value)}
    if any(not isinstance(value, torch.Tensor) or value.is_complex() for value in made.values()):
        raise rest.reason
    graph = _imported(program, recording, inputs, list(made.items()))
    if not any(not node.is_boundary and opdef(node.op).category is Category.COMPUTE for node in graph.nodes()):
        raise rest.reason
    known = {name: recording.plain(value) for name, value in read.items() if name not in made}
    return graph, Split(rest, tuple(made), known)


def _check_outputs(outputs: Sequence[tuple[str, Any]], program: OnnxProgram) -> None:
    for name, result in outputs:
        if not isinstance(result, torch.Tensor):
            raise ImportModelError(
                f"output {name} is no tensor of a type that PyTorch has; fmtprop.onnx.InferenceSession runs such a "
                "model node by node"
            )
        _check_output(name, result, program)
        if result.is_complex():
            raise ImportModelError(f"output {name} is complex; a graph's outputs are real")


def _check_output(name: str, result: torch.Tensor, program: OnnxProgram) -> None:
    """Refuse a result if its element type is not the declared one."""
    declared = next((info.type for info in program.outputs if info.name == name), onnx.TypeProto())
    kind = declared.WhichOneof("value")
    if kind not in (None, "tensor_type", "optional_type"):
        raise ContradictionError(
            f"output {name} is declared as a {kind.removesuffix('_type')}, but the nodes make a tensor"
        )
    number = declared.tensor_type.elem_type if kind == "tensor_type" else 0
    if number and number != element_type(result):
        have, want = type_name(element_type(result)), type_name(number)
        raise ContradictionError(f"output {name} is declared as {want}, but the nodes make {have}")


def _imported(
    program: OnnxProgram,
    recording: Recording,
    inputs: Mapping[str, RecordedTensor],
    outputs: Sequence[tuple[str, torch.Tensor]],
) -> Graph:
    graph, results = Graph(program.name), [result for _, result in outputs]
    constants = {id(tensor): key for key, tensor in program.body.constants.items()}
    values = _Values(graph, constants, {*inputs, *(name for name, _ in outputs)}, recording)
    for name, tensor in inputs.items():
        values.set(tensor, graph.input(name, tensor_type(tensor, f"input {name}")))
    importer = CallImporter(graph)
    used = _used_results(recording, results)
    values.has_parts = any(at.dtype.is_complex for call in recording.calls for at in tensors_in(call.result))
    for index, call in enumerate(recording.calls):
        values.origin = call.origin
        values.set(call.result, importer.add(_found(call, index, values, used)))
    for output, result in outputs:
        graph.output(values.of(result), output if output not in graph else graph.fresh_name(output))
    graph.remove_dead()
    return graph


def _used_results(recording: Recording, results: Sequence[torch.Tensor]) -> set[int]:
    """Return the identities of all tensors that are read; of none if no call has several results."""
    if all(isinstance(call.result, torch.Tensor) for call in recording.calls):
        return set()
    found = set(map(id, results))
    for call in recording.calls:
        found |= {id(tensor) for tensor in tensors_in((call.args, call.kwargs))}
    return found


def _found(call: Recorded, index: int, values: _Values, used: set[int]) -> FoundCall:
    given = by_schema(call.target, call.args, call.kwargs)
    if given is None:
        raise ImportModelError(f"node {call.origin}: arguments do not fit {call.target._schema}")
    several = not isinstance(call.result, torch.Tensor)
    return FoundCall(
        call.target,
        {name: value if type(value) in _PLAIN else values.of(value) for name, value in given.items()},
        call.result,
        f"{call.target._opname}_{index}",
        call.origin,
        frozenset(at for at, value in enumerate(call.result) if id(value) in used) if several else _FIRST,
        values.has_parts and any(at.dtype.is_complex for at in tensors_in((call.result, call.args, call.kwargs))),
        lambda name: given[name],
    )


_FIRST = frozenset({0})
#: types of arguments without tensors
_PLAIN = frozenset({int, float, bool, str, type(None)})


def _data(tensor: torch.Tensor) -> torch.Tensor | Initialiser:
    """Return a constant's data for the graph: a large tensor of one number as its description."""
    if is_repeated(tensor) and tensor.nbytes > SMALL_NBYTES and not tensor.is_complex():
        number = tensor.flatten()[0].item()
        if math.isfinite(number) and float(number) == number:
            return Initialiser.constant(float(number))
    return parts_of(tensor).contiguous()


class _Values:
    """The graph's values by tensor; each constant once, under its name in the model."""

    def __init__(self, graph: Graph, names: Mapping[int, str], taken: set[str], recording: Recording) -> None:
        self.graph = graph
        self.recording = recording
        self.names = names
        self.taken = taken
        #: origin of new constants without a name
        self.origin = ""
        self.known: dict[int, Any] = {}
        #: whether some tensor is complex
        self.has_parts = False
        #: constants; their identities are keys
        self.kept: list[torch.Tensor] = []

    def set(self, tensor: Any, value: Any) -> None:
        """Note the value of a tensor, or those of several."""
        if isinstance(tensor, torch.Tensor):
            self.known[id(tensor)] = value
        else:
            self.known |= zip(map(id, tensor), value, strict=True)

    def of(self, argument: Any) -> Any:
        """Return an argument with values for tensors."""
        if isinstance(argument, torch.Tensor):
            found = self.known.get(id(argument))
            return self._constant(argument, self.recording.plain(argument)) if found is None else found
        if not isinstance(argument, list | tuple):
            return argument
        return [item if type(item) in _PLAIN else self.of(item) for item in argument]

    def _constant(self, argument: torch.Tensor, tensor: torch.Tensor) -> Any:
        if tensor.is_meta:
            raise GraphError(f"a tensor {tuple(tensor.shape)} without data, which no recorded call has made")
        name, origin = self.names.get(id(tensor), ""), ""
        if not name or name in self.taken or name in self.graph:
            name, origin = self.graph.fresh_name("constant"), self.origin
        type_ = tensor_type(tensor, f"constant {name}")
        value = self.graph.constant(name, type_, _data(tensor), origin=origin)
        self.kept.append(argument)
        self.has_parts |= tensor.dtype.is_complex
        self.known[id(argument)] = found = Parts(value) if tensor.dtype.is_complex else value
        return found
