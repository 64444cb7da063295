"""Assign formats to built-in graphs under this process's instruction set, and print what came out as JSON.

Run in a process of its own: oneDNN reads ``ONEDNN_MAX_CPU_ISA`` once. The first argument is the policy, the others
are names of graphs; ``+`` before a name plans it too. Primitives are created, none is run but those that pack weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.compiling.stages import normalise
from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node
from fmtprop.ir.ports import result_names
from fmtprop.layout import MemoryDesc
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.formats import like, plain, usual
from fmtprop.passes.target import Setting
from fmtprop.runtime import build_plan
from fmtprop.runtime.plan import Home
from fmtprop.targets import OneDnnTarget, ReferenceTarget


def describe(name: str, policy: str, planned: bool) -> dict[str, Any]:
    """Return what the tests ask about one graph."""
    target = OneDnnTarget()
    normal, _ = normalise(fp.load(name))
    graph = AssignFormats(policy, Setting(target, ReferenceTarget())).run(normal)
    parameters = constant(graph)
    active = [node for node in graph.nodes() if node.name not in parameters and not node.is_boundary]
    return {
        "reorders": [node.choice.reason for node in active if node.op == "reorder"],
        "impls": sorted({node.choice.impl for node in active}),
        "fallback": [node.label for node in active if node.choice.target == "reference"],
        "ref": {node.label: others(target, node) for node in active if node.choice.impl.startswith("ref")},
        **(plan_facts(graph, target) if planned else {}),
    }


def plan_facts(graph: Graph, target: OneDnnTarget) -> dict[str, Any]:
    """Return what the plan runs each time, and what ran once."""
    plan = build_plan(graph, target)
    constants = {index for index, buffer in enumerate(plan.buffers) if buffer.home is Home.CONSTANT}
    return {
        "plan_reorders": len(plan.reorders),
        "steps_of_constants": [
            step.node.label for step in plan.steps if all(a.buffer in constants for a in step.operands.values())
        ],
        "packed": len(plan.packed),
    }


def constant(graph: Graph) -> set[str]:
    """Return the nodes that depend on no input."""
    found: set[str] = set()
    for node in graph.nodes():
        operands = graph.inputs(node.name).values()
        if node.op == "constant" or (operands and all(value.node in found for value in operands)):
            found.add(node.name)
    return found


def others(target: OneDnnTarget, node: Node) -> list[str]:
    """Return the implementations that oneDNN has for a node in the usual formats, its reference loops left out."""
    results = {
        name: MemoryDesc.any(desc.dims, desc.dtype) for name, desc in zip(result_names(node), node.descs, strict=True)
    }
    operands = node.choice.operands
    requests = [
        {name: like(desc, offer) or plain(desc) for name, desc in operands.items()} for offer in usual(first(operands))
    ]
    requests.append({name: MemoryDesc.any(desc.dims, desc.dtype) for name, desc in operands.items()})
    found = (candidate for request in requests for candidate in target.candidates(node, {**request, **results}))
    return sorted({candidate.impl for candidate in found if not candidate.is_ref})


def first(operands: dict[str, MemoryDesc]) -> MemoryDesc:
    return next(iter(operands.values()))


def main() -> None:
    """Answer for the graphs named on the command line."""
    policy, *names = sys.argv[1:]
    graphs = {name.lstrip("+"): describe(name.lstrip("+"), policy, name.startswith("+")) for name in names}
    json.dump({"isa": dnnl.lib().isa, "graphs": graphs}, sys.stdout)


if __name__ == "__main__":
    main()
