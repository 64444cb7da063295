"""Reader of ONNX models from a path, from bytes or from a ``ModelProto``, with all checks before planning.

The steps: count the file's messages, parse it, check its structure, take the weights out, check the rest with
``onnx.checker``, and inline its functions. This module owns this order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, inliner

from fmtprop.errors import ImportModelError
from fmtprop.onnx.model import limits, operators
from fmtprop.onnx.model.elements import from_proto, type_name
from fmtprop.onnx.model.structure_check import check_structure
from fmtprop.onnx.model.tensor_files import ExternalData, OwnData
from fmtprop.onnx.model.wire import check_counts
from fmtprop.system.files import opened, path_of
from fmtprop.system.printable import first_line


@dataclass(frozen=True)
class Source:
    """A model after reading."""

    #: without weights and without functions
    model: onnx.ModelProto
    weights: Mapping[str, Any]
    name: str
    #: the file's name without its extension; empty for a model in memory
    stem: str = ""
    #: the weights that are listed among the inputs, too: a run may replace them
    replaceable: frozenset[str] = frozenset()


def read_model(source: object) -> Source:
    """Read a model.

    Raises ImportModelError if it cannot be read, is no ONNX model, breaks a rule of ONNX's, or is larger than
    :mod:`fmtprop.onnx.model.limits` allows.
    """
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return _checked(copy, "the model")
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(_parsed(bytes(source), "the model"), "the model")
    file = _path(source)
    name = str(file)
    with _opened(file) as opened_file:
        if os.fstat(opened_file.fileno()).st_size <= limits.SMALL_NBYTES:
            return _checked(_parsed(opened_file.read(limits.SMALL_NBYTES), name), name, file.parent)
        own = OwnData(opened_file, name)
        model = _parsed(own.rest, name)
        own.mark(model)
        return _checked(model, name, file.parent, own)


def _checked(model: onnx.ModelProto, name: str, folder: Path | None = None, own: OwnData | None = None) -> Source:
    """Check a model, and take its weights out."""
    check_structure(model, name)
    _drop_metadata(model)
    _forget_sizes(model)
    _constants_as_initialisers(model)
    listed = {info.name for info in model.graph.input}
    weights = _take_weights(model, ExternalData(folder, name), own, name)
    whole, model = model, onnx.ModelProto()
    model.CopyFrom(whole)
    del whole  # protobuf frees deleted fields, here the weights' bytes, only with their message
    _check(model, name)
    model = _newer(model, weights, name)
    if model.functions:
        _write_defaults(model)
        model = _inlined(model, name)
    stem = Path(name).stem if folder is not None else ""
    return Source(model, weights, name, stem, frozenset(weights.keys() & listed))


def _drop_metadata(model: onnx.ModelProto) -> None:
    """Remove the notes of exporters on nodes, such as stack traces: they are most of the bytes of some models."""
    for node in model.graph.node:
        node.ClearField("metadata_props")


def _forget_sizes(model: onnx.ModelProto) -> None:
    """Let axes of the size -1 or 0 in declared types be unknown, as exporters mean them (Paddle's); others stay."""
    graphs: list[Any] = [model.graph]
    while graphs:
        graph = graphs.pop()
        for info in (*graph.input, *graph.output, *graph.value_info):
            for dim in info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ():
                if dim.HasField("dim_value") and dim.dim_value <= 0:
                    dim.ClearField("dim_value")
        graphs += [one for node in graph.node for at in node.attribute for one in (at.g, *at.graphs) if len(one.node)]


def _inlined(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    _share_opset(model)
    try:
        return inliner.inline_local_functions(model)
    except RuntimeError as error:  # a call does not fit the function
        raise ImportModelError(f"{name}: its functions cannot be written out: {error}") from error


def _share_opset(model: onnx.ModelProto) -> None:
    """Let functions import the model's opset, where this changes none of their operators: the inliner leaves others.

    The checker has refused functions with operators that it changes.
    """
    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0)
    for function in model.functions:
        for opset in function.opset_import:
            names = {node.op_type for node in _nodes(function.node) if node.domain in ("", "ai.onnx")}
            same = all(_since(name, opset.version) == _since(name, version) for name in names)
            if opset.domain in ("", "ai.onnx") and same:
                opset.version = version


def _since(name: str, opset: int) -> int:
    """Return the opset of an operator's definition in an opset; 0 if it has none there."""
    return int(onnx.defs.get_schema(name, opset).since_version) if onnx.defs.has(name, opset) else 0


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _write_defaults(model: onnx.ModelProto) -> None:
    """Give calls of functions the attributes that they leave out; the inliner takes operators' defaults (onnx 1.23)."""
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in model.functions if f.attribute_proto}
    bodies: list[Any] = [model.graph.node, *(function.node for function in model.functions)] if defaults else []
    while bodies:
        for node in bodies.pop():
            given = {attribute.name for attribute in node.attribute}
            missing = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(default for default in missing if default.name not in given)
            bodies += [graph.node for at in node.attribute for graph in (at.g, *at.graphs) if len(graph.node)]


