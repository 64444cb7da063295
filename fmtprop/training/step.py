"""One training step of one captured graph: planned at its first call, run in two halves.

Owns the values that AOTAutograd saves between the halves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.errors import FmtpropError, PlanError
from fmtprop.frontends.functional import import_functional
from fmtprop.frontends.joint import Joint, import_joint
from fmtprop.ir.graph import Graph
from fmtprop.runtime.halves import Halves
from fmtprop.system.locks import ProcessLock

__all__ = ["Evaluation", "Planner", "Step", "leading_sizes"]

#: returns whether the first of two calls is faster, and the seconds of both
Compare = Callable[[Callable[[], object], Callable[[], object]], tuple[bool, tuple[float, float]]]

#: plans an imported graph
Planner = Callable[[Graph, Options], CompiledModel]

_LOG = logging.getLogger(__name__)


class Step:
    """The two halves of a captured graph.

    Parameters
    ----------
    forward, backward : torch.fx.GraphModule
        Functional programs, as for :func:`fmtprop.frontends.joint.import_joint`.
    outputs : int
        Number of the forward's results for its caller.
    options : Options
        Options of the compilation.
    plan : callable
        Plans an imported graph.
    compare : callable, optional
        Returns whether the first of two calls is faster, and the seconds of both. With it, PyTorch runs the step if
        PyTorch is as fast, or if the step cannot be planned; without it, such a step is an error.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        options: Options,
        plan: Planner,
        *,
        compare: Compare | None = None,
    ) -> None:
        self.programs, self.outputs = (forward, backward), outputs
        self.options = options
        self._plan, self._compare = plan, compare
        #: positions of arguments that the caller writes new numbers to after the forward half
        self.changed: frozenset[int] = frozenset()
        #: number of first arguments that AOTAutograd adds and gets back, which the programs do not have
        self.tokens = 0
        #: the plan of both halves, after the step's first run
        self.net: CompiledModel | None = None
        #: the reason for running it in PyTorch
        self.reason = ""
        self._made: tuple[Joint, Halves] | None = None
        self._making = ProcessLock()

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Run the forward half; return its results, the ticket of this run, and the saved tensors."""
        tokens, args = args[: self.tokens], args[self.tokens :]
        made = self._ready(args)
        for position in self._saved_and_changed:
            args[position] = args[position].clone()
        if made is None:
            results = self.programs[0].forward(*args)
            return [*tokens, *results[: self.outputs], _NO_TICKET, *results[self.outputs :]]
        joint, halves = made
        try:
            outputs, ticket = halves.forward(joint.forward.given(args))
        except PlanError:
            self.programs[0].forward(*args)  # raises PyTorch's own error, if PyTorch refuses these numbers too
            raise
        results = joint.forward.found(outputs, args)
        saved = [ticket if value is None else value for value in results[self.outputs :]]
        return [*tokens, *results[: self.outputs], ticket, *saved]

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward half on the ticket, the saved tensors, and the gradients of the forward's results."""
        made, sizes = self._made, leading_sizes(self.programs[1])
        ticket, given = args[sizes], [*args[:sizes], *args[sizes + 1 :]]
        if made is None:
            results: Sequence[Any] = self.programs[1].forward(*given)
            return results
        joint, halves = made
        # a graph that is kept may be walked again
        again = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        outputs = halves.backward(ticket, joint.backward.given(given), again=again)
        return joint.backward.found(outputs, given)

    @cached_property
    def _saved_and_changed(self) -> tuple[int, ...]:
        """The arguments of which the backward half needs the old numbers; a copy of one is no copy in a plan."""
        nodes = self.programs[0].graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder"]
        saved = next(node for node in nodes if node.op == "output").args[0][self.outputs :]
        sources = self._made[0].forward.results[self.outputs :] if self._made is not None else ()
        return tuple(
            position for position in sorted(self.changed) if inputs[position] in saved or ("input", position) in sources
        )

    def _ready(self, args: Sequence[Any]) -> tuple[Joint, Halves] | None:
        with self._making.current:
            if self._made is None and not self.reason:
                try:
                    with _no_hooks_for_saved_tensors():
                        self._made = self._planned()
                        self.reason = self._race(args) if self._made is not None else "it computes nothing"
                except FmtpropError as error:
                    if self._compare is None:
                        raise
                    self.reason = str(error)
                if self.reason:
                    self.net = self._made = None
                    _LOG.info("a training step runs in PyTorch: %s", self.reason)
            return self._made

    def _race(self, args: Sequence[Any]) -> str:
        """Time both sides, which change only torch's generator; return the reason if PyTorch shall run the step."""
        if self._compare is None or self._made is None:
            return ""
        (joint, halves), (forward, backward) = self._made, self.programs
        given = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
        saved = len(joint.forward.results) - self.outputs
        tangents = [torch.ones(value.shape, dtype=value.dtype) for value in given[saved:]]
        ours_given = joint.backward.given([*[None] * saved, *tangents])

        def ours() -> None:
            _, ticket = halves.forward(joint.forward.given(args))
            halves.backward(ticket, ours_given)

        def theirs() -> None:
            backward.forward(*forward.forward(*args)[self.outputs :], *tangents)

        with torch.random.fork_rng(devices=[]):
            faster, seconds = self._compare(ours, theirs)
        return "" if faster else f"PyTorch is as fast: {seconds[1] * 1e6:.0f} us, the plan {seconds[0] * 1e6:.0f} us"

    def _planned(self) -> tuple[Joint, Halves] | None:
        joint = import_joint(*self.programs, self.outputs, "step")
        if joint is None:
            return None
        self.net = self._plan(joint.graph, replace(self.options, boundary=joint.boundary))
        return joint, Halves(self.net.plan, self.net.compilation.plan_for)


def leading_sizes(backward: fx.GraphModule) -> int:
    """Return the number of a backward half's first arguments that are sizes; AOTAutograd puts these before tensors."""
    sizes = torch.SymInt, torch.SymFloat, torch.SymBool
    return next(i for i, node in enumerate(backward.graph.nodes) if not isinstance(node.meta.get("val"), sizes))


class Evaluation:
    """A captured graph that needs no gradients: an ordinary plan with parameters as inputs, since they change.

    Parameters
    ----------
    program : torch.fx.GraphModule
        A functional program.
    options : Options
        Options of the compilation.
    plan : callable
        Plans an imported graph.
    """

    _boxed_call = True

    def __init__(self, program: fx.GraphModule, options: Options, plan: Planner) -> None:
        self.program, self.options = program, options
        self._plan = plan
        #: the plan, after the graph's first run
        self.net: CompiledModel | None = None
        self._run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        self._making = ProcessLock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph; a graph that computes nothing runs in PyTorch."""
        with self._making.current:
            if self._run is None:
                functional = import_functional(self.program, {}, "evaluation")
                if functional.graph.output_nodes:
                    self.net = self._plan(functional.graph, replace(self.options, boundary=functional.boundary))
                    self._run = functional.around(self.net.run_flat)
                else:
                    self._run = lambda given: self.program.forward(*given)
        return self._run(args)


@contextmanager
def _no_hooks_for_saved_tensors() -> Iterator[None]:
    """Hide the caller's hooks for saved tensors, of checkpointing for instance, from the references of checks."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


#: the ticket of a step that PyTorch runs
_NO_TICKET = torch.zeros((), dtype=torch.int64)
