"""Export of graphs at any stage as ONNX models: a plan's formats, implementations and reorders are their metadata.

Owns names, types and metadata of the model. The nodes of an op come from its declaration, or from
:mod:`fmtprop.onnx.model.traced`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import onnx
from onnx import checker, helper

import fmtprop
from fmtprop.errors import GraphError, UnsupportedOpError
from fmtprop.ir import Attrs, Graph, Node, Onnx, PostOp, TensorType, Value, opdef, result_names
from fmtprop.ir.post_ops import named_operands, types_along
from fmtprop.ir.tensors import materialise, torch_dtype
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.onnx.model.elements import number_of
from fmtprop.onnx.model.traced import NodesByOp
from fmtprop.onnx.model.writing import OPSET, GraphWriter, note
from fmtprop.ops.sum import Sum
from fmtprop.system.files import check_replaceable, replacing

#: the first version of ONNX's file format with metadata of nodes and values
_IR_VERSION: Final = 10
_PRODUCER: Final = "fmtprop"
#: the beginning of a file that this module wrote: IR version and producer
OURS: Final = re.compile(rb"\x08.\x12\x07" + _PRODUCER.encode(), re.DOTALL)
#: larger weights are in a separate file: protobuf's limit is 2 GiB
MOST_INLINE_NBYTES: Final = 1 << 30
#: a pattern that matches no file
_NOTHING: Final = re.compile(rb"(?!)")
_NARROW: Final = frozenset({DataType.BF16, DataType.F16})


def save(graph: Graph, path: Path) -> None:
    """Write a graph as an ONNX file; weights of more than 1 GiB go to a second file, with the suffix ``.onnx.data``.

    Raises UnsupportedOpError if ONNX cannot express a node; the message names it; GraphError if a constant has no data;
    OSError if the file system refuses.
    """
    check_replaceable(path, OURS)
    model = model_of(graph)
    large = sum(len(proto.raw_data) for proto in model.graph.initializer) > MOST_INLINE_NBYTES
    if not large:
        checker.check_model(model, full_check=True)
        with replacing(path, OURS) as temporary:
            temporary.write_bytes(model.SerializeToString())
        return
    data = path.with_name(f"{path.name}.data")
    # the data file of a model that this module wrote may be replaced too
    with replacing(path, OURS) as temporary, replacing(data, None if path.exists() else _NOTHING) as weights:
        onnx.external_data_helper.convert_model_to_external_data(model, location=weights.name, size_threshold=1024)
        onnx.external_data_helper.write_external_data_tensors(model, str(path.parent))
        for proto in model.graph.initializer:
            for entry in proto.external_data:
                entry.value = data.name if entry.key == "location" else entry.value
        temporary.write_bytes(model.SerializeToString())


def model_of(graph: Graph) -> onnx.ModelProto:
    """Return a graph as an ONNX model.

    `graph`: a graph at any stage. Inputs and outputs keep their names, types and order; 16-bit floats are computed in
    f32, and rounded at the same places as in the graph. Result: each node has the metadata ``fmtprop.node`` and
    ``fmtprop.op``; of a formatted graph also the implementation, the format of each operand and result, the reason and
    the cost. A reorder is an ``Identity``.
    """
    return _Export(graph).model()


class _Export:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.writer = graph, GraphWriter()
        if any(node.phase for node in graph.nodes()):
            raise UnsupportedOpError(f"graph {graph.name} is a step of training with two entry points; ONNX has one")
        self.names: dict[Value, str] = {}
        steps = [node for node in graph.nodes() if not node.is_boundary]
        self.traced = NodesByOp((node, self._types(node)) for node in steps if opdef(node.op).onnx is None)
        for node in graph.nodes():
            self.writer.declare(node.name, node.results[0] if node.results else TensorType(()))
        for node in graph.output_nodes:  # a value has the name of the output that it is
            source = self._source(node)
            if not graph.node(source.node).is_boundary:
                self.names.setdefault(source, node.name)

    def model(self) -> onnx.ModelProto:
        graph, writer = self.graph, self.writer
        for node in graph.nodes():
            if node.op == "constant":
                self.names[Value(node.name)] = self._constant(node)
            elif node.op == "input":
                self.names[Value(node.name)] = node.name
            elif node.op != "output":
                self._node(node)
        for node in graph.output_nodes:
            self._output(node)
        writer.drop_dead({node.name for node in graph.output_nodes})
        proto = helper.make_graph(
            writer.nodes,
            graph.name,
            [self._info(node.name, node.results[0]) for node in graph.input_nodes],
            [self._info(node.name, graph.type_of(self._source(node))) for node in graph.output_nodes],
            initializer=list(writer.constants.values()),
            value_info=self._values(),
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(
            proto,
            producer_name=_PRODUCER,
            producer_version=fmtprop.__version__,
            ir_version=_IR_VERSION,
            opset_imports=[opset],
        )

    # ------------------------------------------------------------------ nodes

    def _source(self, output: Node) -> Value:
        return self.graph.inputs(output.name)["src"]

    def _types(self, node: Node) -> dict[str, TensorType]:
        inputs = self.graph.inputs(node.name).items()
        return {name: self.graph.type_of(value) for name, value in inputs if name not in node.tail}

    def _constant(self, node: Node) -> str:
        if node.name not in self.graph.constants:
            raise GraphError(
                f"{node.label} has no data any more: it was released after packing; save the graph that was compiled, "
                "or net.compilation.with_constants()"
            )
        self.writer.weights(node.name, materialise(self.graph.constants[node.name], node.results[0]))
        return node.name

    def _node(self, node: Node) -> None:
        writer, declaration = self.writer, opdef(node.op)
        types = {name: self.graph.type_of(value) for name, value in self.graph.inputs(node.name).items()}
        operands = {name: self.names[value] for name, value in self.graph.inputs(node.name).items()}
        own = {name: value for name, value in operands.items() if name not in node.tail}
        before, (dst, *_) = types_along(node, types)
        first = len(writer.nodes)
        writer.stem = node.name
        if declaration.onnx is None:
            results = self.traced.write(writer, node, own)
        elif declaration.onnx.moves:
            results = [self._written(declaration.onnx, node.attrs, own)]
        else:
            results = [self._written(declaration.onnx, node.attrs, {name: self._wide(v) for name, v in own.items()})]
            dst = _widened(dst)
        for post_op, type_ in zip(node.post_ops, before, strict=True):
            results[0] = self._post_op(results[0], _widened(type_), post_op, operands)
            dst = _widened(node.results[0])
        if dst.dtype is not node.results[0].dtype:
            writer.declare(results[0], dst)
            results[0] = writer.cast(results[0], node.results[0].dtype.value)
        for index, (result, type_) in enumerate(zip(results, node.results, strict=True)):
            self._name(result, Value(node.name, index), type_, first)
        written = writer.nodes[first:]
        if len(written) == 1:
            written[0].name = node.name
        for made in written:
            note(made, _facts(node))

    def _wide(self, value: str) -> str:
        return self.writer.cast(value, _widened(self.writer.type(value)).dtype.value)

    def _written(self, onnx_: Onnx, attrs: Attrs, operands: Mapping[str, str]) -> str:
        self.writer.dtype = self.writer.type(next(iter(operands.values()))).dtype
        return onnx_.write(attrs, self.writer, operands)

    def _post_op(self, dst: str, type_: TensorType, post_op: PostOp, operands: Mapping[str, str]) -> str:
        """Write a post-op on the result before it, with the meaning of :func:`fmtprop.ops.evaluate.apply_post_op`."""
        declaration = opdef(post_op.op)
        if declaration.onnx is None:
            raise UnsupportedOpError(f"a post-op {post_op.op} has no ONNX nodes; save the graph as .json")
        self.writer.declare(dst, type_)
        added = [self._wide(operands[name]) for name in post_op.operands]
        attrs = post_op.attrs
        given = named_operands(post_op, (dst, *added))
        if isinstance(attrs, Sum):  # a post-op has only the factor of the other source
            given, attrs = {"src_0": dst, "src_1": added[0]}, Sum((1.0, *attrs.scales))
        return self._written(declaration.onnx, attrs, given)

    # ------------------------------------------------------------------ names

    def _name(self, result: str, value: Value, type_: TensorType, first: int) -> None:
        """Record the name of a result; a result of the newest nodes gets the name of its value."""
        made = {name for node in self.writer.nodes[first:] for name in node.output}
        if result not in made or result in self.names.values():
            self.names[value] = result
            return
        name = self.names.get(value) or (value.node if value.index == 0 else self.writer.fresh(str(value)))
        self.writer.rename(result, name, first)
        self.writer.declare(name, type_)
        self.names[value] = name

    def _output(self, node: Node) -> None:
        source = self.names[self._source(node)]
        if source != node.name:
            self.writer.append(helper.make_node("Identity", [source], [node.name], name=node.name))

    # ------------------------------------------------------------------ types

    def _info(self, name: str, type_: TensorType) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, number_of(torch_dtype(type_.dtype)), type_.dims)

    def _values(self) -> list[onnx.ValueInfoProto]:
        """Return the types and formats of the values between inputs and outputs."""
        outputs = {node.name for node in self.graph.output_nodes}
        made = {name for node in self.writer.nodes for name in node.output}
        infos = []
        for value, name in self.names.items():
            if name not in made or name in outputs:
                continue
            info = self._info(name, self.graph.type_of(value))
            node = self.graph.node(value.node)
            if node.descs:
                note(info, {"format": _format(node.descs[value.index])})
            infos.append(info)
            made.discard(name)
        return infos


def _widened(type_: TensorType) -> TensorType:
    return type_.with_dtype(DataType.F32) if type_.dtype in _NARROW else type_


def _format(desc: MemoryDesc) -> str:
    return str(desc.tag or desc)


def _facts(node: Node) -> dict[str, str]:
    """Return a node's metadata for viewers."""
    facts = {"node": node.name, "op": node.op, "origin": node.origin}
    facts["post_ops"] = ", ".join(post_op.op for post_op in node.post_ops)
    if node.choice is not None:
        choice = node.choice
        facts |= {f"format.{name}": _format(desc) for name, desc in choice.operands.items()}
        facts |= {"target": choice.target, "implementation": choice.impl, "reason": choice.reason}
        facts["cost_us"] = f"{choice.cost * 1e6:.3g}"
    facts |= {f"format.{name}": _format(desc) for name, desc in zip(result_names(node), node.descs, strict=False)}
    return facts
