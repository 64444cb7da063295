"""Inputs of a graph: seeded random ones, and tensors without data."""

from __future__ import annotations

import torch

from fmtprop.ir import Category, Graph, Value, opdef
from fmtprop.ir.tensors import torch_dtype


def random_inputs(graph: Graph, seed: int = 0) -> list[torch.Tensor]:
    """Return seeded random inputs of a graph: normal for floats, 0 or 1 for integers and booleans.

    Weights of recurrent layers are as small as in a network: others would saturate its functions, and gradients would
    be denormal numbers, with which kernels take several times as long.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    inputs = []
    for node in graph.input_nodes:
        dtype = torch_dtype(node.results[0].dtype)
        if node.results[0].dtype.is_floating:
            drawn = torch.randn(node.results[0].dims, generator=generator, dtype=torch.float32, device="cpu")
            inputs.append((drawn * _factor(graph, Value(node.name))).to(dtype))
        else:
            inputs.append(torch.randint(0, 2, node.results[0].dims, generator=generator, device="cpu").to(dtype))
    return inputs


def examples_of(graph: Graph) -> list[torch.Tensor]:
    """Return tensors without data of the shapes and types of a graph's inputs."""
    types = [node.results[0] for node in graph.input_nodes]
    return [torch.empty(type_.dims, dtype=torch_dtype(type_.dtype), device="meta") for type_ in types]


def _factor(graph: Graph, value: Value) -> float:
    """Return the factor of numbers that the ops behind a value demand (:attr:`fmtprop.ir.facets.Numbers.factor`)."""
    found = 1.0
    for reader, operand in graph.readers(value):
        node = graph.node(reader)
        if node.op == "reorder" or (not node.is_boundary and opdef(node.op).category is Category.VIEW):
            found = min(found, _factor(graph, Value(reader)))
        elif not node.is_boundary and operand not in node.tail:
            declared = opdef(node.op).operand(operand).name
            found = min(found, opdef(node.op).numbers.factor(declared, graph.type_of(value).dims))
    return found
