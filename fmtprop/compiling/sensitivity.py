"""How much each quantized node adds to the error of a model's results, and how many must stay in floats.

Owns the order of the nodes and the number that a bound needs. Everything is computed by the ops' meanings, in PyTorch:
no plan is made here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

import torch

from fmtprop.compiling.options import Options
from fmtprop.compiling.stages import quantized_form
from fmtprop.errors import OptionError
from fmtprop.ir import Graph, Node, Value
from fmtprop.ir.structure import flatten_arguments
from fmtprop.ir.tensors import materialise
from fmtprop.layout import MemoryDesc
from fmtprop.ops.evaluate import evaluate, evaluate_node
from fmtprop.ops.quantization import FakeQuantize
from fmtprop.passes.precision.keep_float import KeepFloat, limits, quantized_nodes
from fmtprop.passes.precision.mark_grids import keeps_numbers
from fmtprop.report.accuracy import calls_of
from fmtprop.runtime.boundary import Endpoint
from fmtprop.targets.registry import provider

#: inputs by which nodes are ordered: each takes about as many runs as half the number of quantized nodes
_ORDERED_BY = 4


@dataclass(frozen=True)
class Accuracy:
    """The error that a quantized model may have relative to the same model without roundings.

    Parameters
    ----------
    data : iterable
        Typical inputs: each a tensor, a tuple of arguments or a mapping of named ones, as one call takes them.
    sqnr_db : float
        Least signal to quantization noise of each result over all inputs, in dB: the energy of its numbers over that of
        the differences. 20 dB are a tenth of the numbers' size, 40 dB a hundredth.

    Raises
    ------
    OptionError
        `sqnr_db` is no number.

    Examples
    --------
    >>> Accuracy([torch.ones(3)], sqnr_db=30.0).sqnr_db
    30.0
    """

    data: Iterable[Any]
    sqnr_db: float

    def __post_init__(self) -> None:
        if not isinstance(self.sqnr_db, int | float) or not math.isfinite(self.sqnr_db):
            raise OptionError(f"sqnr_db must be a number of decibels, such as 30.0, got {self.sqnr_db!r}")


class QuantizedModel:
    """A quantized model with typical inputs.

    `order`: names of the quantized nodes as patterns for ``keep_float``, the most sensitive first. Raises InputError if
    there are no inputs, or one does not fit.
    """

    def __init__(self, graph: Graph, data: Iterable[Any], options: Options) -> None:
        self.graph = quantized_form(graph, provider(options.target)())
        names = [node.name for node in graph.input_nodes]
        flat = [flatten_arguments(graph.structure, args, kwargs) for args, kwargs in calls_of(data)]
        self.inputs = [dict(zip(names, map(_read, graph.input_nodes, one), strict=True)) for one in flat]
        if not quantized_nodes(self.graph):
            raise OptionError(f"{graph.name} is no quantized model: none of its nodes reads rounded numbers")
        self.exact = [evaluate(self._without(["*"]), one) for one in self.inputs]
        noises = noises_of(self.graph, self.inputs[:_ORDERED_BY])
        self.order = [escape(name) for name in sorted(noises, key=lambda name: -noises[name])]

    def _without(self, patterns: Sequence[str]) -> Graph:
        return KeepFloat(tuple(patterns)).run(self.graph) if patterns else self.graph

    def sqnr_db(self, results: Sequence[Sequence[torch.Tensor]]) -> float:
        """Return the least ratio of the results of all inputs, of any result; infinite if there is no difference."""
        ratios = []
        for index in range(len(self.exact[0])):
            both = zip(self.exact, results, strict=True)
            pairs = [(exact[index].double(), got[index].double()) for exact, got in both]
            signal = sum(exact.square().sum().item() for exact, _ in pairs)
            noise = sum((got - exact).square().sum().item() for exact, got in pairs)
            ratios.append(math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf)
        return min(ratios, default=math.inf)

    def max_error(self, results: Sequence[Sequence[torch.Tensor]]) -> float:
        """Return the largest difference of the results of all inputs."""
        both = zip(self.exact, results, strict=True)
        pairs = (pair for exact, got in both for pair in zip(exact, got, strict=True))
        return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)

    def expected_db(self, count: int) -> float:
        """Return the ratio, by the ops' meanings, of the model with its `count` most sensitive nodes in floats."""
        graph = self._without(self.order[:count])
        return self.sqnr_db([evaluate(graph, one) for one in self.inputs])

    def fewest(self, sqnr_db: float) -> int:
        """Return the least number of nodes in floats that gives a ratio."""
        if self.expected_db(0) >= sqnr_db:
            return 0
        low, high = 0, len(self.order)  # too few, enough
        while high - low > 1:
            middle = (low + high) // 2
            if self.expected_db(middle) >= sqnr_db:
                high = middle
            else:
                low = middle
        return high


