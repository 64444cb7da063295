"""How much arithmetic a graph asks for, counted from shapes. Knows nothing of who does it, or how fast."""

from __future__ import annotations

import math

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node

__all__ = ["count_flops"]


def count_flops(graph: Graph) -> int:
    """Count the multiplications and additions of a graph's convolutions and products.

    `graph`: at any stage. Its other ops, about 1 % of the arithmetic of a usual network, do not count. Result:
    operations of one run; a multiplication and the addition of its result are two.

    >>> from fmtprop.capture import load
    >>> count_flops(load("chain"))  # 3 × 3 × 3 products for each of 32 × 32 × 32 elements
    1769472
    """
    return sum(_flops(graph, node) for node in graph.nodes())


def _flops(graph: Graph, node: Node) -> int:
    if node.op not in ("convolution", "deconvolution", "inner_product", "matmul"):
        return 0
    sources = {name: graph.type_of(value).dims for name, value in graph.inputs(node.name).items()}
    src, weights, dst = sources["src"], sources["weights"], node.results[0].dims
    if node.op == "matmul":
        return 2 * math.prod(dst) * src[-1]
    # weights are [groups,] dst, src, kernel…: all but the dst channels are summed
    channels, spread = (src[1], src) if node.op == "deconvolution" else (dst[1], dst)
    return 2 * math.prod(spread) * math.prod(weights) // channels
