"""From protobuf to steps: the nodes of a graph, of a subgraph, and of ONNX's function body for an operator.

This module knows names and attributes; :mod:`fmtprop.onnx.model.program` computes values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import onnx
from onnx import AttributeProto, defs, helper

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import operators
from fmtprop.onnx.model.elements import element_type, from_proto
from fmtprop.onnx.model.operators.values import NotInTorchError

#: integer products, whose functions can also give sums as f32
_PRODUCTS = (("", "ConvInteger"), ("", "MatMulInteger"))


@dataclass
class Body:
    """A graph or a function as steps."""

    name: str
    #: `inputs`, `outputs`: names of values; omitted inputs of a function are absent
    inputs: list[str]
    outputs: list[str]
    constants: dict[str, Any] = field(default_factory=dict)
    #: declared types of the outputs; empty for a function
    output_types: list[onnx.TypeProto] = field(default_factory=list)
    #: the nodes, in an order in which they can run
    steps: list[NodeStep] = field(default_factory=list)

    def outer(self) -> set[str]:
        """Return the names of values of enclosing graphs that it reads."""
        made, found = {"", *self.inputs, *self.constants}, set[str]()
        for step in self.steps:
            inner = (value.outer() for value in step.attributes.values() if isinstance(value, Body))
            found |= {*step.inputs}.union(*inner) - made
            made |= {*step.outputs}
        return found | {*self.outputs} - made

    def source_of(self, name: str) -> str:
        """Return the value that a value is a copy of."""
        copies = {step.outputs[0]: step.inputs[0] for step in self.steps if step.op == "Identity" and not step.domain}
        while name in copies:
            name = copies[name]
        return name

    def held(self) -> Iterator[Any]:
        """Yield what its constants and attributes have, and those of its subgraphs: each run reads them again."""
        yield from self.constants.values()
        for step in self.steps:
            for value in step.attributes.values():
                if isinstance(value, Body):
                    yield from value.held()
                else:
                    yield value


@dataclass
class NodeStep:
    """One node."""

    node: onnx.NodeProto
    op: str
    domain: str
    #: `inputs`, `outputs`: names of its operands and results; an omitted one has none
    inputs: list[str]
    outputs: list[str]
    version: int
    #: the operator's function; None for an operator that only ONNX's reference has
    function: Callable[..., Any] | None
    #: decoded; a subgraph is a :class:`Body`
    attributes: dict[str, Any]
    label: str
    last: list[str] = field(default_factory=list)
    #: whether only conversions to f32 read its first result, or sums of integers that these read
    rounded: bool = False

    @property
    def name(self) -> str:
        """Name of the node, or else of its first result."""
        return self.node.name or self.outputs[0]

    @cached_property
    def asks(self) -> frozenset[str]:
        """What its function asks of the run: how many results are wanted, whether they are rounded, and subgraphs."""
        return keywords(self.function) & {"wanted", "rounded", "run"} if self.function is not None else frozenset()

    @cached_property
    def runs_subgraphs(self) -> bool:
        """Whether it has branches or a loop's body."""
        return any(isinstance(value, Body) for value in self.attributes.values())


def _label(name: str, op: str, domain: str) -> str:
    """Return the name of a node in messages."""
    return f"node {name} ({domain}{'.' if domain else ''}{op})"


@lru_cache(maxsize=1024)
def keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the attributes that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _attribute(proto: onnx.AttributeProto, opsets: Mapping[str, int], label: str) -> Any:
    if proto.ref_attr_name:
        raise ImportModelError(
            f"{label}: attribute {proto.name!r} refers to an attribute of a function, but no function is around it"
        )
    kind = proto.type
    if kind == AttributeProto.INTS:
        return list(proto.ints)
    if kind == AttributeProto.INT:
        return proto.i
    if kind == AttributeProto.GRAPH:
        return body_of(proto.g, opsets)
    if kind == AttributeProto.TENSOR:
        return from_proto(proto.t)
    if kind == AttributeProto.STRING:
        return proto.s.decode("utf-8", errors="replace")
    if kind == AttributeProto.STRINGS:
        return [item.decode("utf-8", errors="replace") for item in proto.strings]
    return helper.get_attribute_value(proto)


