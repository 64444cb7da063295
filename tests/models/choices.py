"""In which ways a compiled model runs: so that a test of random models can say what it has tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fmtprop.ir import Graph
from fmtprop.ir.aliasing import is_in_place
from fmtprop.ir.node import Node

#: ways to run a node: filtered convolutions and what else small tensors never lead to
CHOICES: dict[str, Callable[[Node], bool]] = {
    "filtered": lambda node: node.op == "matmul" and ".joined" in node.name,
    "sum": lambda node: any(tail.op == "sum" for tail in node.post_ops),
    "depthwise fused": lambda node: any(tail.op == "convolution" for tail in node.post_ops),
    "other post-ops": lambda node: any(tail.op not in ("sum", "convolution") for tail in node.post_ops),
    "concat in place": is_in_place,
    "slice of a batch": lambda node: "_n0" in node.name,
    "kernel of ours": lambda node: node.choice is not None and (node.choice.target == "jit" or "+" in node.choice.impl),
    "factors in weights": lambda node: ".scaled" in node.name,
    "norm as convolution": lambda node: ".summand" in node.name,
    "reorder": lambda node: node.op == "reorder",
    "host": lambda node: node.choice is not None and node.choice.target == "reference",
}


def chosen(graph: Graph) -> Counter[str]:
    """Return in which ways the nodes of a formatted graph run: 1 for each that occurs."""
    nodes = list(graph.nodes())
    return Counter(what for what, holds in CHOICES.items() if any(map(holds, nodes)))
