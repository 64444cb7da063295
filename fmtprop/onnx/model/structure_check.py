"""Check of an ONNX model's structure, before all other checks: sizes, names, nesting, recursion, contradictions.

The file's declarations are compared with its data, and everything that grows during reading is bounded. ONNX's own
checker, which knows the operators' signatures, runs afterwards and can rely on this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import limits
from fmtprop.onnx.model.elements import numpy_type, type_name

#: bits of types that share bytes
_PACKED_BITS = {
    number: int(name.removesuffix("E2M1")[-1])
    for name, number in TensorProto.DataType.items()
    if name in ("INT2", "UINT2", "INT4", "UINT4", "FLOAT4E2M1")
}

#: element types
_KNOWN = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}

#: the field with a tensor's numbers if they are not raw, and the number of its entries per element
_TYPED = {
    "float_data": {TensorProto.FLOAT: 1, TensorProto.COMPLEX64: 2},
    "double_data": {TensorProto.DOUBLE: 1, TensorProto.COMPLEX128: 2},
    "int64_data": {TensorProto.INT64: 1},
    "uint64_data": {TensorProto.UINT32: 1, TensorProto.UINT64: 1},
    "string_data": {TensorProto.STRING: 1},
}
_FIELDS = (*_TYPED, "int32_data")


def check_structure(model: onnx.ModelProto, where: str) -> None:
    """Check a model's structure."""
    if not model.HasField("graph"):
        raise ImportModelError(f"{where} has no graph; it is no ONNX model, or was not written to the end")
    _check_opsets(model, where)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if len(functions) != len(model.functions):
        raise ImportModelError(f"{where}: two functions have one name")
    bodies: dict[Any, tuple[int, list[Any]]] = {}
    for key, function in functions.items():
        for names in (function.input, function.output, function.attribute):
            _check_names(names, f"{where}: function {function.name}")
        label = f"{where}: function {function.name}"
        count, calls = _check_nodes(function.node, label, functions, 1)
        further = _check_attributes(function.attribute_proto, label, functions, 1)  # a call may leave them out
        bodies[key] = count + further[0], calls + further[1]
    bodies[None] = _check_graph(model.graph, f"{where}: graph {model.graph.name}", functions, 1)
    _check_calls(bodies, where)


def _check_opsets(model: onnx.ModelProto, where: str) -> None:
    versions: dict[str, int] = {}
    for opset in model.opset_import:
        _check_names([opset.domain], where)
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        if versions.setdefault(domain, opset.version) != opset.version:
            raise ImportModelError(f"{where} imports two versions of the domain {domain or 'ai.onnx'!r}")
        if not 1 <= opset.version < 1 << 31:
            raise ImportModelError(f"{where} imports version {opset.version} of the domain {domain or 'ai.onnx'!r}")
    version = versions.get("")
    if version is not None and version > limits.NEWEST_OPSET:
        raise ImportModelError(
            f"{where} is of opset {version}; up to {limits.NEWEST_OPSET} are understood: export it for that, or use "
            "onnx.version_converter.convert_version"
        )


def _check_names(names: Iterable[str], where: str) -> None:
    longest = max(map(len, names), default=0)
    if longest > limits.NAME_CHARACTERS:
        raise ImportModelError(f"{where}: a name has {longest} characters; {limits.NAME_CHARACTERS} are allowed")


def _check_graph(graph: onnx.GraphProto, where: str, functions: Any, depth: int) -> tuple[int, list[Any]]:
    if depth > limits.GRAPH_DEPTH:
        raise ImportModelError(f"{where}: graphs lie more than {limits.GRAPH_DEPTH} deep in each other")
    _check_names([graph.name], where)
    if not graph.output:
        raise ImportModelError(f"{where} has no output")
    if graph.sparse_initializer:
        raise ImportModelError(f"{where} has sparse initialisers, which are not supported; store them dense")
    if len(graph.initializer) > limits.INITIALISERS:
        raise ImportModelError(f"{where} has {len(graph.initializer)} initialisers; {limits.INITIALISERS} are allowed")
    for infos, are_inputs in ((graph.input, True), (graph.output, False)):
        if len(infos) > limits.OPERANDS:
            raise ImportModelError(f"{where} has {len(infos)} inputs or outputs; {limits.OPERANDS} are allowed")
        names = [info.name for info in infos]
        _check_names(names, where)
        if are_inputs and len(set(names)) != len(names):
            raise ImportModelError(f"{where}: two of its inputs have one name")
    for info in (*graph.input, *graph.output, *graph.value_info):
        _check_type(info.type, f"{where}: {info.name}", 1)
    seen = set()
    for tensor in graph.initializer:
        if not tensor.name or tensor.name in seen:
            raise ImportModelError(f"{where}: initialiser {tensor.name!r} has no name of its own")
        seen.add(tensor.name)
        check_tensor(tensor, f"{where}: initialiser {tensor.name}", may_be_external=depth == 1)
    return _check_nodes(graph.node, where, functions, depth)


