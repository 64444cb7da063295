"""A graph as a PyTorch module: ops run their references, constants are parameters and buffers.

Other programs (``torch.export``, ``torch.onnx.export``, ``torch.compile``) can take a graph file in this form, like
any module. Must not know formats or plans.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fmtprop.errors import GraphError
from fmtprop.ir.graph import Graph
from fmtprop.ir.structure import flatten_arguments, restructure
from fmtprop.ir.tensors import materialise
from fmtprop.ops.evaluate import evaluate_node


class GraphModule(nn.Module):
    """Interpreter of a graph by the references of its ops.

    It is in eval mode, and ``torch.export`` and ``torch.onnx`` can export it. Parameters share memory with the graph's
    tensors; initialisers become tensors.

    `graph`: a graph at any stage, with its constants' data. Later changes have no effect.

    >>> from fmtprop.capture import from_torch
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> x = torch.ones(1, 8)
    >>> bool(torch.equal(GraphModule(from_torch(net, x))(x), net(x)))
    True
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph_name = graph.name
        self.structure = graph.structure
        self._inputs = [node.name for node in graph.input_nodes]
        self._outputs = [graph.inputs(node.name)["src"] for node in graph.output_nodes]
        self._steps = [(node, graph.inputs(node.name)) for node in graph.nodes() if not node.is_boundary]
        self._attributes: dict[str, str] = {}
        for node in graph.nodes():
            if node.op == "constant":
                self._add_constant(graph, node.name)
        self.eval()

    def _add_constant(self, graph: Graph, name: str) -> None:
        if name not in graph.constants:
            raise GraphError(f"constant {name} of graph {graph.name} was released; make the module before compiling")
        tensor = materialise(graph.constants[name], graph.node(name).results[0])
        # attributes of a module cannot have dots; a running number keeps "a.b" and "a_b" apart
        attribute = "".join(c if c.isalnum() else "_" for c in name)
        attribute = f"{attribute}_{len(self._attributes)}" if hasattr(self, attribute) else attribute
        self._attributes[name] = attribute
        if tensor.is_floating_point():
            self.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(attribute, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the model's arguments and return its results, both nested as in the model."""
        inputs = flatten_arguments(self.structure, args, kwargs)
        values: dict[str, tuple[torch.Tensor, ...]] = {
            name: (tensor,) for name, tensor in zip(self._inputs, inputs, strict=True)
        }
        for name, attribute in self._attributes.items():
            values[name] = (getattr(self, attribute),)
        for node, operands in self._steps:
            tensors = {operand: values[value.node][value.index] for operand, value in operands.items()}
            values[node.name] = evaluate_node(node, tensors)
        return restructure(self.structure, [values[value.node][value.index] for value in self._outputs])
