"""Nodes of a graph that an ONNX node became, to be made again for an equal one.

Networks repeat their layers. An ONNX node of the same operator, with the same attributes and operands of the same
types, becomes the same nodes, so its function and its importers run once. Small constants, which a function may read,
are a part of the comparison; a node is not remembered if its function or importer has read a large one. The verifier
checks the nodes like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmtprop.frontends.onnx.recording import FEW_ELEMENTS, Again, Recording, Traced, keep
from fmtprop.frontends.onnx.steps import Step
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value

#: a value of a template: the place of an operand, counted from -1 down, or of a node; and the index of its result
_Reference = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Made:
    """A node, to be copied under other names that begin with the stem."""

    node: Node
    stem: str
    inputs: tuple[tuple[str, _Reference], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The nodes that an ONNX node became.

    Parameters
    ----------
    results : tuple
        Each result as a tensor without data, or the index of the operand that it is.
    values : tuple
        References of the results.
    nodes : tuple
        The nodes, in order.
    several : bool
        Whether the function returns a tuple.
    """

    results: tuple[Any, ...]
    values: tuple[_Reference, ...]
    nodes: tuple[_Made, ...]
    several: bool

    def trace(self, recording: Recording, arguments: Sequence[Any]) -> Any:
        """Return the results without data, and record that they come from this template."""
        found = [arguments[at] if isinstance(at, int) else recording.made(at) for at in self.results]
        recording.calls.append(Again(self, arguments, found, recording.origin))
        return tuple(found) if self.several else found[0]

    def add(self, graph: Graph, operands: Sequence[Any], origin: str) -> list[Value]:
        """Add the nodes to a graph, and return the values of the results."""
        made: list[tuple[Value, ...]] = []

        def value(reference: _Reference) -> Value:
            place, index = reference
            return operands[-1 - place] if place < 0 else made[place][index]

        for node in self.nodes:
            inputs = {name: value(reference) for name, reference in node.inputs}
            copy = node.node.with_(name=graph.fresh_name(node.stem), origin=origin)
            made.append(graph.add(copy, inputs))
        return list(map(value, self.values))


@dataclass(slots=True)
class Learned:
    """A traced step; its template is made when its calls have been imported.

    Parameters
    ----------
    key : object
        All that the nodes depend on.
    arguments, results : sequence
        Operands, and the function's results.
    first, end : int
        Its recorded calls.
    """

    key: Any
    arguments: Sequence[Any]
    results: Any
    first: int
    end: int

    def keep(self, graph: Graph, nodes: Iterable[Node], value_of: Callable[[Any], Any]) -> None:
        """Keep the template.

        Parameters
        ----------
        graph : Graph
            The graph with the nodes.
        nodes : iterable of Node
            The nodes that were added for the calls, in order.
        value_of : callable
            Returns the value of a tensor; None for an operand that no call has.
        """
        known: dict[Any, _Reference] = {}
        for place, argument in enumerate(self.arguments):
            if isinstance(value := value_of(argument), Value):
                known.setdefault(value, (-1 - place, 0))
        made: list[_Made] = []
        for node in nodes:
            if Value(node.name) in known:  # an operand that is a constant
                continue
            inputs = graph.inputs(node.name)
            if node.is_boundary or not all(value in known for value in inputs.values()):
                return
            references = tuple((name, known[value]) for name, value in inputs.items())
            known |= {Value(node.name, index): (len(made), index) for index in range(len(node.results))}
            made.append(_Made(node, node.name.rpartition("_")[0], references))
        several = isinstance(self.results, tuple)
        results = self.results if several else (self.results,)
        values = [known.get(value_of(result)) for result in results]
        if all(value is not None for value in values):
            with torch._C.DisableTorchFunctionSubclass():
                types = tuple(map(self._result, results))
            keep(_TEMPLATES, self.key, Template(types, tuple(values), tuple(made), several))  # type: ignore[arg-type]

    def _result(self, result: Any) -> Any:
        place = next((place for place, argument in enumerate(self.arguments) if argument is result), None)
        return result.as_subclass(torch.Tensor) if place is None else place


_TEMPLATES: dict[Any, Template] = {}


def run_step(step: Step, arguments: list[Any], recording: Recording, function: Callable[[], Any]) -> Any:
    """Run a step on traced operands, or take its template.

    Parameters
    ----------
    step : Step
        The step.
    arguments : list
        Its operands.
    recording : Recording
        The record of calls; new steps are added to its ``learned``.
    function : callable
        Runs the step.
    """
    with torch._C.DisableTorchFunctionSubclass():
        key, readable = _key(step, arguments)
        template = None if key is None else _TEMPLATES.get(key)
        if template is not None:
            return template.trace(recording, arguments)
    recording.steps += 1
    count, first = recording.steps, len(recording.calls)
    recording.readable, recording.has_read = readable, False
    results = function()
    # a step of several, such as a function body, is remembered by its parts
    whole = key is not None and count == recording.steps and not recording.has_read and _is_traced(results)
    if whole and len(recording.calls) > first:
        recording.learned.append(Learned(key, arguments, results, first, len(recording.calls)))
    return results


def _is_traced(results: Any) -> bool:
    found = results if isinstance(results, tuple) else (results,)
    return all(isinstance(result, Traced) and result.is_meta for result in found)


def _key(step: Step, arguments: list[Any]) -> tuple[Any, frozenset[int]]:
    """Return all that the nodes of a step depend on, None if it is too much; and the operands that may be read."""
    if step.function is None:
        return None, frozenset()
    # an importer may make other nodes if a result is not read
    read = len(step.outputs) == 1 or tuple(bool(name) and name not in step.last for name in step.outputs)
    found: list[Any] = [step.function, read]
    for name, value in step.attributes.items():
        plain = _plain(value)
        if plain is None:
            return None, frozenset()
        found += (name, plain)
    places: dict[int, int] = {}
    readable = set()
    for argument in arguments:
        if argument is None:
            found.append(None)
            continue
        if not isinstance(argument, Traced) or argument.dtype.is_complex:
            return None, frozenset()
        place = places.setdefault(id(argument), len(places))
        found += (place, argument.dtype, argument.shape, argument.stride(), argument.is_meta)
        if not argument.is_meta and argument.numel() <= FEW_ELEMENTS:
            if argument.dtype is torch.bfloat16:
                return None, frozenset()
            readable.add(id(argument))
            found.append(argument.numpy().tobytes())
    return tuple(found), frozenset(readable)


def _plain(value: Any) -> Any:
    """Return an attribute as a key; None if it is a tensor or a graph."""
    kind = type(value)
    if kind in (int, str):
        return value
    if kind is float:
        return value.hex()
    if kind is list and all(type(item) in (int, str) for item in value):
        return tuple(value)
    return None
