"""One training step of one captured graph: planned at its first call, run in two halves.

Owns the values that AOTAutograd saves between the halves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fmtprop import dnnl
from fmtprop.capture.functional import import_functional
from fmtprop.capture.fx_import import base_of, placeholders, results_of
from fmtprop.capture.joint import Joint, import_joint
from fmtprop.capture.random_calls import with_draws
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import Options
from fmtprop.runtime.halves import Halves
from fmtprop.system.locks import ProcessLock
from fmtprop.training.hooks import no_hooks_for_saved_tensors
from fmtprop.training.pytorch import keeps_graph, top_hooks

#: plans an imported graph
_LOG = logging.getLogger(__name__)


class TrainingStep:
    """The two halves of a captured graph.

    `forward`, `backward`: functional programs, as for :func:`fmtprop.capture.joint.import_joint`. `outputs`: number of
    the forward's results for its caller.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        outputs: int,
        options: Options,
    ) -> None:
        self.programs, self.outputs = (forward, backward), outputs
        self.options = options
        #: positions of arguments that the caller writes new numbers to after the forward half
        self.changed: frozenset[int] = frozenset()
        #: of these, positions that record no gradients, and of the results with the new numbers
        self.written: tuple[tuple[int, int], ...] = ()
        #: called after each call that PyTorch ran as the caller wrote it
        self.told: Callable[[], None] = lambda: None
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
        self.prepare()
        made, own = self._made, tuple(args)
        for position in self._saved_and_changed:
            args[position] = args[position].clone()
        if made is None:
            results = self.programs[0].forward(*args)
            self._write(own, results)
            return [*tokens, *results[: self.outputs], _NO_TICKET, *results[self.outputs :]]
        joint, halves = made
        outputs, ticket = halves.forward(joint.forward.given(args))
        results = joint.forward.found(outputs, args)
        self._write(own, results)
        saved = [ticket if value is None else value for value in results[self.outputs :]]
        return [*tokens, *results[: self.outputs], ticket, *saved]

    def _write(self, args: Sequence[Any], results: Sequence[Any]) -> None:
        """Write changed arguments at once if hooks take saved tensors.

        A checkpoint ends its second forward pass at the last saved tensor, before AOTAutograd writes.
        """
        if self.written and top_hooks(False) is not None:
            for position, result in self.written:
                args[position].copy_(results[result])

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward half on the ticket, the saved tensors, and the gradients of the forward's results."""
        made, sizes = self._made, leading_sizes(self.programs[1])
        ticket, given = args[sizes], [*args[:sizes], *args[sizes + 1 :]]
        if made is None:
            results: Sequence[Any] = self.programs[1].forward(*given)
            return results
        joint, halves = made
        # a graph that is kept may be walked again
        again = bool(keeps_graph())
        outputs = halves.backward(ticket, joint.backward.given(given), again=again)
        return joint.backward.found(outputs, given)

    @cached_property
    def _saved_and_changed(self) -> tuple[int, ...]:
        """The arguments of which the backward half needs the old numbers.

        A copy of one is no copy in a plan. The caller may change an argument after the call if the model saves a copy.
        """
        inputs, saved = placeholders(self.programs[0]), results_of(self.programs[0])[self.outputs :]
        sources = self._made[0].forward.results[self.outputs :] if self._made is not None else ()
        copied = [source for source, one in zip(sources, saved, strict=False) if base_of(one) not in inputs]
        return tuple(
            position
            for position in range(len(inputs))
            if ("input", position) in copied
            or (position in self.changed and (inputs[position] in saved or ("input", position) in sources))
        )

    @property
    def arity(self) -> int:
        """Number of arguments of the forward program."""
        return len(placeholders(self.programs[0]))

    def prepare(self) -> None:
        """Make the plan, if it was not made; a step that computes nothing has none.

        Raises FmtpropError if the step cannot be planned.
        """
        with self._making.current:
            if self._made is None and not self.reason:
                with no_hooks_for_saved_tensors():  # not for the references of checks
                    self._made = self._planned()
                if self._made is None:
                    self.leave("it computes nothing")

    def rest(self) -> None:
        """Return the memory that steps keep between them to the system; the next step takes new memory."""
        if self._made is not None:
            self._made[1].rest()
        dnnl.trim_heap()

    def leave(self, reason: str) -> None:
        """Leave the step to PyTorch for a reason, and release the plan."""
        made, self.net, self._made, self.reason = self._made, None, None, reason
        if made is not None:
            made[1].close()
        _LOG.info("a training step runs in PyTorch: %s", reason)

    def _planned(self) -> tuple[Joint, Halves] | None:
        joint = import_joint(*self.programs, self.outputs, "step")
        if joint is None:
            return None
        self.net = compile_graph(joint.graph, replace(self.options, boundary=joint.boundary))
        return joint, Halves(self.net.plan, self.net.compilation.plan_for, flushes=self.options.flushes)


def leading_sizes(backward: fx.GraphModule) -> int:
    """Return the number of a backward half's first arguments that are sizes; AOTAutograd puts these before tensors."""
    sizes = torch.SymInt, torch.SymFloat, torch.SymBool
    return next(i for i, node in enumerate(backward.graph.nodes) if not isinstance(node.meta.get("val"), sizes))


class Evaluation:
    """A captured graph that needs no gradients: an ordinary plan with parameters as inputs, since they change."""

    _boxed_call = True

    def __init__(self, program: fx.GraphModule, options: Options) -> None:
        self.program, self.options = program, options
        #: the plan, after the graph's first run
        self.net: CompiledModel | None = None
        self._run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        self._making = ProcessLock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph; a graph that computes nothing runs in PyTorch."""
        with self._making.current:
            if self._run is None:
                program, draws = with_draws(self.program)
                functional = import_functional(program, {}, "evaluation")
                if functional.graph.output_nodes:
                    self.net = compile_graph(functional.graph, replace(self.options, boundary=functional.boundary))
                    run = functional.binding.around(self.net.run_flat)
                    self._run = (lambda given: run([*given, *(draw() for draw in draws)])) if draws else run
                else:
                    self._run = lambda given: self.program.forward(*given)
        return self._run(args)


#: the ticket of a step that PyTorch runs
_NO_TICKET = torch.zeros((), dtype=torch.int64)
