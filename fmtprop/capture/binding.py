"""A captured program's arguments as the inputs of a graph, and the graph's outputs as the program's results.

Every import of AOTAutograd's programs ends here: of inference, of pieces of a graph, of both halves of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from fmtprop.capture.random_calls import Draw
from fmtprop.capture.torch_call import check_real, tensor_type
from fmtprop.ir import Graph, Value
from fmtprop.layout import MemoryDesc

#: the source of a result: an output of the graph, an argument of the call, or a fixed object
Source = tuple[str, Any]


@dataclass(frozen=True)
class Binding:
    """The relation between a graph, or one entry point of it, and its program."""

    #: for each input of the graph: the position of the program's argument, or a function that draws it at every call
    inputs: Sequence[int | Draw]
    #: for each result of the program: ``("output", position)`` among the graph's outputs, ``("view", function)`` of the
    #: graph's outputs, ``("input", position)`` among the program's arguments, ``("part", function)`` of the arguments,
    #: or ``("fixed", object)``
    results: Sequence[Source]
    #: arguments that the program changes, and where their new contents are among the graph's outputs
    changed: Mapping[int, int] = field(default_factory=dict)

    def given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the graph's inputs; random numbers are drawn by torch's generator, in the program's order."""
        return [args[source] if isinstance(source, int) else source() for source in self.inputs]

    def found(self, outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """Return the program's results, and write the new contents of arguments where they are not there."""
        chosen, made = {"output": outputs, "input": args}, {"view": outputs, "part": args}
        results = [
            chosen[kind][item] if kind in chosen else item(made[kind]) if kind in made else item
            for kind, item in self.results
        ]
        for place, output in self.changed.items():
            if args[place] is not outputs[output]:
                args[place].copy_(outputs[output])
        return results

    def around(
        self, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Return the program: a function of its arguments, which calls a function that runs the graph."""
        chosen = itemgetter(*self.inputs) if len(self.inputs) > 1 else self.given

        def outputs(args: Sequence[Any]) -> list[torch.Tensor]:
            return run(list(chosen(args)))

        if [*self.results] == [("output", place) for place in range(len(self.results))] and not self.changed:
            return outputs
        return lambda args: self.found(outputs(args), args)


class BoundaryMaker:
    """A graph in the making, with the formats that its inputs and outputs have in the program."""

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        #: by name in the graph
        self.boundary: dict[str, MemoryDesc] = {}

    def add_input(self, node: fx.Node, phase: str = "") -> Value:
        """Add the input of a program's argument."""
        recorded = node.meta.get("val")
        check_real(recorded, f"input {node.name}")
        value = self.graph.input(node.name, tensor_type(recorded, f"input {node.name}"), phase)
        self._note(node.name, recorded)
        return value

    def add_output(self, value: Value, like: fx.Node, phase: str = "", into: Value | None = None) -> None:
        """Add an output; `like`: the program's tensor that has its strides."""
        name = self.graph.fresh_name("gradient" if phase else "output")
        self.graph.output(value, name, phase, into=into)
        self._note(name, like.meta["val"])

    def _note(self, name: str, recorded: Any) -> None:
        """Record the strides of a tensor in the program, if they are an order of its axes."""
        if not isinstance(recorded, torch.Tensor) or recorded.numel() == 0 or recorded.is_contiguous():
            return
        if is_dense(recorded):
            type_ = tensor_type(recorded, name)
            self.boundary[name] = MemoryDesc(type_.dims, type_.dtype, strides=recorded.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory without sharing a position."""
    next_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != next_stride:
            return False
        next_stride *= size
    return True