def body_of(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Body:
    """Return a graph as steps.

    Raises ImportModelError if an operator is not supported; the message names the node.
    """
    constants = {proto.name: from_proto(proto) for proto in graph.initializer}
    body = Body(graph.name, [v.name for v in graph.input if v.name not in constants], [v.name for v in graph.output])
    body.constants, body.output_types = constants, [info.type for info in graph.output]
    for step in (_step(node, index, opsets) for index, node in enumerate(graph.node)):
        if not _is_constant(step, body):
            body.steps.append(step)
    _mark_readers(body)
    return body


def _is_constant(step: NodeStep, body: Body) -> bool:
    """Add the result of a node ``Constant`` to a body's constants; return whether it is one."""
    if step.function is None or step.op != "Constant" or step.domain:
        return False
    try:
        body.constants[step.outputs[0]] = step.function(**step.attributes)
    except NotInTorchError:  # text, which only ONNX's reference makes
        return False
    return True


def _step(node: onnx.NodeProto, index: int, opsets: Mapping[str, int]) -> NodeStep:
    op, domain, outputs = node.op_type, node.domain, list(node.output)
    domain = "" if domain == "ai.onnx" else domain
    label = _label(node.name or (outputs[0] if outputs else "") or f"number {index}", op, domain)
    if domain not in opsets:
        raise ImportModelError(f"{label}: the model imports no opset of the domain {domain!r}")
    if op in operators.RANDOM and not domain:
        raise ImportModelError(
            f"{label} draws random numbers; a model is a function of its inputs: make the numbers an input"
        )
    version = opsets[domain]
    same = operators.SAME_AS_OPSET.get((domain, op))
    if same is not None:
        domain, version = "", same
        node = _with_domain(node, domain)
    attributes = {proto.name: _attribute(proto, opsets, label) for proto in node.attribute}
    function = operators.find(domain, op, version)
    if function is None and not defs.has(op, domain):
        raise ImportModelError(f"{label}: no such operator is known in the domain {domain or 'ai.onnx'!r}")
    if function is not None:
        _check_attributes(label, function, attributes)
    return NodeStep(node, op, domain, list(node.input), outputs, version, function, attributes, label)


def _with_domain(node: onnx.NodeProto, domain: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.domain = domain
    return copy


def _check_attributes(label: str, function: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
    known = keywords(function)
    if not attributes.keys() <= known:
        unknown = min(attributes.keys() - known)
        raise ImportModelError(f"{label} has the attribute {unknown!r}, which is not supported")


def _mark_readers(body: Body) -> None:
    """Record the last step that reads each value, and which results are rounded to f32 by all readers.

    A sum with an integer product may be one of f32, too, if it is rounded itself. Subgraphs also read values of their
    enclosing graphs.
    """
    seen, exact, summands = set(body.outputs), set(body.outputs), set[str]()
    products = {step.outputs[0] for step in body.steps if step.outputs and (step.domain, step.op) in _PRODUCTS}
    for step in reversed(body.steps):
        read, result = set(reads(step)), step.outputs[0] if step.outputs else ""
        step.last = [name for name in {*read, *step.outputs} - seen if name]
        step.rounded = bool(result) and result not in exact
        seen |= read
        is_summand, own = result in summands, step.op if not step.domain else ""
        if own == "Cast":
            step.rounded &= is_summand
        if step.rounded and own in ("Add", "Sub") and read & products:
            summands |= read
        elif step.rounded and is_summand and own in ("Reshape", "Squeeze", "Unsqueeze"):
            summands.add(step.inputs[0])
            exact |= read - {step.inputs[0]}
        elif (own, step.attributes.get("to")) != ("Cast", onnx.TensorProto.FLOAT):
            exact |= read


def reads(step: NodeStep) -> Iterable[str]:
    """Return the names of the values that a node and its subgraphs read."""
    if not step.runs_subgraphs:
        return step.inputs
    bodies = [value for value in step.attributes.values() if isinstance(value, Body)]
    inner = [name for body in bodies for each in body.steps for name in reads(each)]
    return [*step.inputs, *inner, *(name for body in bodies for name in body.outputs)]


# ---------------------------------------------------------------- functions that ONNX gives


def expanded(step: NodeStep, arguments: Sequence[Any]) -> Body | None:
    """Return ONNX's function body of an operator for these operands; None if it has none."""
    domain = step.domain
    if not defs.has(step.op, domain):
        return None
    schema = defs.get_schema(step.op, step.version, domain)
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
    wanted = [name if given else "" for name, given in zip(function.output, step.outputs, strict=False)]
    body = Body(step.op, list(function.input), wanted)
    body.steps = [_step(node, index, opsets) for index, node in enumerate(nodes)]
    for inner in body.steps:
        inner.label = f"{step.label}, within it {inner.label}"
    _mark_readers(body)
    return body


def _has_version(schema: Any, version: int) -> bool:
    return version in schema.function_opset_versions


def _with_attributes(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a node of a function with the caller's attributes in place of references to them."""
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
