"""Import of a functional fx graph from AOTAutograd as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fmtprop.capture.binding import Binding, BoundaryMaker, Source
from fmtprop.capture.fx_import import Calls, base_of, import_calls, placeholders, results_of
from fmtprop.capture.torch_call import check_real, tensor_type
from fmtprop.ir import Graph, Value
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc


@dataclass(frozen=True)
class Functional:
    """A program of one graph."""

    #: the imported graph. Its inputs are the program's inputs that vary and are read.
    graph: Graph
    #: formats of the program's inputs and outputs, by name in the graph
    boundary: Mapping[str, MemoryDesc]
    binding: Binding


def import_functional(
    program: Calls, constants: Mapping[int, torch.Tensor], name: str, changed: Sequence[int] = ()
) -> Functional:
    """Import a functional program.

    `program`: ATen calls without mutation, for fixed sizes; each node's ``meta["val"]`` is its result without data.
    `changed`: positions of inputs whose new contents are its last results. Raises ImportModelError if a call or a
    tensor cannot be expressed.
    """
    maker, values = BoundaryMaker(name), dict[str, Any]()
    graph = maker.graph
    places: dict[Value, int] = {}
    inputs = placeholders(program)
    for position, node in enumerate(inputs):
        recorded = node.meta.get("val")
        if not isinstance(recorded, torch.Tensor):
            values[node.name] = recorded
            continue
        if position in constants:
            check_real(recorded, where := f"input {node.name}")
            known = constants[position].detach().resolve_neg().contiguous()
            value = graph.constant(node.name, tensor_type(recorded, where), known)
        elif node.users:
            value = maker.add_input(node)
        else:
            continue
        values[node.name], places[value] = value, position
    results: list[Source] = []
    outputs: dict[tuple[Value, fx.Node], int] = {}  # a value and a copy of it are two outputs
    found = list(zip(import_calls(graph, program, values), results_of(program), strict=True))
    own = len(found) - len(changed)
    for result, origin in found[:own]:
        if not isinstance(result, Value):
            results.append(("fixed", result))
        elif result in places and base_of(origin).op == "placeholder":
            results.append(("input", places[result]))
        else:
            if (key := (result, base_of(origin))) not in outputs:
                outputs[key] = len(outputs)
                maker.add_output(result, origin)
            results.append(("output", outputs[key]))
    written: dict[int, int] = {}
    for position, (result, _) in zip(changed, found[own:], strict=True):
        target = inputs[position]
        written[position] = outputs[(result, target)] = len(outputs)
        maker.add_output(result, target, into=values.get(target.name))
    graph.remove_dead()
    if outputs:
        verify(graph, Stage.IMPORTED)
    read = [places[Value(node.name)] for node in graph.input_nodes]
    return Functional(graph, maker.boundary, Binding(read, results, written))
