"""An ONNX model as a program of PyTorch functions, run node by node.

The same walk serves two ends: on data it is how a model runs that no plan can hold (shapes that depend on data,
sequences, strings); on fake tensors, under a tracer, it is how a model becomes a graph. What depends on constants alone
is computed on the way, whoever watches. This module must not know about files or graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import onnx
import torch
from onnx import AttributeProto, defs, helper

from fmtprop.errors import FmtpropError, ImportModelError
from fmtprop.frontends.onnx import limits, operators
from fmtprop.frontends.onnx.elements import element_type, from_proto
from fmtprop.frontends.onnx.operators.values import DataDependentError, NotInTorchError, is_known
from fmtprop.frontends.onnx.reading import Source
from fmtprop.frontends.onnx.reference import run_node

__all__ = ["Body", "Program", "Step"]

#: nodes of branches and loops, unrolled, that an imported model may have
MOST_UNROLLED_STEPS: Final = 1_000
#: bytes up to which operands are small: whatever a node makes of them is too
_SMALL_NBYTES: Final = 4096
#: elements that a shape may have
_FEW_ELEMENTS: Final = 64
#: bytes that nodes may make of constants, besides eight times those of the weights
MOST_FOLDED_NBYTES: Final = 1 << 29


@dataclass
class Body:
    """A graph or a function as steps.

    Parameters
    ----------
    name : str
        Of the graph.
    inputs, outputs : list of str
        Names of values; an input of a function that is left out is absent.
    constants : mapping of str to object
        Initialisers.
    steps : list of Step
        In an order in which they can run.
    """

    name: str
    inputs: list[str]
    outputs: list[str]
    constants: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass
class Step:
    """One node.

    Parameters
    ----------
    node : onnx.NodeProto
        As in the file.
    version : int
        The opset version of its domain.
    function : callable or None
        What it computes; None for an operator that only ONNX's reference has.
    attributes : mapping of str to object
        Decoded; a subgraph is a :class:`Body`.
    last : list of str
        Values that nobody reads after it.
    """

    node: onnx.NodeProto
    version: int
    function: Callable[..., Any] | None
    attributes: dict[str, Any]
    label: str
    last: list[str] = field(default_factory=list)

    @property
    def runs_subgraphs(self) -> bool:
        """Whether it has branches or a loop's body."""
        return any(isinstance(value, Body) for value in self.attributes.values())


# ---------------------------------------------------------------- from protobuf to steps


def label_of(node: onnx.NodeProto, index: int) -> str:
    """Return how messages name a node."""
    name = node.name or (node.output[0] if node.output else "") or f"number {index}"
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    return f"node {name} ({domain}{node.op_type})"


@lru_cache(maxsize=1024)
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _attribute(proto: onnx.AttributeProto, opsets: Mapping[str, int]) -> Any:
    if proto.type == AttributeProto.GRAPH:
        return body_of(proto.g, opsets)
    if proto.type == AttributeProto.TENSOR:
        return from_proto(proto.t)
    if proto.type == AttributeProto.STRING:
        return proto.s.decode("utf-8", errors="replace")
    if proto.type == AttributeProto.STRINGS:
        return [item.decode("utf-8", errors="replace") for item in proto.strings]
    return helper.get_attribute_value(proto)


