"""Recognition of RMS normalization, which models write out and PyTorch's exporter decomposes."""

from __future__ import annotations

from dataclasses import dataclass

from fmtprop.ir import Graph, Node, Value
from fmtprop.layout import DataType
from fmtprop.ops import Binary, Eltwise, Reduction, Reorder, RmsNorm
from fmtprop.passes.base import NodePass
from fmtprop.passes.editing import (
    bypass,
    insert,
    is_constant,
    is_square,
    only_reader,
    own_producer,
    viewed_constant,
    widened,
)

#: function of the mean -> the use of its result: a factor, or a divisor
_ROOTS = {("pow", -0.5): "mul", ("pow", 0.5): "div", ("sqrt", 0.0): "div"}


@dataclass(frozen=True)
class RecogniseRmsNorm(NodePass):
    """Replace ``x / sqrt(mean of x² over the last axis + epsilon) * scale`` by one ``rms_normalization``.

    Requires folded constants, and a graph before fusion. Ensures that no such chain is left, unless its inner values
    have other readers. A scale that is no constant vector stays a product of its own. Conversions to f32 before it and
    back behind it, as in a model in bf16, are part of it.

    ``torch.nn.functional.rms_norm``.
    """

    def _visit(self, graph: Graph, node: Node) -> None:
        if isinstance(node.attrs, Binary) and node.attrs.alg in ("mul", "div"):
            _recognise(graph, node, node.attrs.alg)
        elif isinstance(node.attrs, RmsNorm):
            _narrow(graph, node)


def _recognise(graph: Graph, product: Node, alg: str) -> None:
    operands = graph.inputs(product.name)
    pairs = [(operands["src_0"], operands["src_1"]), (operands["src_1"], operands["src_0"])]
    for src, root in pairs if alg == "mul" else pairs[:1]:
        epsilon = _epsilon(graph, src, root, alg)
        if epsilon is not None and graph.type_of(src) == product.results[0]:
            last, inputs = product, {"src": src}
            scaled = _scaled(graph, product)
            if scaled is not None:
                last, vector = scaled
                inputs["scale"] = viewed_constant(graph, vector, lambda data: data.reshape(-1), last, last.origin)
            made = insert(graph, last, RmsNorm(epsilon), **inputs)
            bypass(graph, last, [made])
            _narrow(graph, graph.node(made.node))
            return


def _narrow(graph: Graph, normalization: Node) -> None:
    """Let a normalization between conversions, as models in bf16 write it, read and write their type itself.

    It computes in f32 in any case. A scale in the narrow type, behind the conversion back, becomes its own.
    """
    inputs = graph.inputs(normalization.name)
    widening = graph.node(inputs["src"].node)
    back = only_reader(graph, Value(normalization.name))
    if back is None or not isinstance(widening.attrs, Reorder) or not isinstance(back.attrs, Reorder):
        return
    src = graph.inputs(widening.name)["src"]
    narrow = graph.type_of(src)
    if narrow != back.results[0] or narrow.dtype not in (DataType.BF16, DataType.F16):
        return
    last, inputs = back, {**inputs, "src": src}
    scaled = _scaled(graph, back) if "scale" not in inputs else None
    if scaled is not None:
        last, vector = scaled
        row = viewed_constant(graph, vector, lambda data: data.reshape(-1), last, last.origin)
        inputs["scale"] = widened(graph, row, last)
    bypass(graph, last, [insert(graph, last, normalization.attrs, **inputs)])


def _epsilon(graph: Graph, src: Value, root: Value, alg: str) -> float | None:
    """Return the number that is added to the mean of the squares of src; None if `root` is another value."""
    node = own_producer(graph, root)
    attrs = None if node is None else node.attrs
    if not isinstance(attrs, Eltwise) or _ROOTS.get((attrs.alg, attrs.beta)) != alg or attrs.alpha not in (0.0, 1.0):
        return None
    epsilon, node = 0.0, own_producer(graph, graph.inputs(node.name)["src"]) if node else None
    if node is not None and isinstance(node.attrs, Eltwise) and (node.attrs.alg, node.attrs.alpha) == ("linear", 1.0):
        epsilon, node = node.attrs.beta, own_producer(graph, graph.inputs(node.name)["src"])
    last = graph.type_of(src).ndim - 1
    if node is None or node.attrs != Reduction("mean", (last,)):
        return None
    squares = own_producer(graph, graph.inputs(node.name)["src"])
    return epsilon if squares is not None and is_square(graph, squares, src) else None


def _scaled(graph: Graph, product: Node) -> tuple[Node, Value] | None:
    """Return the only reader of a normalized tensor and its vector, if it is a product with one."""
    reader, value = only_reader(graph, Value(product.name)), Value(product.name)
    if reader is None or not isinstance(reader.attrs, Binary) or reader.attrs.alg != "mul":
        return None
    (vector,) = [one for one in graph.inputs(reader.name).values() if one != value]
    type_, dims = graph.type_of(vector), product.results[0].dims
    is_vector = type_.dims[-1:] == dims[-1:] and type_.size == dims[-1] and type_.dtype == product.results[0].dtype
    return (reader, vector) if is_vector and is_constant(graph, vector) else None
