"""Sums and products with one constant number: functions of the other operand, which need no operand of their own."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from fmtprop.ir import Graph, Node
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Eltwise, emit
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import bypass, constant


@dataclass(frozen=True)
class SingleNumbers(NodePass):
    """Make a linear function of a sum, difference or product whose second operand is a single constant number.

    Importers do so for numbers that a program has. Quantized programs have them as integers with a scale, such as the
    factor of attention's scores.

    Requires folded constants. Ensures nothing: other nodes stay.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        attrs, inputs = node.attrs, graph.inputs(node.name)
        if not isinstance(attrs, Binary) or node.op != "binary" or node.post_ops or node.exact:
            return
        second = inputs["src_1"]
        if node.results[0].dtype is not DataType.F32 or graph.type_of(second).size != 1:
            return
        tensor = constant(graph, second)
        number = None if tensor is None or graph.type_of(inputs["src_0"]) != node.results[0] else float(tensor.item())
        if number is None or not isfinite(number):
            return
        functions = {"add": (1.0, number), "sub": (1.0, -number), "mul": (number, 0.0)}
        if attrs.alg in functions:
            function = Eltwise("linear", *functions[attrs.alg])
            bypass(graph, node, [emit(graph, "eltwise", {"src": inputs["src_0"]}, function, origin=node.origin)])
