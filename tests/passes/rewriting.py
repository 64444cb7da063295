"""Helpers for the tests of rewrites: a builder of tiny graphs, and the comparison of meaning before and after."""

from __future__ import annotations

import torch

from fmtprop.ir import Attrs, Graph, TensorType, Value
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import BatchNorm, Binary, Eltwise, emit
from fmtprop.ops.convolution import Conv
from fmtprop.ops.evaluate import evaluate


class Builder:
    """Adds nodes to one graph; tensors are seeded by their order."""

    def __init__(self) -> None:
        self.graph = Graph("test")
        self._seed = 0

    def random(self, *dims: int) -> torch.Tensor:
        self._seed += 1
        return torch.randn(dims, generator=torch.Generator().manual_seed(self._seed))

    def input(self, *dims: int, name: str = "x") -> Value:
        return self.graph.input(name, TensorType(dims))

    def constant(self, data: torch.Tensor, name: str | None = None) -> Value:
        return self.graph.constant(name or self.graph.fresh_name("c"), tensor_type(data), data)

    def op(self, op: str, attrs: Attrs, name: str | None = None, **inputs: Value) -> Value:
        return emit(self.graph, op, inputs, attrs, name=name, origin=f"layer.{name}" if name else "")

    def conv(self, src: Value, outputs: int, name: str, bias: bool = True, **window: int) -> Value:
        channels, spatial = self.graph.type_of(src).dims[1], self.graph.type_of(src).ndim - 2
        kernel, groups = window.pop("kernel", 1), window.get("groups", 1)
        dims = (outputs // groups, channels // groups, *(kernel,) * spatial)
        operands = {"weights": self.constant(self.random(*((groups, *dims) if groups > 1 else dims)))}
        if bias:
            operands["bias"] = self.constant(self.random(outputs))
        return self.op("convolution", Conv.make(spatial, **window), name, src=src, **operands)

    def norm(self, src: Value, name: str, affine: bool = True) -> Value:
        channels = self.graph.type_of(src).dims[1]
        operands = {"mean": self.random(channels), "variance": self.random(channels).abs() + 0.5}
        if affine:
            operands |= {"scale": self.random(channels), "shift": self.random(channels)}
        values = {key: self.constant(data) for key, data in operands.items()}
        return self.op("batch_normalization", BatchNorm(1e-3), name, src=src, **values)

    def act(self, src: Value, alg: str = "relu", name: str | None = None, *parameters: float) -> Value:
        return self.op("eltwise", Eltwise(alg, *parameters), name or alg, src=src)

    def binary(self, alg: str, a: Value, b: Value, name: str | None = None) -> Value:
        return self.op("binary", Binary(alg), name or alg, src_0=a, src_1=b)

    def output(self, *values: Value) -> Graph:
        for value in values:
            self.graph.output(value)
        return self.graph


def summary(graph: Graph) -> list[str]:
    """Return the computing nodes in order: ``name:op+post_op(operand)…``."""
    found = []
    for node in graph.nodes():
        if not node.is_boundary:
            inputs = graph.inputs(node.name)
            tails = [f"{p.op}({inputs[p.operand]})" if p.operand else f"{p.attrs.alg}" for p in node.post_ops]
            found.append("+".join([node.name, *tails]))
    return found


def rewrite(graph: Graph, *passes, tolerance: float = 1e-5) -> Graph:
    """Run passes; check that the argument stays as it was, and that the meaning is the same on random inputs."""
    before = graph.to_networkx()
    nodes, edges = dict(before.nodes(data=True)), list(before.edges(keys=True, data=True))
    rewritten = graph
    for step in passes:
        rewritten = step.run(rewritten)
        verify(rewritten, Stage.IMPORTED)
    after = graph.to_networkx()
    assert {k: {**v, "data": 0} for k, v in after.nodes(data=True)} == {k: {**v, "data": 0} for k, v in nodes.items()}
    assert list(after.edges(keys=True, data=True)) == edges
    generator = torch.Generator().manual_seed(7)
    inputs = {n.name: torch.randn(n.results[0].dims, generator=generator) for n in graph.input_nodes}
    for want, got in zip(evaluate(graph, inputs), evaluate(rewritten, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return rewritten
