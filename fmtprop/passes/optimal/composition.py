"""Several nodes as an alternative for one node that no single primitive offers, solved beforehand.

For the solver it is one alternative, with one format for each operand and the result. If it is chosen, the nodes
replace the one node in the formatted graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fmtprop.ir import Graph, Node, Value
from fmtprop.passes.target import Candidate

#: the target of a candidate that has a `Composition` as its handle; no node of a formatted graph has it
COMPOSED = "composed"


@dataclass(frozen=True)
class Composition:
    """Formatted nodes that compute the same as one node."""

    graph: Graph
    #: the value in that graph for each operand of the one node
    operands: Mapping[str, Value]
    result: Value
    growth: float = 1.0

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes in order, without those of operands."""
        given = {value.node for value in self.operands.values()}
        wanted = {self.result.node} | self.graph.ancestors(self.result.node)
        return self.graph.nodes(wanted - given)

    def candidate(self, impl: str) -> Candidate:
        """Return the way to run the one node by these nodes; its cost excludes nodes on constants."""
        operands = {name: self.graph.desc_of(value) for name, value in self.operands.items()}
        sources = [value.node for value in self.operands.values() if self.graph.node(value.node).op != "constant"]
        computed = self.graph.dependents(sources)
        cost = sum(node.choice.cost for node in self.nodes if node.choice is not None and node.name in computed)
        return Candidate(COMPOSED, impl, operands, (self.graph.desc_of(self.result),), cost, handle=self)