def _check_nodes(nodes: Any, where: str, functions: Any, depth: int) -> tuple[int, list[Any]]:
    """Check nodes and their subgraphs; return their number, and the functions that they call."""
    if len(nodes) > limits.NODES:
        raise ImportModelError(f"{where} has {len(nodes)} nodes; {limits.NODES} are allowed")
    count, calls = len(nodes), []
    for index, node in enumerate(nodes):
        op, domain, inputs, outputs, attributes = node.op_type, node.domain, node.input, node.output, node.attribute
        if len(inputs) + len(outputs) > limits.OPERANDS:
            raise ImportModelError(f"{_label(where, node, index)} has more than {limits.OPERANDS} operands")
        names = [attribute.name for attribute in attributes]
        if len(names) > 1 and len(set(names)) != len(names):
            raise ImportModelError(f"{_label(where, node, index)}: two of its attributes have one name")
        if "num_outputs" in names and attributes[names.index("num_outputs")].i > limits.OPERANDS:
            raise ImportModelError(f"{_label(where, node, index)} would have more than {limits.OPERANDS} outputs")
        if "nodes_truenodeids" in names:
            _check_trees(attributes, _label(where, node, index))
        names += (node.name, op, domain, *inputs, *outputs)
        if max(map(len, names)) > limits.NAME_CHARACTERS:
            _check_names(names, _label(where, node, index))
        if functions and (key := (domain, op, node.overload)) in functions:
            calls.append(key)
        if any(attribute.type not in _NUMBERS or attribute.ref_attr_name for attribute in attributes):
            inner, further = _check_attributes(attributes, _label(where, node, index), functions, depth)
            count += inner
            calls += further
    if count > limits.NODES:
        raise ImportModelError(f"{where} has more than {limits.NODES} nodes")
    return count, calls


def _check_attributes(attributes: Any, label: str, functions: Any, depth: int) -> tuple[int, list[Any]]:
    """Check tensors and graphs in attributes; return the number of nodes, and the functions that they call."""
    count, calls = 0, []
    for attribute in attributes:
        for part in _parts(attribute, label):
            if isinstance(part, TensorProto):
                check_tensor(part, f"{label}: attribute {attribute.name}", may_be_external=False)
                continue
            inner, further = _check_graph(part, f"{label}: subgraph {attribute.name}", functions, depth + 1)
            count += inner
            calls += further
    return count, calls


#: types of attributes without messages or names
_NUMBERS = frozenset(
    {AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.STRING}
)


def _label(where: str, node: onnx.NodeProto, index: int) -> str:
    """Return the name of a node in messages."""
    name = node.name or (node.output[0] if node.output else f"number {index}")
    return f"{where}: node {name[:200]} ({node.op_type[:200]})"


def _parts(attribute: onnx.AttributeProto, label: str) -> Iterator[Any]:
    """Yield the tensors and graphs of an attribute."""
    _check_names((attribute.ref_attr_name,), label)
    if attribute.type == AttributeProto.TENSOR:
        yield attribute.t
    elif attribute.type == AttributeProto.TENSORS:
        yield from attribute.tensors
    elif attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    elif attribute.type == AttributeProto.GRAPHS:
        yield from attribute.graphs
    elif attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
        raise ImportModelError(f"{label}: attribute {attribute.name} is a sparse tensor, which is not supported")


def _check_calls(bodies: dict[Any, tuple[int, list[Any]]], where: str) -> None:
    """Refuse recursive functions, and functions with so many calls that inlining them explodes."""
    sizes: dict[Any, int] = {}
    open_calls: list[tuple[Any, bool]] = [(None, False)]
    path: list[Any] = []
    while open_calls:
        key, done = open_calls.pop()
        if done:
            path.pop()
            sizes[key] = min(bodies[key][0] + sum(sizes[call] for call in bodies[key][1]), limits.NODES + 1)
            continue
        if key in path:
            raise ImportModelError(f"{where}: function {key[1]} calls itself")
        if key in sizes:
            continue
        if len(path) > limits.FUNCTION_DEPTH:
            raise ImportModelError(f"{where}: functions call each other more than {limits.FUNCTION_DEPTH} deep")
        path.append(key)
        open_calls.append((key, True))
        open_calls += [(call, False) for call in set(bodies[key][1])]
    if sizes[None] > limits.NODES:
        raise ImportModelError(f"{where} has more than {limits.NODES} nodes once its functions are written out")


def _check_type(type_: onnx.TypeProto, where: str, depth: int) -> None:
    if depth > 4:
        raise ImportModelError(f"{where}: sequences lie too deep in each other")
    kind = type_.WhichOneof("value")
    if kind == "sequence_type":
        _check_type(type_.sequence_type.elem_type, where, depth + 1)
    elif kind == "optional_type":
        _check_type(type_.optional_type.elem_type, where, depth + 1)
    elif kind == "tensor_type":
        dims = type_.tensor_type.shape.dim
        if len(dims) > limits.AXES:
            raise ImportModelError(f"{where} has {len(dims)} axes; {limits.AXES} are allowed")
        for axis, dim in enumerate(dims):
            if dim.dim_value > limits.AXIS_ELEMENTS:
                raise ImportModelError(f"{where}: axis {axis} has size {dim.dim_value}")
            if len(dim.dim_param) > limits.NAME_CHARACTERS:
                _check_names((dim.dim_param,), where)


