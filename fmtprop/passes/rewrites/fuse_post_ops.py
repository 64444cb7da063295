"""Fusion: element-wise ops become post-ops of the primitive that produces their source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fmtprop.ir import Attrs, Graph, Node, PostOp, Value, linear_of, loses_special_values, opdef, post_op_operand
from fmtprop.ir.aliasing import aliases, overwrite_hazard, storage
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops import FakeQuantize, Sum
from fmtprop.ops.binary import COMMUTATIVE, Binary
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, is_constant, only_reader
from fmtprop.passes.precision.mark_grids import is_rounded, keeps_numbers
from fmtprop.passes.target import Target, is_optimized

#: oneDNN's limit of post-ops, of which a rounding is four
_LIMIT, _OF_ROUNDING = 32, 4


@dataclass(frozen=True)
class FusePostOps(Pass):
    """Absorb eltwise, binary, prelu and residual additions into the op before them, in chains.

    A node is absorbed if the producer's result has no other reader, both results have the same type, and the
    producer's op can absorb it. An addition of a tensor that may be overwritten becomes ``sum`` if it is the first
    post-op; ``sum`` reads the tensor from the destination's buffer. Otherwise it becomes ``binary``: its operand has
    the dims of dst, or varies along one axis (the channels, or a matmul's last), or along none. If both producers of
    an addition could absorb it, the later one does. Slopes of a prelu are constants, one per channel. Rounded
    element-wise results absorb nothing.

    Requires a well-formed graph without formats; after folding of batch normalizations, more can be absorbed. Ensures
    that no absorbable node is left. There can be no cycle, since only the absorbed node read the producer.

    oneDNN developer guide, "Primitive Attributes: Post-ops".
    """

    #: the executing target. With it, a node is absorbed only if the target has optimized code for both together;
    #: otherwise two nodes with separate implementations are better than reference loops. Without it, a node that must
    #: not lose special values is never absorbed.
    target: Target | None = None
    #: the fused graph of another shape of the model. The target is not asked about nodes that it has, too.
    like: Graph | None = None
    #: node and post-ops, of any shape of the model -> whether the target runs them well together
    answers: dict[object, bool] = field(default_factory=dict, compare=False)

    def run(self, graph: Graph) -> Graph:
        """Return the fused graph."""
        graph = graph.copy()
        nodes = graph.nodes()
        # once: to put a large graph in order again after each fusion takes longer than all else that this pass does
        ranks = {node.name: rank for rank, node in enumerate(nodes)}
        known: dict[object, bool] = {}
        for node in nodes:
            form = None if node.is_boundary or node.post_ops else opdef(node.op).as_post_op
            # only a policy that compares costs fuses a convolution into a convolution
            if form is None or form.kind == "convolution":
                continue
            for fusion in _fusions(graph, node, ranks):
                if self._fits(graph, node, fusion) and self._is_optimized(graph, node, fusion, known):
                    self._absorb(graph, node, fusion)
                    break
        return graph

    def _is_optimized(self, graph: Graph, node: Node, fusion: _Fusion, known: dict[object, bool]) -> bool:
        """Return whether the target runs a node well with a further post-op; it is asked once for equal nodes."""
        loses = node.exact and loses_special_values(node)
        if loses and not graph.node(fusion.producer.node).exact:
            return False  # the fused node would not be exact
        if self.target is None:
            return not loses
        fused, added = self._fused(graph, node, fusion)
        if self.like is not None and fused.name in self.like:
            other = self.like.node(fused.name)
            wanted, found = _tail(fused), _tail(other)
            if "convolution" in found:  # the post-ops before it are another node's
                found = found[found.index("convolution") + 1 :]
            if other.op == fused.op:
                return wanted == found[: len(wanted)]
            if other.op != fused.op and wanted == found[: len(wanted)]:  # the last of several nodes in place of this
                return True
        tail = tuple((one.op, one.attrs, one.operands) for one in fused.post_ops)
        named = fused.name, fused.op, fused.attrs, fused.exact, tail
        if self.like is not None and named in self.answers:
            return self.answers[named]
        types = {name: graph.type_of(value) for name, value in {**graph.inputs(fused.name), **added}.items()}
        key = fused.op, fused.attrs, fused.results, fused.exact, tail, tuple(types.items())
        if key not in known:
            known[key] = is_optimized(self.target, fused, types)
        self.answers[named] = known[key]
        return known[key]

    def _fits(self, graph: Graph, node: Node, fusion: _Fusion) -> bool:
        producer = graph.node(fusion.producer.node)
        if producer.is_boundary or len(producer.results) != 1 or producer.results != node.results:
            return False
        if only_reader(graph, fusion.producer) is None or _count(producer.post_ops) + _count([fusion]) > _LIMIT:
            return False
        if producer.op == "binary" and not _is_compiled(graph, producer):
            return False
        if isinstance(fusion.attrs, FakeQuantize) and keeps_numbers(producer) and is_rounded(graph, fusion.producer):
            return False  # such a producer moves bytes, but cannot round them to another grid
        if opdef(producer.op).elementwise and is_rounded(graph, fusion.producer):
            return False  # alone, such a producer may be a table, or compute with bytes
        declaration, form = opdef(producer.op), opdef(fusion.op).as_post_op
        if form is None or not declaration.absorbs.wanted:
            return False
        if self._sum_in_place(graph, node, fusion):
            return True
        if form.kind not in declaration.absorbs.kinds:
            return False
        algs = declaration.absorbs.algs
        if form.kind == "eltwise" and algs is not None and getattr(node.attrs, "alg", "") not in algs:
            return False
        if fusion.operand is None:
            return True
        if form.kind == "prelu":
            return _are_slopes(graph, fusion.operand, node.results[0])
        return _broadcasts(graph, fusion.operand, producer)

    def _sum_in_place(self, graph: Graph, node: Node, fusion: _Fusion) -> bool:
        producer, operand = graph.node(fusion.producer.node), fusion.operand
        if operand is None or not isinstance(fusion.attrs, Binary) or fusion.attrs.alg != "add":
            return False
        # After another post-op, most of oneDNN's kernels refuse a sum but accept a binary.
        if "sum" not in opdef(producer.op).absorbs.kinds or producer.post_ops:
            return False
        if graph.type_of(operand) != node.results[0]:
            return False
        # A part of a buffer rarely has a result's format: a sum would copy it, but a binary reads it in place.
        if graph.type_of(storage(graph, operand)).size != node.results[0].size:
            return False
        # Once the producer reads the operand, the edges order the operand's ancestors before the producer.
        operand_name = next(name for name, value in graph.inputs(node.name).items() if value == operand)
        if overwrite_hazard(graph, operand, node.name, operand_name):
            return False
        shared = set(aliases(graph, operand))
        return not any(value in shared for value in graph.inputs(producer.name).values())

    def _fused(self, graph: Graph, node: Node, fusion: _Fusion) -> tuple[Node, dict[str, Value]]:
        """Return the producer with one more post-op, and the post-op's operand."""
        producer = graph.node(fusion.producer.node)
        op, attrs = fusion.op, fusion.attrs
        if self._sum_in_place(graph, node, fusion):
            op, attrs = "sum", Sum((1.0,))
        name = None if fusion.operand is None else post_op_operand(len(producer.post_ops))
        added = {name: fusion.operand} if name is not None and fusion.operand is not None else {}
        return producer.with_(post_ops=(*producer.post_ops, PostOp(op, attrs, name, node.origin))), added

    def _absorb(self, graph: Graph, node: Node, fusion: _Fusion) -> None:
        fused, added = self._fused(graph, node, fusion)
        bypass(graph, node, [fusion.producer])
        if added:
            graph.set_inputs(fused.name, {**graph.inputs(fused.name), **added})
        graph.replace(fused)


def _count(post_ops: Iterable[PostOp | _Fusion]) -> int:
    return sum(_OF_ROUNDING if isinstance(one.attrs, FakeQuantize) else 1 for one in post_ops)


def _tail(node: Node) -> list[str]:
    """Return the ops of a node's post-ops; a sum may have become an addition since."""
    return ["binary" if post_op.op == "sum" else post_op.op for post_op in node.post_ops]


class _Fusion(NamedTuple):
    """One way to absorb a node: the producer, the post-op, and its other operand."""

    producer: Value
    op: str
    attrs: Attrs
    operand: Value | None


def _fusions(graph: Graph, node: Node, ranks: Mapping[str, int]) -> list[_Fusion]:
    """Return the ways to absorb a node, the best first."""
    inputs = graph.inputs(node.name)
    if node.op != "binary":
        source, *others = inputs.values()
        if node.op == "sum":
            return _sums(node, inputs, ranks)
        return [_Fusion(source, node.op, node.attrs, others[0] if others else None)]
    found = [_Fusion(inputs["src_0"], "binary", node.attrs, inputs["src_1"])]
    if isinstance(node.attrs, Binary) and node.attrs.alg in COMMUTATIVE:
        found.append(_Fusion(inputs["src_1"], "binary", node.attrs, inputs["src_0"]))
    return _latest_first(found, ranks)


def _sums(node: Node, inputs: dict[str, Value], ranks: Mapping[str, int]) -> list[_Fusion]:
    """Return the ways to absorb an unweighted sum of two tensors, which is an addition."""
    if not isinstance(node.attrs, Sum) or node.attrs.scales != (1.0, 1.0):
        return []
    a, b = inputs["src_0"], inputs["src_1"]
    add = Binary("add")
    return _latest_first([_Fusion(a, "binary", add, b), _Fusion(b, "binary", add, a)], ranks)


def _latest_first(found: list[_Fusion], ranks: Mapping[str, int]) -> list[_Fusion]:
    return sorted(found, key=lambda fusion: -ranks[fusion.producer.node])


def _is_compiled(graph: Graph, binary: Node) -> bool:
    """Return whether oneDNN has optimized code for the broadcast of a binary op's second source."""
    dims, dst = graph.type_of(graph.inputs(binary.name)["src_1"]).dims, binary.results[0].dims
    wide = {axis for axis, size in enumerate(dims) if size != 1}
    return dims == dst or (wide <= {0, 1} and 1 in wide) or wide <= {len(dst) - 1}


def _are_slopes(graph: Graph, operand: Value, dst: TensorType) -> bool:
    """Return whether a prelu post-op can read its slopes: constant f32 numbers, one per channel."""
    type_ = graph.type_of(operand)
    per_channel = tuple(size if axis == 1 else 1 for axis, size in enumerate(dst.dims))
    return is_constant(graph, operand) and type_.dtype is DataType.F32 and type_.dims == per_channel


def _broadcasts(graph: Graph, operand: Value, producer: Node) -> bool:
    """Return whether optimized implementations accept the shape of a binary post-op's operand."""
    dims, dst = graph.type_of(operand).dims, producer.results[0]
    linear = linear_of(producer)
    axes = {1} if linear is None else {1, linear.output_axis(dst.ndim)}
    if dims == dst.dims:
        return True
    if len(dims) != dst.ndim:
        return False
    wide = [axis for axis, size in enumerate(dims) if size != 1]
    return all(dims[axis] == dst.dims[axis] and axis in axes for axis in wide) and len(wide) <= 1