def _path(source: object) -> Path:
    try:
        return path_of(source)
    except OSError as error:
        raise ImportModelError(f"{error.strerror}; pass a path, bytes or an onnx.ModelProto") from error


def _opened(file: Path) -> BinaryIO:
    try:
        return opened(file, limits.FILE_NBYTES)
    except FileNotFoundError as error:
        raise ImportModelError(f"{file} does not exist") from error
    except OSError as error:
        raise ImportModelError(f"{file} cannot be read: {error.strerror}") from error


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    if not data:
        raise ImportModelError(f"{name} is empty; it was probably not written to the end")
    check_counts(data, name)
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ImportModelError(
            f"{name} is no ONNX model, or is damaged: protobuf cannot read it ({error}); export it again"
        ) from error


_MICROSOFT = "com.microsoft"

#: errors of ONNX's checker, its shape inference and its converter
_INVALID = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
    ValueError,
    RuntimeError,
    TypeError,
)


def _check(model: onnx.ModelProto, name: str) -> None:
    """Check a model by ONNX's rules, except some that ONNX Runtime and exporters do not follow."""
    _name_domains(model)
    for info in filter(_is_of_unknown_rank, model.graph.input):
        raise ImportModelError(
            f"{name}: input {info.name} declares no axes, and ONNX requires them: give the input a shape, with names "
            "for sizes that change"
        )
    outputs = list(model.graph.output)
    del model.graph.output[:]
    # an output may have unknown rank; the result of its node is checked all the same
    model.graph.output.extend(info for info in outputs if not _is_of_unknown_rank(info))
    data = model.SerializeToString()
    try:
        onnx.checker.check_model(data, full_check=True)
    except _INVALID:
        # its inference is stricter than exporters are: it refuses a node for which it can tell no shape
        _check_leniently(model, name)
    del model.graph.output[:]
    model.graph.output.extend(outputs)


def _check_leniently(model: onnx.ModelProto, name: str) -> None:
    _name_graphs(model)
    data = model.SerializeToString()
    try:
        onnx.checker.check_model(data)
        onnx.shape_inference.infer_shapes(data, check_type=True)
    except _INVALID as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:4]
        raise ImportModelError(f"{name} is no valid ONNX model: {' '.join(lines)}") from error


def _is_of_unknown_rank(info: onnx.ValueInfoProto) -> bool:
    type_ = info.type
    return type_.WhichOneof("value") == "tensor_type" and not type_.tensor_type.HasField("shape")


def _name_domains(model: onnx.ModelProto) -> None:
    """Set the domain of ONNX Runtime's operators, since its optimiser writes some without."""
    found = False
    for node in model.graph.node:
        # look in our tables first: ONNX's look-up fails on bytes that are no text
        if node.domain != "" or operators.find("", node.op_type, sys.maxsize):
            continue
        if operators.find(_MICROSOFT, node.op_type, 1) and not onnx.defs.has(node.op_type):
            node.domain, found = _MICROSOFT, True
    if found and all(opset.domain != _MICROSOFT for opset in model.opset_import):
        model.opset_import.add(domain=_MICROSOFT, version=1)


def _name_graphs(model: onnx.ModelProto) -> None:
    """Name graphs without a name, and write ONNX's own domain in its short form: the checker refuses both."""
    graphs, bodies = [model.graph], [function.node for function in model.functions]
    while graphs or bodies:
        if graphs:
            graph = graphs.pop()
            if not graph.name:  # a name that is no text can be read, but not written
                graph.name = "graph"
            bodies.append(graph.node)
        for node in bodies.pop():
            if node.domain == "ai.onnx":
                node.domain = ""
            for attribute in node.attribute:
                graphs += [attribute.g] if attribute.HasField("g") else attribute.graphs


def _newer(model: onnx.ModelProto, weights: Mapping[str, Any], name: str) -> onnx.ModelProto:
    """Return a model of an older opset converted to the oldest one that is supported."""
    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), None)
    if version is None or version >= limits.OLDEST_OPSET:
        return model
    _spread_slopes(model, weights, name)
    try:
        return onnx.version_converter.convert_version(model, limits.OLDEST_OPSET)
    except _INVALID as error:
        raise ImportModelError(
            f"{name} is of opset {version}, which onnx.version_converter cannot make newer: "
            f"{first_line(error)}; export it again"
        ) from error


