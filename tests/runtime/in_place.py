"""Graphs whose concats are in place: a policy of one blocked format, and what turns its concats into in-place ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Choice, Node
from fmtprop.layout.parts import in_place_parts
from fmtprop.ops.evaluate import evaluate
from fmtprop.ops.reorder import Reorder
from fmtprop.passes.assignment.formats import channel_blocked
from fmtprop.passes.assignment.policies import Option, Policy, Question, propagate_policy
from fmtprop.runtime import Executor, Plan
from fmtprop.runtime.agreement import relative_error
from fmtprop.targets import OneDnnTarget


def blocks_of(size: int) -> Policy:
    """Return a policy that blocks the channels of images wherever the op can; elsewhere it propagates."""

    def rule(question: Question) -> Iterator[Option]:
        given = {**{name: question.given[name] for name in question.activations()}, **question.results}
        if all(desc.ndim == 4 for desc in given.values()):
            wanted = {name: channel_blocked(desc, size) for name, desc in given.items()}
            request = {name: given[name] if given[name].at_start() == want else want for name, want in wanted.items()}
            yield Option(question.fill(request), f"blocks of {size}")
        yield from propagate_policy(question)

    return rule


def put_in_place(graph: Graph, target: OneDnnTarget) -> Graph:
    """Return a formatted graph with every concat in place whose format has dense parts.

    Sources in another format are reordered first.
    """
    graph = graph.copy()
    for node in graph.nodes():
        if node.op != "concat":
            continue
        whole = node.descs[0]
        inputs = graph.inputs(node.name)
        names = [f"src_{index}" for index in range(len(inputs))]
        sizes = [graph.type_of(inputs[name]).dims[node.attrs.axis] for name in names]
        parts = in_place_parts(whole, node.attrs.axis, sizes)
        if parts is None:
            continue
        operands = {}
        for name, part in zip(names, parts, strict=True):
            have, want = graph.desc_of(inputs[name]), part.at_start()
            if have.at_start() != want:
                reorder = Node(graph.fresh_name("reorder"), "reorder", Reorder(), (graph.type_of(inputs[name]),))
                candidate = next(iter(target.candidates(reorder, {"src": have, "dst": want})))
                reorder = reorder.with_(descs=(want,), choice=candidate.choice(f"its part of {node.name}"))
                (inputs[name],) = graph.insert(reorder, {"src": inputs[name]}, before=node.name)
            operands[name] = graph.desc_of(inputs[name])
        graph.set_inputs(node.name, inputs)
        graph.replace(node.with_(choice=Choice("view", "in_place", operands, "its sources lie within it")))
    graph.remove_dead()
    return graph


def runs_right(graph: Graph, plan: Plan) -> None:
    inputs = [torch.randn(n.results[0].dims, generator=torch.Generator().manual_seed(7)) for n in graph.input_nodes]
    want = evaluate(graph, {node.name: x for node, x in zip(graph.input_nodes, inputs, strict=True)})
    executor = Executor(plan)
    for _ in range(2):  # a buffer that was overwritten shows in the second run at the latest
        for got, expected in zip(executor.run(inputs), want, strict=True):
            assert relative_error(got, expected) < 1e-5
