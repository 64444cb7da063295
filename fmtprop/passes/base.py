"""The protocol of a pass, and pipelines of passes.

A pass is a frozen dataclass: its fields are its options, ``run`` takes a graph and returns another one. A pipeline has
a plain tuple of passes; the graph is verified after each that changed it, so an error names the pass that caused it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from fmtprop.errors import FmtpropError, OptionError, PassError
from fmtprop.ir import Graph, Node
from fmtprop.ir.verify import Stage, verify

#: called with a pass's name and its result
Observer = Callable[[str, Graph], None]


class Pass(Protocol):
    """A graph rewrite."""

    #: shown by ``fmtprop show`` and in errors; of a subclass, its own name, such as ``fold-constants``
    name: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name") or re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the given graph does not change."""


class NodePass(Pass):
    """A pass that visits the nodes one after another."""

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph, without nodes that nothing reads."""
        graph = graph.copy()
        self.edit(graph)
        return graph

    def edit(self, graph: Graph) -> None:
        """Rewrite a graph in place."""
        for node in graph.nodes():
            if node.name in graph:
                self._visit(graph, node)
        graph.remove_dead()

    @abstractmethod
    def _visit(self, graph: Graph, node: Node, /) -> None:
        """Rewrite a node and its neighbours in place, if the pass applies to it."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order.

    >>> from fmtprop.ir import TensorType
    >>> g = Graph("tiny")
    >>> g.output(g.input("x", TensorType((1, 8))))
    >>> Pipeline((), Stage.NORMAL).run(g)
    <Graph tiny: 2 nodes, 1 edges>
    """

    passes: tuple[Pass, ...]
    #: stage of the last pass's result; between passes the graph must be well-formed (``Stage.IMPORTED``)
    stage_after: Stage
    #: whether the graph differs only in sizes from one that the passes have taken to this stage. Then nothing is
    #: verified, since its formatted graph is: all rules hold there, too. If a pass fails, each result is verified.
    is_known: bool = False

    def run(self, graph: Graph, observer: Observer | None = None) -> Graph:
        """Run every pass.

        `graph`: a graph at ``Stage.IMPORTED`` at least; it is not changed. Raises OptionError if the caller's option
        fits no node.
        """
        if self.is_known and self.passes:
            try:
                return self._run_unverified(graph, observer)
            except FmtpropError:
                return replace(self, is_known=False).run(graph, observer)  # it names the pass
        verify(graph, Stage.IMPORTED)
        done: list[str] = []
        for index, step in enumerate(self.passes):
            last = index == len(self.passes) - 1
            try:
                result = step.run(graph)
                if last:
                    verify(result, self.stage_after)
                elif not result.is_copy_of(graph):  # which was verified
                    verify(result, Stage.IMPORTED)
                graph = result
            except OptionError:
                raise
            except FmtpropError as error:
                before = f"after {', '.join(done)}" if done else "the first pass"
                raise PassError(f"pass {step.name} ({before}): {error}") from error
            done.append(step.name)
            if observer is not None:
                observer(step.name, graph)
        if not self.passes:
            verify(graph, self.stage_after)
        return graph

    def _run_unverified(self, graph: Graph, observer: Observer | None) -> Graph:
        """Run every pass."""
        graph = graph.copy()  # nobody else has it
        for step in self.passes:
            if observer is None and isinstance(step, NodePass) and type(step).run is NodePass.run:
                step.edit(graph)
            else:
                graph = step.run(graph)
            if observer is not None:
                observer(step.name, graph)
        return graph
