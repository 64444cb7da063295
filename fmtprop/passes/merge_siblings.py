"""Linear layers that read the same tensor become one, with their weights side by side.

One large matrix product uses a machine better than several small ones: the projections of an attention layer, the 1x1
convolutions at the head of an inception block. Their results are slices of the common one, which are views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fmtprop.ir.graph import Graph
from fmtprop.ir.node import Node, Value
from fmtprop.ops.merging import Merger, merged

__all__ = ["MergeSiblings"]

_LINEAR = frozenset({"convolution", "inner_product", "matmul"})


@dataclass(frozen=True)
class MergeSiblings:
    """Merge every group of linear siblings; see :func:`fmtprop.ops.merging.merged` for which can be.

    Notes
    -----
    Normal graph to normal graph; a graph without such siblings comes back as it is. Whether it pays depends on the
    formats in which the slices can be read: it is for a policy that compares.
    """

    name: ClassVar[str] = "merge-siblings"

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object where nothing is to be merged."""
        groups = _groups(graph)
        if not groups:
            return graph
        first = {siblings[0]: merger for siblings, merger in groups.items()}
        gone = {name for siblings in groups for name in siblings}
        out = Graph(graph.name)
        out.structure = graph.structure
        nodes = graph.nodes()
        # constants first: the merged weights are made of those of siblings that come later
        for node in [n for n in nodes if n.op == "constant"] + [n for n in nodes if n.op != "constant"]:
            if node.name in first:
                for member, inputs in first[node.name].members:
                    out.add(member, inputs)
            elif node.name not in gone:
                out.add(node, graph.inputs(node.name))
            if node.op == "constant":
                out.constants[node.name] = graph.constants[node.name]
        return out


def _groups(graph: Graph) -> dict[tuple[str, ...], Merger]:
    """Return what takes the place of each group of siblings, by their names in topological order."""
    found: dict[tuple[str, ...], Merger] = {}
    families: dict[object, list[tuple[Node, Mapping[str, Value]]]] = {}
    for node in graph.nodes():
        inputs = graph.inputs(node.name)
        if node.op not in _LINEAR or "src" not in inputs or graph.node(inputs["src"].node).op == "constant":
            continue
        parameters = [value for name, value in inputs.items() if name != "src"]
        if all(graph.node(value.node).op == "constant" for value in parameters):
            key = (inputs["src"], node.op, node.attrs, tuple((p.op, p.attrs) for p in node.post_ops), "bias" in inputs)
            families.setdefault(key, []).append((node, inputs))
    for siblings in families.values():
        names = tuple(node.name for node, _ in siblings)
        merger = merged(siblings, graph.type_of, graph.fresh_name(f"{names[0]}_merged"))
        if merger is not None:
            found[names] = merger
    return found
