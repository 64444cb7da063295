"""The op graph: types, nodes, the graph itself, the op contract, the verifier and the graph file."""

from fmtprop.ir.exporting import Onnx, Writing
from fmtprop.ir.facets import Bytes, Cost, Linear, Reads, each_image, each_image_across_axis
from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.importing import Call, Importer
from fmtprop.ir.node import Attrs, Choice, Into, Node, PostOp, Value, post_op_operand
from fmtprop.ir.op import (
    OPSET,
    Category,
    Lowering,
    NativeAttr,
    Natives,
    OpDef,
    Operand,
    PostOpForm,
    Primitive,
    Sample,
    linear_of,
    loses_special_values,
    opdef,
)
from fmtprop.ir.ports import Port, Role, port, ports, result_names, sources
from fmtprop.ir.types import TensorType

__all__ = [
    "OPSET",
    "Attrs",
    "Bytes",
    "Call",
    "Category",
    "Choice",
    "Cost",
    "Graph",
    "Grid",
    "Importer",
    "Into",
    "Linear",
    "Lowering",
    "NativeAttr",
    "Natives",
    "Node",
    "Onnx",
    "OpDef",
    "Operand",
    "Port",
    "PostOp",
    "PostOpForm",
    "Primitive",
    "Reads",
    "Role",
    "Sample",
    "TensorType",
    "Value",
    "Writing",
    "each_image",
    "each_image_across_axis",
    "linear_of",
    "loses_special_values",
    "opdef",
    "port",
    "ports",
    "post_op_operand",
    "result_names",
    "sources",
]
