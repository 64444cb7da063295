"""A ReLU or a clip behind a batch normalization in training, as a part of it; and its gradient likewise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from fmtprop.ir import Graph, Node, Value, result_names
from fmtprop.ops.batch_norm_training import BatchStatistics
from fmtprop.ops.eltwise import Eltwise
from fmtprop.ops.eltwise_backward import EltwiseGradient
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass, only_reader
from fmtprop.passes.target import Costs, Setting

#: returns a node with the way to run it on inputs; None if there is none
_Settle = Callable[[Node, Mapping[str, Value]], "Node | None"]


@dataclass(frozen=True)
class NormWithFunction(Pass):
    """Fuse functions with limits into the batch normalizations before them.

    The forward normalization is fused if nothing else reads its numbers. Its gradient is fused with the function's if
    nothing else reads that one; then the limited numbers are computed again, so nothing is kept for it.

    Normal graph to normal graph; without such a pair, the same object.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph, or the same one."""
        out = graph.copy()
        found = [self._fuse(out, node.name) for node in graph.nodes() if _is_bare(node)]
        return out if any(found) else graph

    def run_formatted(self, formatted: Graph, setting: Setting, costs: Costs) -> Graph:
        """Return a formatted graph with each pair fused that a kernel runs in these formats; without one, the same."""
        out = formatted.copy()
        settle = partial(_settled, out, setting, costs)
        found = [self._fuse(out, node.name, settle) for node in formatted.nodes() if _is_bare(node)]
        return out if any(found) else formatted

    def _fuse(self, graph: Graph, name: str, settle: _Settle = lambda node, inputs: node) -> bool:
        function, norm, own = _function_behind(graph, name), graph.node(name), Value(name)
        if function is None or not isinstance(function.attrs, Eltwise) or not isinstance(norm.attrs, BatchStatistics):
            return False
        gradients = _gradients(graph, norm, function)
        if any(reader not in {function.name, *gradients} for reader, _ in graph.readers(own)):
            return False
        attrs = replace(norm.attrs, function=function.attrs.alg, alpha=function.attrs.alpha, beta=function.attrs.beta)
        shift = graph.inputs(name).get("shift")
        whole = replace(norm, attrs=attrs, descs=(*function.descs[:1], *norm.descs[1:]))
        fused = [(settle(whole, graph.inputs(name)), graph.inputs(name))]
        for gradient, back in gradients.items():
            inputs = {**graph.inputs(back.name), "diff_dst": graph.inputs(gradient)["diff_dst"]}
            if shift is not None:
                inputs["shift"] = shift
            fused.append((settle(replace(back, attrs=attrs), inputs), inputs))
        if any(node is None for node, _ in fused):
            return False
        for node, inputs in fused:
            if node is not None:
                graph.replace(node)
                graph.set_inputs(node.name, inputs)
        for gradient in gradients:
            graph.remove(gradient)
        bypass(graph, function, [own])
        return True


def _settled(graph: Graph, setting: Setting, costs: Costs, node: Node, inputs: Mapping[str, Value]) -> Node | None:
    """Return a node with the first way to run it on the inputs that writes its formats."""
    given = {name: graph.desc_of(value) for name, value in inputs.items()}
    for candidate in setting.target.candidates(
        node, {**given, **dict(zip(result_names(node), node.descs, strict=True))}
    ):
        reads = all(candidate.operands[name] in (desc, desc.at_start()) for name, desc in given.items())
        if reads and candidate.results == node.descs:
            candidate = replace(candidate, operands=given)
            choice = replace(candidate.choice("with the function behind it"), cost=costs.node(node, candidate))
            return node.with_(choice=choice)
    return None


def _is_bare(node: Node) -> bool:
    is_forward = node.op == "batch_normalization_training" and not node.post_ops
    return is_forward and isinstance(node.attrs, BatchStatistics) and not node.attrs.function


def _function_behind(graph: Graph, norm: str) -> Node | None:
    """Return the only function of a normalization's numbers, if it is one of those."""
    readers = (graph.node(name) for name, _ in graph.readers(Value(norm)))
    functions = [node for node in readers if node.op == "eltwise"]
    if len(functions) != 1 or functions[0].post_ops:
        return None
    (function,) = functions
    attrs, alike = function.attrs, function.results == graph.node(norm).results[:1]
    if not isinstance(attrs, Eltwise) or not alike:
        return None
    return function if attrs.alg == "clip" or (attrs.alg == "relu" and attrs.alpha == 0) else None


def _gradients(graph: Graph, norm: Node, function: Node) -> dict[str, Node]:
    """Return the gradients of a function that only the gradient of the normalization reads, with the latter."""
    found = {}
    for value in (Value(norm.name), Value(function.name)):
        for name, operand in graph.readers(value):
            gradient = graph.node(name)
            if not isinstance(gradient.attrs, EltwiseGradient) or operand != gradient.attrs.reads:
                continue
            back = only_reader(graph, Value(name))
            same = gradient.attrs.function == function.attrs and not gradient.post_ops and not gradient.attrs.by_result
            if same and back is not None and _is_gradient_of(graph, back, norm, Value(name)):
                found[name] = back
    return found


def _is_gradient_of(graph: Graph, back: Node, norm: Node, diff_dst: Value) -> bool:
    if back.op != "batch_normalization_backward" or back.attrs != norm.attrs:
        return False
    read, own = graph.inputs(back.name), graph.inputs(norm.name)
    statistics = {"mean": Value(norm.name, 1), "variance": Value(norm.name, 2), "diff_dst": diff_dst}
    return read["src"] == own["src"] and read.get("scale") == own.get("scale") and statistics.items() <= read.items()
