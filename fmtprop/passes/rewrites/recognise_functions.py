"""Recognition of element-wise functions that models write out: SiLU, GELU, Mish, hard swish in any spelling."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from fmtprop.ir import Attrs, Graph, Node, Value, opdef
from fmtprop.layout import DataType
from fmtprop.ops import HostCall, emit
from fmtprop.ops.binary import Binary
from fmtprop.ops.eltwise import FUNCTIONS, Eltwise
from fmtprop.passes.base import Pass
from fmtprop.passes.editing import bypass

#: most steps of a function: GELU by hyperbolic tangent takes eight
_MOST = 10

#: operators of PyTorch that are element-wise too
_HOSTED = frozenset({"aten.erf.default"})

#: largest difference from the function, relative to its argument: spellings round their constants to f32
_TOLERANCE = 2e-6

#: how a number meets a function of it
_PRODUCTS = frozenset({"mul", "div"})

_NAMED = (
    *(Eltwise("swish", 1.0), Eltwise("swish", 1.702), Eltwise("gelu_erf"), Eltwise("gelu_tanh"), Eltwise("mish")),
    Eltwise("hardswish", 1 / 6, 0.5),
)


@dataclass(frozen=True)
class RecogniseFunctions(Pass):
    """Replace element-wise steps that together are one function that oneDNN has.

    Steps from one value to one result, without other readers, are evaluated in f64 on a row of numbers, and compared
    with the functions. So every spelling is recognised, with its factors in any order.

    Requires folded constants (a factor is an attribute then). Ensures nothing: other steps stay.
    """

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        graph = graph.copy()
        nodes = graph.nodes()
        rank = {node.name: index for index, node in enumerate(nodes) if _is_pointwise(graph, node)}
        for node in reversed(nodes):
            if node.name in rank and node.name in graph and _ends(node):
                _recognise(graph, node, rank)
        graph.remove_dead()
        return graph


def _ends(node: Node) -> bool:
    """Return whether a spelling could end here: with a product, or a factor behind it."""
    return node.op == "binary" or (isinstance(node.attrs, Eltwise) and node.attrs.alg == "linear")


def _recognise(graph: Graph, last: Node, rank: Mapping[str, int]) -> None:
    for steps, source in _regions(graph, last, rank):
        function = _function_of(graph, steps, source)
        if function is not None:
            value = emit(graph, "eltwise", {"src": source}, function, origin=last.origin)
            bypass(graph, last, [value])
            return


def _regions(graph: Graph, last: Node, rank: Mapping[str, int]) -> Iterator[tuple[list[Node], Value]]:
    """Yield the steps that end with a node and read but one value from outside, the fewest first.

    A chain is left out, since all functions are a number times a function of it: some number is read twice. `rank`: the
    places of the nodes that may be steps.
    """
    steps, read = {last.name}, list(graph.inputs(last.name).values())
    while True:
        outside = {value for value in read if value.node not in steps}
        if len(outside) == 1 and len(read) > len(steps) > 1:
            yield [graph.node(name) for name in sorted(steps, key=rank.__getitem__)], next(iter(outside))
        inner = [value.node for value in outside if value.node in rank and _is_read_by(graph, value, steps)]
        if not inner or len(steps) == _MOST:
            return
        latest = max(inner, key=rank.__getitem__)
        steps.add(latest)
        read += graph.inputs(latest).values()


def _is_read_by(graph: Graph, value: Value, steps: Container[str]) -> bool:
    """Return whether a value has no readers but steps."""
    return all(name in steps for name, _ in graph.reading(value))


def _is_pointwise(graph: Graph, node: Node) -> bool:
    if node.is_boundary or node.post_ops or not node.results or node.results[0].dtype is not DataType.F32:
        return False
    hosted = isinstance(node.attrs, HostCall) and node.attrs.target in _HOSTED
    if not (hosted or opdef(node.op).elementwise):
        return False
    return all(graph.type_of(value) == node.results[0] for value in graph.inputs(node.name).values())


def _function_of(graph: Graph, steps: Sequence[Node], source: Value) -> Eltwise | None:
    """Return the function that steps compute, None where it has no name."""
    if not any(isinstance(node.attrs, Binary) and node.attrs.alg in _PRODUCTS for node in steps):
        return None
    places = {source: _SOURCE, **{Value(node.name): place for place, node in enumerate(steps)}}
    return _named(
        tuple(
            (node.op, node.attrs, tuple((name, places[value]) for name, value in graph.inputs(node.name).items()))
            for node in steps
        )
    )


#: place of the value from outside; a step's is its position
_SOURCE = -1


@lru_cache(maxsize=1024)
def _named(steps: tuple[tuple[str, Attrs, tuple[tuple[str, int], ...]], ...]) -> Eltwise | None:
    """Return the function of steps: op, attributes, and the place that each operand comes from."""
    x = _numbers()
    known = {_SOURCE: x}
    for place, (op, attrs, operands) in enumerate(steps):
        known[place] = opdef(op).reference(attrs, {name: known[at] for name, at in operands})[0]
    result = known[len(steps) - 1]
    for function in _NAMED:
        expected = FUNCTIONS[function.alg](x, function.alpha, function.beta)
        if bool(((result - expected).abs() <= _TOLERANCE * x.abs().clamp_min(1.0)).all()):
            return function
    return None


@cache
def _numbers() -> torch.Tensor:
    return torch.linspace(-14.0, 14.0, 1401, dtype=torch.float64, device="cpu")
