"""Import of a functional fx graph from AOTAutograd, with the mapping of its inputs and results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from fmtprop.capture.fx_import import Calls, import_calls, placeholders, results_of
from fmtprop.capture.torch_call import check_real, tensor_type
from fmtprop.ir import Graph, Value
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops.pytorch import OpOverload


@dataclass(frozen=True)
class Functional:
    """A graph, and the relation between its inputs and results and those of the imported program."""

    #: the imported graph. Its inputs are the program's inputs that vary and are read.
    graph: Graph
    #: formats of the program's inputs and outputs, by name in the graph
    boundary: Mapping[str, MemoryDesc]
    _inputs: Sequence[int]
    _results: Sequence[tuple[str, Any]]
    #: inputs that the program changes, and where their new contents are among the results, behind the program's own
    _changed: Mapping[int, int]

    def around(
        self, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Return the program: a function of its inputs, which calls a function that runs the graph.

        Some of its results are inputs or fixed numbers.
        """
        chosen = itemgetter(*self._inputs) if len(self._inputs) > 1 else None
        only = self._inputs[0] if len(self._inputs) == 1 else None

        def outputs(given: Sequence[Any]) -> list[torch.Tensor]:
            if chosen is not None:
                return run(list(chosen(given)))
            return run([given[only]] if only is not None else [])

        if [*self._results] == [("output", place) for place in range(len(self._results))] and not self._changed:
            return outputs

        def results(given: Sequence[Any]) -> list[Any]:
            made = outputs(given)
            sources = {"output": made, "input": given}
            found = [sources[kind][item] if kind in sources else item for kind, item in self._results]
            write([given[place] for place in changed], [made[place] for place in changed.values()])
            return found

        changed = self._changed
        return results


def import_functional(
    program: Calls, constants: Mapping[int, torch.Tensor], name: str, changed: Sequence[int] = ()
) -> Functional:
    """Import a functional program.

    `program`: ATen calls without mutation, for fixed sizes; each node's ``meta["val"]`` is its result without data.
    `changed`: positions of inputs whose new contents are its last results. Raises ImportModelError if a call or a
    tensor cannot be expressed.
    """
    graph, values, boundary = Graph(name), dict[str, Any](), dict[str, MemoryDesc]()
    places: dict[Value, int] = {}
    inputs = placeholders(program)
    for position, node in enumerate(inputs):
        recorded = node.meta.get("val")
        if not isinstance(recorded, torch.Tensor):
            values[node.name] = recorded
            continue
        check_real(recorded, f"input {node.name}")
        type_ = tensor_type(recorded, f"input {node.name}")
        if position in constants:
            value = graph.constant(node.name, type_, constants[position].detach().resolve_neg().contiguous())
        elif node.users:
            value = graph.input(node.name, type_)
            note_format(boundary, node.name, recorded)
        else:
            continue
        values[node.name], places[value] = value, position
    results: list[tuple[str, Any]] = []
    outputs: dict[tuple[Value, fx.Node], int] = {}  # a value and a copy of it are two outputs
    found = list(zip(import_calls(graph, program, values), results_of(program), strict=True))
    own = len(found) - len(changed)
    for result, origin in found[:own]:
        if not isinstance(result, Value):
            results.append(("fixed", result))
        elif result in places and holder(origin).op == "placeholder":
            results.append(("input", places[result]))
        else:
            if (key := (result, holder(origin))) not in outputs:
                outputs[key] = len(outputs)
                graph.output(result, output := graph.fresh_name("output"))
                note_format(boundary, output, origin.meta["val"])
            results.append(("output", outputs[key]))
    written: dict[int, int] = {}
    for position, (result, _) in zip(changed, found[own:], strict=True):
        target = inputs[position]
        written[position] = outputs[(result, target)] = len(outputs)
        graph.output(result, output := graph.fresh_name("output"), into=values.get(target.name))
        note_format(boundary, output, target.meta["val"])
    graph.remove_dead()
    if outputs:
        verify(graph, Stage.IMPORTED)
    read = [places[Value(node.name)] for node in graph.input_nodes]
    return Functional(graph, boundary, read, results, written)


def write(tensors: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]) -> None:
    """Copy new contents to tensors, where they are not there."""
    for one, content in zip(tensors, contents, strict=True):
        if one is not content:
            one.copy_(content)


def holder(node: fx.Node) -> fx.Node:
    """Return the node that made the memory of a tensor: for a view, it is the source of the view."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a node is a view of, or a part of its views."""
    if node.target is operator.getitem:
        views: Any = node.args[0]
        return _viewed(views)
    return node.all_input_nodes[0] if isinstance(node.target, OpOverload) and node.target.is_view else None


def note_format(boundary: dict[str, MemoryDesc], name: str, recorded: torch.Tensor) -> None:
    """Record the strides of a tensor in the program, if they are an order of its axes."""
    if recorded.numel() == 0 or recorded.is_contiguous() or not is_dense(recorded):
        return
    type_ = tensor_type(recorded, name)
    boundary[name] = MemoryDesc(type_.dims, type_.dtype, strides=recorded.stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a range of memory without sharing a position."""
    next_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != next_stride:
            return False
        next_stride *= size
    return True
