"""ONNX's own reference in numpy, for nodes without a function in PyTorch: strings, 4-bit types, images, trees."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from fmtprop.onnx.model.elements import array_of, from_array

#: bytes of an element, at most
_ELEMENT_NBYTES = 8


def result_nbytes(node: onnx.NodeProto, version: int, arguments: Sequence[Any]) -> int:
    """Return the most bytes of a node's first result on constants, by ONNX's shape inference; 0 if it cannot tell.

    `arguments`: its operands; None for one that is left out.
    """
    named = {name: array_of(value) for name, value in zip(node.input, arguments, strict=False) if name}
    if node.op_type in _TEXT:
        return _text_nbytes(node, list(named.values()))
    data = {name: numpy_helper.from_array(np.asarray(value), name) for name, value in named.items()}
    types = {name: helper.make_tensor_type_proto(proto.data_type, proto.dims) for name, proto in data.items()}
    schema = defs.get_schema(node.op_type, version, node.domain)
    opsets = [helper.make_opsetid(node.domain, version)]
    try:
        made = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
    except shape_inference.InferenceError as error:
        raise ValueError(str(error)) from error
    dims = made[node.output[0]].tensor_type.shape.dim if node.output[0] in made else ()
    return _ELEMENT_NBYTES * math.prod(dim.dim_value for dim in dims) if dims else 0


#: operators that make longer texts, or more of them
_TEXT = frozenset({"StringConcat", "StringSplit"})


def _text_nbytes(node: onnx.NodeProto, texts: list[np.ndarray[Any, Any]]) -> int:
    """Return the most bytes of the results: numpy gives each text as much room as the longest one."""
    count = math.prod(np.broadcast_shapes(*(text.shape for text in texts)))
    longest = sum(max(map(len, text.flat), default=0) for text in texts)
    parts = 1
    if node.op_type == "StringSplit":
        delimiter = next((proto.s.decode() for proto in node.attribute if proto.name == "delimiter"), "") or None
        parts = max((len(text.split(delimiter)) for text in texts[0].flat), default=0)
    return count * (_TEXT_NBYTES * parts + _CHARACTER_NBYTES * longest)


_TEXT_NBYTES, _CHARACTER_NBYTES = 64, 4


def run_node(node: onnx.NodeProto, version: int, arguments: Sequence[Any]) -> Any:
    """Run one node on :class:`onnx.reference.ReferenceEvaluator`.

    `arguments`: its operands; None for one that is left out.
    """
    if node.op_type == "SVMClassifier" and any(proto.name == "prob_a" for proto in node.attribute):
        raise NotImplementedError("with probabilities, which ONNX's reference computes wrongly (onnx 1.23),")
    if node.op_type == "RegexFullMatch":
        _check_pattern(node.attribute[0].s.decode(errors="replace"), max(map(len, arguments[0].flat), default=0))
    from onnx.reference import ReferenceEvaluator  # few models need its table of all operators

    named = {name: array_of(value) for name, value in zip(node.input, arguments, strict=True) if name}
    inputs = [onnx.ValueInfoProto(name=name) for name in named]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    opsets = [helper.make_opsetid(node.domain, version)]
    results = ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets)).run(None, named)
    made = iter(results)
    found = tuple(_value(next(made)) if name else None for name in node.output)
    return found if len(found) > 1 else found[0]


def _value(result: Any) -> Any:
    if isinstance(result, list):
        return [_value(item) for item in result]
    if result is None:
        return None
    array = np.asarray(result)
    return from_array(array.astype(object) if array.dtype.kind == "U" else array)


def _check_pattern(pattern: str, length: int) -> None:
    """Refuse a pattern for which Python's matcher may try too many ways; ONNX's own syntax has a matcher that does not.

    Each repetition may end at each character. A repetition of a group with repetitions or choices doubles the ways with
    each character.
    """
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern)  # escapes and sets
    open_groups, closed, doubles = [False], False, False  # whether a group has repetitions or choices
    for character in plain.replace("(?", "("):
        if character == "(":
            open_groups.append(False)
        elif character in "*+?{|":
            doubles |= closed and character in "*+{"
            open_groups[-1] = True
        closed = character == ")" and len(open_groups) > 1 and open_groups.pop()
        open_groups[-1] |= closed
    ways = (length + 1) ** len(re.findall(r"[*+?{]", plain))
    if doubles or ways > _MOST_WAYS:
        raise NotImplementedError(f"a pattern with so many repetitions, {pattern[:100]!r},")


#: ends of repetitions, some seconds of matching
_MOST_WAYS = 10**8
