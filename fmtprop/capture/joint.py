"""Import of a training step: AOTAutograd's forward and backward programs become one graph with two entry points.

Owns the relation of the programs' inputs, results and saved tensors to the graph. Must not know the origin of the
programs, nor the owner of tensors that are saved between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fmtprop.capture.binding import Binding, BoundaryMaker, Source, is_dense
from fmtprop.capture.fx_import import base_of, import_calls, placeholders, results_of
from fmtprop.capture.random_calls import Draw, drawer, drawn_first
from fmtprop.errors import ImportModelError
from fmtprop.ir import Graph, Value
from fmtprop.ir.aliasing import storage
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops.host_call import Parts

#: the phase of inputs and outputs of the second entry point
BACKWARD = "backward"


@dataclass(frozen=True)
class Joint:
    """A training step as one graph."""

    #: imported; inputs and outputs of the backward half have phase ``"backward"``
    graph: Graph
    #: the formats of inputs and outputs in the programs, by their names in the graph
    boundary: Mapping[str, MemoryDesc]
    #: `forward`, `backward`: the entry points. The last results of the forward program are the saved tensors; a saved
    #: tensor that is ``("fixed", None)`` exists only in the graph.
    forward: Binding
    backward: Binding


def import_joint(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, name: str) -> Joint | None:
    """Import the two halves of a training step.

    `forward`, `backward`: functional programs of ATen calls for fixed sizes. The forward's results after the caller's
    are the first arguments of the backward. Result: None if both halves only give back their arguments, or copies of
    them. Raises ImportModelError if a call or a tensor cannot be expressed.
    """
    _check_sizes(forward, backward)
    return _JointImporter(forward, backward, outputs, name).run()


def _check_sizes(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Refuse sizes and strides that change: both halves of a plan are for fixed ones."""
    # without states of generators, which are of any size, and not read by a plan
    for node in (*drawn_first(forward).graph.nodes, *placeholders(backward)):
        value = node.meta.get("val")
        is_given = node.op == "placeholder" or not isinstance(value, torch.Tensor)
        numbers = (value,) if is_given else value.shape
        if any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers):
            raise ImportModelError(
                f"{node.name}: a size or a stride changes between calls. Where data choose it (x[mask], torch.where, "
                "nonzero), compute all rows, and multiply by the mask"
            )