# ---------------------------------------------------------------- tensors


def nbytes_of(tensor: onnx.TensorProto, where: str) -> int:
    """Return the bytes of a tensor with its dimensions and element type."""
    if tensor.data_type not in _KNOWN:
        raise ImportModelError(f"{where} has the unknown element type {tensor.data_type}")
    if tensor.data_type == TensorProto.STRING:
        raise ImportModelError(f"{where} holds strings, which are not stored as bytes")
    bits = _PACKED_BITS.get(tensor.data_type) or 8 * numpy_type(tensor.data_type).itemsize
    elements: int = math.prod(tensor.dims)
    return -(-elements * bits // 8)


def check_tensor(tensor: onnx.TensorProto, where: str, *, may_be_external: bool) -> None:
    """Compare a tensor's declaration with its data."""
    _check_names([tensor.name], where)
    possible = len(tensor.dims) <= limits.AXES and all(0 <= dim <= limits.AXIS_ELEMENTS for dim in tensor.dims)
    # strides are products of sizes, also if one of these is 0
    if not possible or math.prod(filter(None, tensor.dims)) > limits.AXIS_ELEMENTS:
        raise ImportModelError(f"{where} has impossible dimensions {list(tensor.dims)[:8]}")
    if tensor.HasField("segment"):
        raise ImportModelError(f"{where} is a segment of a tensor, which is not supported")
    raw = tensor.HasField("raw_data")
    fields = {name: count for name in _FIELDS if (count := len(getattr(tensor, name)))}
    if tensor.data_location == TensorProto.EXTERNAL:
        if not may_be_external:
            raise ImportModelError(
                f"{where}: its numbers lie in another file; only those of the main graph's initialisers may"
            )
        nbytes_of(tensor, where)
        if fields or tensor.raw_data:
            raise ImportModelError(f"{where} has its numbers twice, in the model and in another file")
        return
    count = math.prod(tensor.dims)
    if raw:
        wanted, have = nbytes_of(tensor, where), len(tensor.raw_data)
        if fields:
            raise ImportModelError(f"{where} has its numbers twice, as raw_data and as {next(iter(fields))}")
        if wanted != have:
            raise ImportModelError(
                f"{where} declares {list(tensor.dims)} of {type_name(tensor.data_type)}, {wanted} bytes, but has {have}"
            )
        return
    if tensor.data_type == TensorProto.STRING:
        place, wanted = "string_data", count
        _check_text(tensor.string_data, where)
    else:
        nbytes = nbytes_of(tensor, where)
        each = next(
            ((name, kinds[tensor.data_type]) for name, kinds in _TYPED.items() if tensor.data_type in kinds), None
        )
        packed = tensor.data_type in _PACKED_BITS
        place, wanted = (each[0], count * each[1]) if each else ("int32_data", nbytes if packed else count)
    if sum(fields.values()) != wanted or any(name != place for name in fields):
        shown = ", ".join(f"{n} in {name}" for name, n in fields.items()) or "none"
        raise ImportModelError(f"{where} declares {list(tensor.dims)}, {wanted} numbers in {place}, but has {shown}")


def _check_text(items: Iterable[bytes], where: str) -> None:
    try:
        for item in items:
            item.decode()
    except UnicodeDecodeError as error:
        raise ImportModelError(f"{where} has a string that is no text: {error}") from error


# ---------------------------------------------------------------- trees


def _check_trees(attributes: Any, label: str) -> None:
    """Check that trees are trees: ONNX's reference follows the references of nodes until it meets a leaf."""
    lists = {at.name: at.ints or at.floats or at.strings for at in attributes if at.name.startswith("nodes_")}
    count = len(lists["nodes_truenodeids"])
    if any(len(each) not in (0, count) for each in lists.values()):
        raise ImportModelError(f"{label}: its lists of nodes differ in length")
    trees = lists.get("nodes_treeids") or [0] * count
    numbers = lists.get("nodes_nodeids") or range(count)
    modes = lists.get("nodes_modes") or [b""] * count
    children: dict[tuple[int, int], list[tuple[int, int]]] = {pair: [] for pair in zip(trees, numbers, strict=True)}
    for side in ("true", "false"):
        ends = lists.get(f"nodes_{side}nodeids") or [0] * count
        leaves = lists.get(f"nodes_{side}leafs") or [mode == b"LEAF" for mode in modes]
        for tree, number, end, leaf in zip(trees, numbers, ends, leaves, strict=True):
            if not leaf:
                children[tree, number].append((tree, end))
    before = dict.fromkeys(children, 0)
    for child in (child for each in children.values() for child in each):
        if child not in before:
            raise ImportModelError(f"{label}: a node leads to the node {child[1]} of tree {child[0]}, which is missing")
        before[child] += 1
    waiting = [node for node, parents in before.items() if not parents]
    for node in waiting:
        for child in children[node]:
            before[child] -= 1
            if not before[child]:
                waiting.append(child)  # the loop goes on with it
    if len(waiting) < len(children):
        raise ImportModelError(f"{label}: a node of a tree leads back to itself")