def _spread_slopes(model: onnx.ModelProto, weights: Mapping[str, Any], name: str) -> None:
    """Let slopes of PRelu, one for each channel before opset 7, broadcast as they do since; the converter does not."""
    old = [node for node in model.graph.node if node.op_type == "PRelu" and not _is_single(weights.get(node.input[1]))]
    if not old:
        return
    ranks = _ranks(onnx.shape_inference.infer_shapes(model).graph)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node in old:
            source, slope = ranks.get(node.input[0]), ranks.get(node.input[1])
            if source is None or slope is None:
                raise ImportModelError(
                    f"{name}: node {node.name or node.output[0]} (PRelu, opset < {limits.OLDEST_OPSET}) has a slope "
                    "for each channel, and the number of its operands' axes is unknown: export it again"
                )
            nodes += _with_spread_slope(node, source, slope)
        else:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _is_single(slope: Any) -> bool:
    return slope is not None and len(slope.reshape(-1)) <= 1


def _ranks(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the number of axes of each value, where it is known."""
    return {
        info.name: len(info.type.tensor_type.shape.dim)
        for info in (*graph.input, *graph.value_info, *graph.output)
        if info.type.tensor_type.HasField("shape")
    }


def _with_spread_slope(node: onnx.NodeProto, source: int, slope: int) -> list[onnx.NodeProto]:
    """Return a PRelu; its slope gets axes of one element behind the channels."""
    if slope != 1 or source < 3:
        return [node]
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[1] = f"{node.output[0]}/slope"
    return [helper.make_node("Unsqueeze", [node.input[1]], [copy.input[1]], axes=list(range(1, source - 1))), copy]


# ---------------------------------------------------------------- weights


def _constants_as_initialisers(model: onnx.ModelProto) -> None:
    """Make initialisers of constants that are no floats: before opset 9 they are invalid, but PyTorch wrote them."""
    if any(opset.version >= _FIRST_ANY_CONSTANT for opset in model.opset_import if opset.domain in ("", "ai.onnx")):
        return
    floats = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
    taken = {tensor.name for tensor in model.graph.initializer} | {info.name for info in model.graph.input}
    for node in list(model.graph.node):
        values = [proto.t for proto in node.attribute if proto.name == "value"]
        if node.op_type == "Constant" and len(values) == len(node.output) == 1 and node.output[0] not in taken:
            if values[0].data_type in floats or values[0].data_location == TensorProto.EXTERNAL:
                continue
            model.graph.initializer.append(values[0])
            model.graph.initializer[-1].name = node.output[0]
            model.graph.node.remove(node)


#: the first opset with constants of all types
_FIRST_ANY_CONSTANT = 9


def _take_weights(model: onnx.ModelProto, files: ExternalData, own: OwnData | None, name: str) -> dict[str, Any]:
    """Return the graph's initialisers, and replace them by inputs of their types in the model."""
    weights = {}
    inputs = {info.name: info.type.tensor_type for info in model.graph.input}
    for index, tensor in enumerate(model.graph.initializer):
        if own is not None and index in own.places:
            weights[tensor.name] = own.read(index, tensor)
        elif tensor.data_location == TensorProto.EXTERNAL:
            weights[tensor.name] = files.read(tensor, f"{name}: initialiser {tensor.name}")
        else:
            weights[tensor.name] = from_proto(tensor)
        if tensor.name in inputs:
            _check_declared(inputs[tensor.name], tensor, name)
        else:
            info = model.graph.input.add(name=tensor.name)  # onnx's helper takes thrice as long
            info.type.tensor_type.elem_type = tensor.data_type
            info.type.tensor_type.shape.SetInParent()
            dims = info.type.tensor_type.shape.dim
            for size in tensor.dims:
                dims.add(dim_value=size)
    del model.graph.initializer[:]
    return weights


def _check_declared(declared: Any, tensor: onnx.TensorProto, name: str) -> None:
    """Compare an initialiser with the input of its name."""
    sizes, number = [dim.dim_value for dim in declared.shape.dim], declared.elem_type
    other_type = number not in (0, tensor.data_type)
    other_rank = declared.HasField("shape") and len(sizes) != len(tensor.dims)
    if other_type or other_rank or any(want and want != have for want, have in zip(sizes, tensor.dims, strict=False)):
        raise ImportModelError(
            f"{name}: input {tensor.name} is {type_name(number)} {sizes}, its initialiser "
            f"{type_name(tensor.data_type)} {list(tensor.dims)[:8]}"
        )
