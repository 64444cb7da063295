"""From protobuf to steps: the nodes of a graph, of a subgraph, and of ONNX's function body for an operator.

This module knows names and attributes; :mod:`fmtprop.frontends.onnx.program` computes values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import onnx
from onnx import AttributeProto, defs, helper

from fmtprop.errors import ImportModelError
from fmtprop.frontends.onnx import operators
from fmtprop.frontends.onnx.elements import element_type, from_proto
from fmtprop.frontends.onnx.operators.values import NotInTorchError

__all__ = ["Body", "Step", "body_of", "expanded", "keywords"]


@dataclass
class Body:
    """A graph or a function as steps.

    Parameters
    ----------
    name : str
        Name of the graph.
    inputs, outputs : list of str
        Names of values; omitted inputs of a function are absent.
    constants : mapping of str to object
        Initialisers.
    output_types : list of onnx.TypeProto
        Declared types of the outputs; empty for a function.
    steps : list of Step
        The nodes, in an order in which they can run.
    """

    name: str
    inputs: list[str]
    outputs: list[str]
    constants: dict[str, Any] = field(default_factory=dict)
    output_types: list[onnx.TypeProto] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass
class Step:
    """One node.

    Parameters
    ----------
    node : onnx.NodeProto
        The node of the file.
    version : int
        The opset version of its domain.
    function : callable or None
        The operator's function; None for an operator that only ONNX's reference has.
    attributes : mapping of str to object
        Decoded; a subgraph is a :class:`Body`.
    last : list of str
        Values that no later step reads.
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


def label_of(node: onnx.NodeProto, index: int) -> str:
    """Return the name of a node in messages."""
    name = node.name or (node.output[0] if node.output else "") or f"number {index}"
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    return f"node {name} ({domain}{node.op_type})"


@lru_cache(maxsize=1024)
def keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the attributes that a function takes."""
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
        A checked graph.
    opsets : mapping of str to int
        Domain to version.

    Raises
    ------
    ImportModelError
        An operator is not supported; the message names the node.
    """
    constants = {proto.name: from_proto(proto) for proto in graph.initializer}
    body = Body(graph.name, [v.name for v in graph.input if v.name not in constants], [v.name for v in graph.output])
    body.constants, body.output_types = constants, [info.type for info in graph.output]
    for step in (_step(node, index, opsets) for index, node in enumerate(graph.node)):
        if not _is_constant(step, body):
            body.steps.append(step)
    _mark_last(body)
    return body


def _is_constant(step: Step, body: Body) -> bool:
    """Add the result of a node ``Constant`` to a body's constants; return whether it is one."""
    if step.function is None or step.node.op_type != "Constant" or step.node.domain not in ("", "ai.onnx"):
        return False
    try:
        body.constants[step.node.output[0]] = step.function(**step.attributes)
    except NotInTorchError:  # text, which only ONNX's reference makes
        return False
    return True


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
    same = operators.SAME_AS_OPSET.get((domain, node.op_type))
    if same is not None:
        domain, version = "", same
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
    known = keywords(function)
    unknown = sorted(set(attributes) - known)
    if unknown:
        raise ImportModelError(f"{label} has the attribute {unknown[0]!r}, which is not supported")


def _mark_last(body: Body) -> None:
    """Record the last step that reads each value; subgraphs also read values of their enclosing graphs."""
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


# ---------------------------------------------------------------- functions that ONNX gives


def expanded(step: Step, arguments: Sequence[Any]) -> Body | None:
    """Return ONNX's function body of an operator for these operands; None if it has none."""
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
