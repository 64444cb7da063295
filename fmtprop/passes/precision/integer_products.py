"""Integer products whose sums are read as real numbers become products of the whole numbers themselves.

torchao's modules add 128 to signed rows, since PyTorch's fast product takes unsigned ones, and subtract what that added
to the sums. Here a product may be of any bytes, so both go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Dequantize, MatMul, Reshape
from fmtprop.ops.host_call import CallOperand, HostCall, arguments_of, is_conversion
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, constant, insert, new_constant
from fmtprop.passes.precision.mark_grids import LIMITS
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities

_PRODUCT = "aten._int_mm.default"

#: call that adds a constant -> sign of the constant
_SUMS = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}


@dataclass(frozen=True)
class IntegerProducts(Pass):
    """Make a product of real numbers of each integer product with constant weights, of which the sums become f32.

    Runs before :class:`~fmtprop.passes.precision.pair_quantization.PairQuantization`, which finds the numbers for which
    bytes stand.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        if not any(_is_product(node) for node in graph.nodes()):
            return graph
        graph = graph.copy()
        for node in graph.nodes():
            if is_conversion(node.attrs) and node.results[0].dtype is DataType.F32:
                _rewrite(graph, node)
        graph.remove_dead()
        return RemoveIdentities().run(graph)  # some of the reshapes are parts of others


def _is_product(node: Node) -> bool:
    return isinstance(node.attrs, HostCall) and node.attrs.target == _PRODUCT


def _rewrite(graph: Graph, conversion: Node) -> None:
    """Replace the conversion of integer sums to f32."""
    sums, behind = _apart(graph, *graph.inputs(conversion.name).values())
    product = graph.node(sums.node)
    if not _is_product(product) or graph.type_of(sums).dtype is not DataType.S32:
        return
    given, weights = graph.inputs(product.name).values()
    src, before = _apart(graph, given)
    codes, types = constant(graph, weights), [graph.type_of(value).dtype for value in (given, src, weights)]
    if codes is None or not set(types) <= LIMITS.keys():
        return
    (least, largest), (low, high) = (LIMITS[dtype] for dtype in types[:2])
    rest = behind + before * codes.to(torch.int64).sum(0, keepdim=True)
    if before.numel() != 1 or not least <= low + before or not high + before <= largest or rest.any():
        return
    one = new_constant(graph, torch.ones(()), conversion)
    operands = {}
    for name, value in (("src", src), ("weights", weights)):
        numbers = insert(graph, conversion, Dequantize(), src=value, scale=one)
        # as one batch: then a factor of each row is a post-op for which oneDNN has code
        operands[name] = insert(graph, conversion, Reshape((1, *graph.type_of(value).dims)), src=numbers)
    made = insert(graph, conversion, MatMul(), **operands)
    bypass(graph, conversion, [insert(graph, conversion, Reshape(conversion.results[0].dims), src=made)])


def _apart(graph: Graph, value: Value) -> tuple[Value, torch.Tensor]:
    """Return the integers to which constants were added, and the sum of these."""
    summand = torch.zeros((), dtype=torch.int64)
    while True:
        node, sources = graph.node(value.node), tuple(graph.inputs(value.node).values())
        if not sources or graph.type_of(sources[0]).dtype not in (*LIMITS, DataType.S32):
            return value, summand
        added = _added(graph, node, sources)
        if added is None:
            return value, summand
        value, summand = sources[0], summand + added


def _added(graph: Graph, node: Node, sources: tuple[Value, ...]) -> torch.Tensor | None:
    """Return the constant that a call adds to its first operand, 0 for a conversion; None for any other node."""
    if is_conversion(node.attrs):
        return torch.zeros((), dtype=torch.int64)
    if not isinstance(node.attrs, HostCall) or node.attrs.target not in _SUMS:
        return None
    arguments = arguments_of(node.attrs)
    number = arguments["other"]
    if len(sources) == 2:
        number = constant(graph, sources[1])
    if arguments["self"] != CallOperand("src_0") or arguments["alpha"] != 1 or number is None:
        return None
    tensor = torch.as_tensor(number)
    return None if tensor.is_floating_point() else _SUMS[node.attrs.target] * tensor.to(torch.int64)