class _JointImporter(BoundaryMaker):
    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, name: str) -> None:
        super().__init__(name)
        #: for each of the caller's results, its size, strides and offset if it is a view, else None
        self.views = [_layout_of(result) if _viewed(result) is not result else None for result in results_of(forward)]
        self.programs = drawn_first(_with_viewed(forward, outputs)), drawn_first(backward)
        self.count = outputs
        #: input of the graph -> position of the program's argument, or a function that draws it
        self.places: dict[Value, int | Draw] = {}
        self.tangents: dict[Value, int] = {}
        #: forward outputs of the graph; a value and a copy of it are two
        self.made: dict[object, int] = {}

    def run(self) -> Joint | None:
        graph, (forward, backward) = self.graph, self.programs
        recorded = results_of(forward)
        results = self._import_forward()
        own, saved = results[: self.count], results[self.count :]
        sources = [self._output(*one) for one in zip(own, recorded, self.views, strict=False)]
        # the graph still has all nodes here, so a saved view of an argument is found to be that argument
        sources += [self._saved(value, origin) for value, origin in zip(saved, recorded[self.count :], strict=True)]
        gradients = self._import_backward(saved)
        made: dict[object, int] = {}
        origins = _layouts(placeholders(forward), results_of(backward))
        found = [self._gradient(value, origin, made) for value, origin in zip(gradients, origins, strict=True)]
        graph.remove_dead()
        if len(graph) == len(graph.input_nodes) + len(graph.output_nodes):
            return None
        verify(graph, Stage.IMPORTED)
        inputs = [Value(node.name) for node in graph.input_nodes]
        return Joint(
            graph,
            self.boundary,
            Binding([self.places[value] for value in inputs if value in self.places], sources),
            Binding([self.tangents[value] for value in inputs if value in self.tangents], found),
        )

    # ------------------------------------------------------------------ programs

    def _import_forward(self) -> list[Any]:
        program = self.programs[0]
        values: dict[str, Any] = {}
        needed = {node.name for node in placeholders(self.programs[1])}
        for position, node in enumerate(placeholders(program)):
            recorded = node.meta.get("val")
            if not isinstance(recorded, torch.Tensor):
                values[node.name] = recorded
            elif node.users or node.name in needed:
                values[node.name] = self._input(node, "", self.places, position)
        for node in program.graph.nodes:
            draw = drawer(node)
            if draw is not None:
                values[node.name] = self._input(node, "", self.places, draw)
        return import_calls(self.graph, program, values, self.count)

    def _import_backward(self, saved: Sequence[Any]) -> list[Any]:
        program = self.programs[1]
        for node in program.graph.nodes:
            if "mkldnn_rnn" in str(node.target):
                raise ImportModelError(
                    f"{node.name}: {node.target} reads a workspace that PyTorch does not describe: no graph can "
                    "hold it; train this recurrent layer outside of the compiled model"
                )
        values: dict[str, Any] = {}
        for position, node in enumerate(placeholders(program)):
            if position < len(saved):
                values[node.name] = saved[position]
            elif node.users:
                values[node.name] = self._input(node, BACKWARD, self.tangents, position)
        return import_calls(self.graph, program, values)

    def _input(self, node: fx.Node, phase: str, places: dict[Value, Any], place: object) -> Value:
        value = self.add_input(node, phase)
        places[value] = place
        return value

    # ------------------------------------------------------------------ results

    def _output(self, result: Any, origin: Any, layout: Any) -> Source:
        if not isinstance(result, Value):
            return "fixed", result
        if (base := base_of(origin)).op == "placeholder":
            place = self.places.get(result)
            if isinstance(place, int):
                return "input", place
            position = placeholders(self.programs[0]).index(base)
            return "part", lambda args: _part_of(args[position], base, origin)
        kind, place = self._made_output(result, origin, self.made, (result, base_of(origin)), "")
        return (kind, place) if layout is None else ("view", lambda outputs: outputs[place].as_strided(*layout))

    def _saved(self, value: Any, origin: Any) -> Source:
        """Return the source of a saved tensor: autograd can detect changes of the caller's tensors only."""
        value = value.value if isinstance(value, Parts) else value
        if not isinstance(value, Value):
            return "fixed", None
        place = self.places.get(storage(self.graph, value))
        if isinstance(place, int):
            return "input", place
        key = value, base_of(origin)
        return ("output", self.made[key]) if key in self.made else ("fixed", None)

    def _gradient(self, value: Any, origin: Any, made: dict[object, int]) -> Source:
        if not isinstance(value, Value):
            return "fixed", value
        if value in self.tangents:
            return "input", self.tangents[value]
        return self._made_output(value, origin, made, value, BACKWARD)

    def _made_output(self, value: Value, origin: fx.Node, made: dict[object, int], key: object, phase: str) -> Source:
        if key not in made:
            made[key] = len(made)
            self.add_output(value, origin, phase)
        return "output", made[key]


def _with_viewed(program: fx.GraphModule, count: int) -> fx.GraphModule:
    """Return a program that gives the tensors of which its first results are views, so that these share memory."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(program.graph, {})
    graph.output([*map(_viewed, results[:count]), *results[count:]])
    return fx.GraphModule(program, graph)


def _viewed(result: Any) -> Any:
    """Return the tensor of which a result is a view; itself where the plan must make it."""
    base = base_of(result) if isinstance(result, fx.Node) else result
    if base is result or base.op == "placeholder":
        return result
    whole = base.meta.get("val")
    if not isinstance(whole, torch.Tensor) or whole.dtype is not result.meta["val"].dtype or whole.is_complex():
        return result
    return base if is_dense(whole) and not whole.storage_offset() else result


def _part_of(tensor: torch.Tensor, base: fx.Node, view: Any) -> Any:
    """Return a view of a tensor, as a program has it of an argument; AOTAutograd itself makes most others."""
    if view is base:
        return tensor
    args = [_part_of(tensor, base, arg) if isinstance(arg, fx.Node) else arg for arg in view.args]
    return view.target(*args, **view.kwargs)


def _layout_of(view: fx.Node) -> tuple[Any, ...]:
    recorded = view.meta["val"]
    return recorded.shape, recorded.stride(), recorded.storage_offset()


def _layouts(tensors: Sequence[fx.Node], gradients: Sequence[Any]) -> list[Any]:
    """Return for each gradient the node with its strides: its tensor's, since autograd copies a gradient with others.

    The first results of a backward program are the gradients of the forward program's arguments, in their order.
    """
    given = [*tensors, *[None] * (len(gradients) - len(tensors))]
    return [
        tensor if tensor is not None and _shape(tensor) == _shape(gradient) else gradient
        for tensor, gradient in zip(given, gradients, strict=True)
    ]


def _shape(node: Any) -> object:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
