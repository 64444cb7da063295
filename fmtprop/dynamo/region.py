"""One captured graph: a plan for each shape of its inputs, or PyTorch if it is as fast or the only way.

Owns the choice of constant inputs, the check for stale plans, and the choice between a plan and PyTorch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fmtprop.api import compile_graph
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import Plans
from fmtprop.dynamo.pieces import is_symbolic
from fmtprop.dynamo.weights import Weights
from fmtprop.errors import FmtpropError
from fmtprop.frontends.functional import Functional, import_functional

__all__ = ["InPyTorch", "Outcome", "Region", "compare"]

_LOG = logging.getLogger(__name__)

#: plans that a region keeps, one for each shape; the one that was used longest ago goes first
_MOST_PLANS = 8

#: shapes that are planned at their first call; after them, calls until a shape is; shapes of which calls are counted
_FIRST_SHAPES, _CALLS_FOR_PLAN, _MOST_COUNTED = 4, 3, 1024

#: times that a plan is made anew because weights changed, before PyTorch runs the graph: packing them pays no more
_MOST_CHANGES = 8

#: timed runs of each side when a plan is compared with PyTorch, and seconds that this may take
_TRIALS, _TRIAL_SECONDS = 5, 0.5


@dataclass(frozen=True)
class Outcome:
    """The executor of a graph for inputs of one shape, and the reason.

    Parameters
    ----------
    net : CompiledModel, optional
        The plan; None if PyTorch runs the graph.
    reason : str
        The reason for PyTorch, or the speed-up of the plan.
    """

    net: CompiledModel | None
    reason: str


class InPyTorch:
    """Calls that PyTorch always runs.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The calls.
    reason : str
        The reason.
    """

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, reason: str) -> None:
        self.module, self._run = module, module.forward
        self.outcomes = [Outcome(None, reason)]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the calls."""
        results: Sequence[Any] = self._run(*args)
        return results


class Region:
    """A functional graph, ready to be called by AOTAutograd, with a list of inputs.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A functional graph of ATen calls.
    constants : frozenset of int
        Positions of the inputs that are constants as long as they are not changed.
    options : Options
        How to compile.
    """

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, constants: frozenset[int], options: Options) -> None:
        self.module, self.options = module, options
        self._constants = sorted(constants)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._varying = [i for i in range(len(placeholders)) if i not in constants]
        self._symbolic = any(is_symbolic(node.meta.get("val")) for node in placeholders)
        self._plans: Plans[object, _Plan] = Plans(_MOST_PLANS)
        #: calls with shapes that have no plan
        self._unplanned: Counter[object] = Counter()
        self._changes = 0

    @property
    def outcomes(self) -> list[Outcome]:
        """The executor of the graph for each shape so far."""
        outcomes = [plan.outcome for plan in self._plans.values()] or [Outcome(None, "it was never called")]
        rare = len(self._unplanned)
        reason = f"{rare} shapes were met less than {_CALLS_FOR_PLAN} times after the first {_FIRST_SHAPES} shapes"
        return [*outcomes, Outcome(None, reason)] if rare else outcomes

    @property
    def is_left_to_pytorch(self) -> bool:
        """Whether PyTorch runs all calls from now on: there is one shape, and its plan is not faster."""
        return not self._symbolic and bool(self._plans) and all(plan.weights is None for plan in self._plans.values())

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the graph."""
        key = self._key(args)
        plan = self._plans.known(key)
        if plan is None and self._is_rare(key):
            return self._run_eager(args)
        if plan is None or plan.is_stale([args[i] for i in self._constants]):
            plan = self._plan(key, args)
        return plan.run(args)

    def _is_rare(self, key: object) -> bool:
        """Return whether this shape is one of many, and was used too rarely for a plan."""
        if len(self._plans) < _FIRST_SHAPES:
            return False
        if len(self._unplanned) > _MOST_COUNTED:
            self._unplanned.clear()
        self._unplanned[key] += 1
        if self._unplanned[key] < _CALLS_FOR_PLAN:
            return True
        del self._unplanned[key]
        return False

    def _key(self, args: Sequence[Any]) -> object:
        """Return a key that differs between calls with different plans."""
        if not self._symbolic:
            return ()
        varying = (args[i] for i in self._varying)
        return tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in varying)

    def _plan(self, key: object, args: Sequence[Any]) -> _Plan:
        weights = [args[i] for i in self._constants]

        def make() -> _Plan:
            self._changes += self._plans.known(key) is not None
            made = self._made(args, weights)
            _LOG.info("a graph runs %s: %s", "as a plan" if made.outcome.net else "in PyTorch", made.outcome.reason)
            return made

        return self._plans.get(key, make, lambda plan: not plan.is_stale(weights))

    def _made(self, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> _Plan:
        if self._changes > _MOST_CHANGES:
            return self._eager(f"its weights have changed {self._changes} times")
        if not all(type(value) in (torch.Tensor, torch.nn.Parameter, int) and _is_here(value) for value in args):
            return self._eager("an input is not a plain tensor in the CPU's memory")
        packed = Weights(weights)
        try:
            functional, net = self._compiled(args)

            def run(given: Sequence[Any]) -> Sequence[Any]:
                return functional.results(net.run_flat(functional.inputs(given)), given)

            faster, seconds = compare(lambda: run(args), lambda: self._run_eager(args))
        except FmtpropError as error:
            return self._eager(str(error))
        if not faster:
            net.close()
            return self._eager(f"PyTorch is as fast: {seconds[1] * 1e6:.0f} us, the plan {seconds[0] * 1e6:.0f} us")
        reason = f"{seconds[0] * 1e6:.0f} us, PyTorch takes {seconds[1] * 1e6:.0f}"
        return _Plan(packed, run, Outcome(net, reason))

    def _eager(self, reason: str) -> _Plan:
        return _Plan(None, self._run_eager, Outcome(None, reason))

    def _compiled(self, args: Sequence[Any]) -> tuple[Functional, CompiledModel]:
        program = _specialised(self.module, args) if self._symbolic else self.module
        functional = import_functional(program, {i: args[i] for i in self._constants}, "region")
        options = replace(self.options, boundary=functional.boundary)
        return functional, compile_graph(functional.graph, options)

    def _run_eager(self, args: Sequence[Any]) -> Sequence[Any]:
        results: Sequence[Any] = self.module.forward(*args)
        return results


@dataclass
class _Plan:
    """The executor of a graph. Without packed weights, it is right for any weights."""

    weights: Weights | None
    run: Callable[[list[Any]], Sequence[Any]]
    outcome: Outcome

    def is_stale(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether the packed weights differ from the present content of these tensors."""
        return self.weights is not None and not self.weights.are(weights)


def _specialised(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """Return the graph for the sizes of these inputs, its symbols replaced by numbers."""
    with torch.fx.traceback.preserve_node_meta():
        return make_fx(lambda *values: fx.Interpreter(module).run(*values), tracing_mode="fake")(*args)


def _is_here(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    return value.device.type == "cpu" and value.layout == torch.strided and not value.is_inference()


def compare(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[bool, tuple[float, float]]:
    """Return whether ours is faster, and the median seconds of both, run in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    start = perf_counter()
    ours(), theirs()
    while len(times[0]) < _TRIALS and (not times[0] or perf_counter() - start < _TRIAL_SECONDS):
        for run, seconds in zip((ours, theirs), times, strict=True):
            before = perf_counter()
            run()
            seconds.append(perf_counter() - before)
    figures = median(times[0]), median(times[1])
    return figures[0] < figures[1], figures