def _read(node: Node, tensor: object) -> torch.Tensor:
    (type_,) = node.results
    return Endpoint(node.name, MemoryDesc(type_.dims, type_.dtype)).read(tensor)


def noises_of(graph: Graph, inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the noise that each quantized node alone makes in the results: the energy of the differences over all."""
    noises = {node.name: 0.0 for node in quantized_nodes(graph)}
    for one in inputs:
        run = _WithoutRoundings(graph, one)
        for name in noises:
            noises[name] += run.noise(graph.node(name))
    return noises


class _WithoutRoundings:
    """The numbers of a graph without roundings for one input."""

    def __init__(self, graph: Graph, inputs: Mapping[str, torch.Tensor]) -> None:
        self.graph, self.numbers = graph, dict[Value, torch.Tensor]()
        for node in graph.nodes():
            if node.op == "input":
                self.numbers[Value(node.name)] = inputs[node.name]
            elif node.op == "constant":
                self.numbers[Value(node.name)] = materialise(graph.constants[node.name], node.results[0])
            elif node.op != "output":
                self.numbers |= self._results(node, self._operands(node, {}))

    def noise(self, quantized: Node) -> float:
        """Return the energy of the results' differences if one node reads rounded numbers."""
        operands = {name: self._rounded(value) for name, value in self.graph.inputs(quantized.name).items()}
        if quantized.op == "output":
            return self._energy(quantized, operands["src"])
        changed, total = self._results(quantized, operands), 0.0
        for node in self.graph.nodes(self.graph.dependents([quantized.name]) - {quantized.name}):
            if node.op == "output":
                total += self._energy(node, changed.get(self.graph.inputs(node.name)["src"]))
            else:
                changed |= self._results(node, self._operands(node, changed))
        return total

    def _energy(self, output: Node, got: torch.Tensor | None) -> float:
        exact = self.numbers[self.graph.inputs(output.name)["src"]]
        found = 0.0 if got is None else (got.double() - exact.double()).square().sum().item()
        return found if math.isfinite(found) else math.inf

    def _operands(self, node: Node, changed: Mapping[Value, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = self.graph.inputs(node.name).items()
        return {name: changed.get(value, self.numbers[value]) for name, value in inputs}

    def _results(self, node: Node, operands: Mapping[str, torch.Tensor]) -> dict[Value, torch.Tensor]:
        if isinstance(node.attrs, FakeQuantize):
            node = Node(node.name, "eltwise", limits(node.attrs), node.results)
        return {Value(node.name, index): result for index, result in enumerate(evaluate_node(node, operands))}

    def _rounded(self, value: Value) -> torch.Tensor:
        """Return the numbers of a value with the roundings that it passes on."""
        node = self.graph.node(value.node)
        if node.is_boundary or not (isinstance(node.attrs, FakeQuantize) or keeps_numbers(node)):
            return self.numbers[value]
        sources = {name: self._rounded(one) for name, one in self.graph.inputs(node.name).items()}
        return evaluate_node(node, sources)[value.index]