def body_of(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Body:
    """Return a graph as steps.

    Parameters
    ----------
    graph : onnx.GraphProto
        Checked before.
    opsets : mapping of str to int
        Domain to version.

    Raises
    ------
    ImportModelError
        An operator has no meaning here; the message names the node.
    """
    constants = {proto.name: from_proto(proto) for proto in graph.initializer}
    body = Body(graph.name, [v.name for v in graph.input if v.name not in constants], [v.name for v in graph.output])
    body.constants = constants
    body.steps = [_step(node, index, opsets) for index, node in enumerate(graph.node)]
    _mark_last(body)
    return body


def _step(node: onnx.NodeProto, index: int, opsets: Mapping[str, int]) -> Step:
    label = label_of(node, index)
    domain = "" if node.domain == "ai.onnx" else node.domain
    if domain not in opsets:
        raise ImportModelError(f"{label}: the model imports no opset of the domain {node.domain!r}")
    if node.op_type in operators.RANDOM and not domain:
        raise ImportModelError(
            f"{label} draws random numbers; a model is a function of its inputs: make the numbers an input"
        )
    version = opsets[domain]
    twin = operators.TWINS.get((domain, node.op_type))
    if twin is not None:
        domain, version = "", twin
        node = _with_domain(node, domain)
    for proto in node.attribute:
        if proto.ref_attr_name:
            raise ImportModelError(
                f"{label}: attribute {proto.name!r} refers to an attribute of a function, but no function is around it"
            )
    attributes = {proto.name: _attribute(proto, opsets) for proto in node.attribute}
    function = operators.find(domain, node.op_type, version)
    if function is None and not defs.has(node.op_type, domain):
        raise ImportModelError(f"{label}: no such operator is known in the domain {domain or 'ai.onnx'!r}")
    if function is not None:
        _check_attributes(label, function, attributes)
    return Step(node, version, function, attributes, label)


def _with_domain(node: onnx.NodeProto, domain: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.domain = domain
    return copy


def _check_attributes(label: str, function: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
    known = _keywords(function)
    unknown = sorted(set(attributes) - known)
    if unknown:
        raise ImportModelError(f"{label} has the attribute {unknown[0]!r}, which is not supported")


def _mark_last(body: Body) -> None:
    """Note after which step each value is read no more: subgraphs read those of the graphs around them."""
    seen = set(body.outputs)
    for step in reversed(body.steps):
        read = {name for name in _reads(step) if name}
        step.last = sorted((read | set(step.node.output)) - seen - {""})
        seen |= read


def _reads(step: Step) -> Iterable[str]:
    yield from step.node.input
    for value in step.attributes.values():
        if isinstance(value, Body):
            for inner in value.steps:
                yield from _reads(inner)
            yield from value.outputs


# ---------------------------------------------------------------- running


class Program:
    """A model that can be run, on data or on fake tensors.

    Parameters
    ----------
    source : Source
        A model that was read and checked.

    Raises
    ------
    ImportModelError
        An operator is not supported; the message names the node.
    """

    def __init__(self, source: Source) -> None:
        model = source.model
        self.opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
        self.body = body_of(model.graph, self.opsets)
        self.body.constants = dict(source.weights)
        self.body.inputs = [name for name in self.body.inputs if name not in source.weights]
        self.name = model.graph.name or "model"
        self.inputs = [info for info in model.graph.input if info.name not in source.weights]
        self.outputs = list(model.graph.output)
        self.weights_nbytes = sum(value.nbytes for value in source.weights.values())
        #: nodes that ran on ONNX's reference
        self.reference_nodes: list[str] = []

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run node by node.

        Parameters
        ----------
        inputs : mapping of str to object
            All inputs by name; one that has an initialiser may be among them.

        Returns
        -------
        list
            What the graph's outputs are.

        Raises
        ------
        ImportModelError
            A node cannot run on what it got; the message names it.
        """
        with torch.no_grad():
            return _Run(self).body(self.body, dict(inputs), {})

    def trace(self, inputs: Mapping[str, Any], around: Callable[[Step], AbstractContextManager[Any]]) -> list[Any]:
        """Run on fake tensors, under the caller's tracer.

        Parameters
        ----------
        inputs : mapping of str to object
            Fake tensors by name.
        around : callable
            Gives what is entered around each step that is traced.

        Returns
        -------
        list
            As of :meth:`run`; what depends on constants alone has its data.

        Raises
        ------
        DataDependentError
            A shape or a branch depends on the inputs.
        ImportModelError
            As :meth:`run`.
        """
        return _Run(self, around).body(self.body, dict(inputs), {})


#: what functions of PyTorch and of numpy raise about their operands
_FAILURES: Final = (
    RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError,
)  # fmt: skip


class _Run:
    """One run, with what it has done so far."""

    def __init__(self, program: Program, around: Callable[[Step], AbstractContextManager[Any]] | None = None) -> None:
        self.program = program
        self.around = around
        self.depth = 0
        self.steps = 0
        self.folded_nbytes = 0

    def body(self, body: Body, inputs: Mapping[str, Any], scope: Mapping[str, Any]) -> list[Any]:
        values = _Scope(scope, body.constants)
        values.update(inputs)
        for step in body.steps:
            arguments = [values.find(name, step) for name in step.node.input]
            results = self.step(step, arguments, values)
            for name, result in zip(step.node.output, results, strict=False):
                if name:
                    values[name] = result
            for name in step.last:
                values.pop(name, None)
        return [values.find(name, None) for name in body.outputs]

    def step(self, step: Step, arguments: list[Any], scope: Mapping[str, Any]) -> Sequence[Any]:
        self.steps += self.depth > 0
        if self.around is not None and self.steps > MOST_UNROLLED_STEPS:
            raise DataDependentError(f"{step.label}: a loop of more than {MOST_UNROLLED_STEPS} nodes, whose number")
        if self.steps > limits.LOOP_STEPS:
            raise ImportModelError(
                f"{step.label}: loops have run {limits.LOOP_STEPS} nodes in this run, and may run no more"
            )
        try:
            return self._checked(step, self._call(step, arguments, scope))
        except DataDependentError as error:
            text = str(error)
            raise (
                error
                if text.startswith("node ")
                else DataDependentError(f"{step.label}: {text.partition(' depends on what')[0]}")
            ) from None
        except FmtpropError:
            raise
        except ImportError as error:
            raise ImportModelError(f"{step.label}: {_first_line(error)}") from error
        except NotImplementedError as error:
            raise ImportModelError(f"{step.label}: {_first_line(error)} is not supported") from error
        except _FAILURES as error:
            given = ", ".join(map(_described, arguments))
            raise ImportModelError(f"{step.label} cannot run on {given or 'nothing'}: {_first_line(error)}") from error

    def _checked(self, step: Step, results: Any) -> Sequence[Any]:
        # a sequence is a list, several results are a tuple
        found: Sequence[Any] = results if isinstance(results, tuple) else (results,)
        wanted = [name for name in step.node.output if name]
        if len(found) < len(step.node.output) and wanted:
            raise ImportModelError(f"{step.label} names {len(step.node.output)} outputs, it has {len(found)}")
        return found

    def _call(self, step: Step, arguments: list[Any], scope: Mapping[str, Any]) -> Any:
        if self.around is None:
            return self._make(step, arguments, scope)
        shape_only = step.node.op_type in operators.SHAPE_ONLY and not step.node.domain
        if step.runs_subgraphs:
            return self._make(step, arguments, scope)
        if shape_only or is_known(arguments):
            from torch.utils._python_dispatch import _disable_current_modes

            # also of calls that are no operators: PyTorch sets the mode of gradients where it looks at views
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._check_size(step, arguments, scope)
                return self._make(step, arguments, scope)
        with self.around(step):
            return self._make(step, arguments, scope)

    def _make(self, step: Step, arguments: list[Any], scope: Mapping[str, Any]) -> Any:
        function = step.function
        carried = step.node.op_type in operators.CARRYING and not step.node.domain
        if function is None or not (carried or all(map(_in_torch, arguments))):
            return self._otherwise(step, arguments)
        extra: dict[str, Any] = {}
        known = _keywords(function)
        if "wanted" in known:
            extra["wanted"] = len(step.node.output)
        if "run" in known:
            extra["run"] = lambda body, values: self._subgraph(step, body, values, scope)
        try:
            return function(*arguments, **step.attributes, **extra)
        except NotInTorchError:
            return self._otherwise(step, arguments)

    def _subgraph(self, step: Step, body: Body, values: Sequence[Any], scope: Mapping[str, Any]) -> list[Any]:
        if len(values) > len(body.inputs):
            raise ImportModelError(
                f"{step.label}: its subgraph takes {len(body.inputs)} inputs, {len(values)} are given"
            )
        self.depth += 1
        try:
            return self.body(body, dict(zip(body.inputs, values, strict=False)), scope)
        finally:
            self.depth -= 1

    def _otherwise(self, step: Step, arguments: list[Any]) -> Any:
        """Run a node as the function that ONNX gives for it, else on ONNX's reference."""
        expanded = _expanded(step, arguments)
        if expanded is not None:
            return tuple(self.body(expanded, dict(zip(expanded.inputs, arguments, strict=False)), {}))
        if self.around is not None and not is_known(arguments):
            raise DataDependentError(f"{step.label}: PyTorch has no such operator, and what ONNX's reference makes")
        self.program.reference_nodes.append(step.label)
        return run_node(step.node, step.version, arguments)

    def _check_size(self, step: Step, arguments: list[Any], scope: Mapping[str, Any]) -> None:
        """Find out how large a result will be where that can be large, before it is made."""
        nbytes = sum(value.nbytes for value in arguments if isinstance(value, torch.Tensor))
        growing = step.node.op_type in operators.GROWING
        if not growing and nbytes <= _SMALL_NBYTES:
            return
        if step.function is None or not all(map(_in_torch, arguments)):
            return
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with mode:
                made = self._make(step, [_without_data(value, mode) for value in arguments], scope)
        except DataDependentError:  # a function that looks at all numbers: its result is no larger
            return
        results = made if isinstance(made, tuple | list) else (made,)
        size = sum(value.numel() * value.dtype.itemsize for value in results if isinstance(value, torch.Tensor))
        self.folded_nbytes += size
        most = MOST_FOLDED_NBYTES + 8 * self.program.weights_nbytes
        if self.folded_nbytes > most:
            raise ImportModelError(
                f"{step.label} makes {size} bytes of constants of {nbytes} bytes; all nodes together may make {most}: "
                "keep such a tensor as an initialiser"
            )


class _Scope(dict[str, Any]):
    """Values by name, with those of the graphs around."""

    def __init__(self, outer: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        super().__init__(outer)
        self.update(constants)

    def find(self, name: str, step: Step | None) -> Any:
        """Return a value; None for an operand that is left out."""
        if not name:
            return None
        try:
            return self[name]
        except KeyError:
            where = "an output of the graph" if step is None else step.label
            raise ImportModelError(f"{where} reads {name!r}, which nothing before it makes") from None


def _without_data(value: Any, mode: Any) -> Any:
    """Return a tensor's fake, but for a few numbers, which may be a shape."""
    if isinstance(value, list):
        return [_without_data(item, mode) for item in value]
    large = isinstance(value, torch.Tensor) and value.numel() > _FEW_ELEMENTS
    return mode.from_tensor(value) if large else value


def _in_torch(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_in_torch, value))
    return value is None or isinstance(value, torch.Tensor)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _described(value: Any) -> str:
    if isinstance(value, list):
        return f"a sequence of {len(value)}"
    if value is None:
        return "nothing"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# ---------------------------------------------------------------- functions that ONNX gives


def _expanded(step: Step, arguments: Sequence[Any]) -> Body | None:
    """Return the function body that ONNX gives for an operator, for these operands; None where it gives none."""
    domain = "" if step.node.domain == "ai.onnx" else step.node.domain
    if not defs.has(step.node.op_type, domain):
        return None
    schema = defs.get_schema(step.node.op_type, step.version, domain)
    if schema.has_context_dependent_function:
        types = [_type_of(value).SerializeToString() for value in arguments]
        text = schema.get_context_dependent_function(step.node.SerializeToString(), types)
    elif schema.has_function:
        text = schema.get_function_with_opset_version(step.version) if _has_version(schema, step.version) else b""
        text = text or schema.function_body.SerializeToString()
    else:
        return None
    function = onnx.FunctionProto.FromString(text)
    opsets = {"": defs.onnx_opset_version(), domain: step.version}
    opsets |= {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import}
    given = {proto.name: proto for proto in step.node.attribute}
    given |= {proto.name: proto for proto in function.attribute_proto if proto.name not in given}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name:
            given[name] = attribute.default_value
    nodes = [_with_attributes(node, given) for node in function.node]
    wanted = [name if given else "" for name, given in zip(function.output, step.node.output, strict=False)]
    body = Body(step.node.op_type, list(function.input), wanted)
    body.steps = [_step(node, index, opsets) for index, node in enumerate(nodes)]
    for inner in body.steps:
        inner.label = f"{step.label}, within it {inner.label}"
    _mark_last(body)
    return body


def _has_version(schema: Any, version: int) -> bool:
    return version in schema.function_opset_versions


def _with_attributes(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a node of a function with the caller's attributes in the place of references to them."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for proto in node.attribute:
        if not proto.ref_attr_name:
            copy.attribute.append(proto)
        elif proto.ref_attr_name in given:
            bound = onnx.AttributeProto()
            bound.CopyFrom(given[proto.ref_attr_name])
            bound.name = proto.name
            copy.attribute.append(bound)
    return copy


def _type_of(value: Any) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        inner = _type_of(value[0]) if value else helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
        return helper.make_sequence_type_proto(inner)
    return helper.make_tensor_type_proto(element_type(value), list(value.shape))
