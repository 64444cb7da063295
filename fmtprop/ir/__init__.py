"""The op graph: types, nodes, the graph itself, the op contract, the verifier and the graph file."""

from fmtprop.ir.graph import Graph
from fmtprop.ir.importing import Call, Importer
from fmtprop.ir.node import Attrs, Choice, Node, PostOp, Value
from fmtprop.ir.op import OPSET, Category, Lowering, OpDef, Operand, Sample, opdef
from fmtprop.ir.ports import Port, Role, port, ports, result_names, sources
from fmtprop.ir.types import TensorType

__all__ = [
    "OPSET",
    "Attrs",
    "Call",
    "Category",
    "Choice",
    "Graph",
    "Importer",
    "Lowering",
    "Node",
    "OpDef",
    "Operand",
    "Port",
    "PostOp",
    "Role",
    "Sample",
    "TensorType",
    "Value",
    "opdef",
    "port",
    "ports",
    "result_names",
    "sources",
]
