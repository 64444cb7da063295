"""One captured graph: a plan for each shape of its inputs, or PyTorch if it is as fast or the only way.

Owns the choice of constant inputs, the check for stale plans, and the choice between a plan and PyTorch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from fmtprop.api import compile_graph
from fmtprop.capture.functional import Functional, import_functional
from fmtprop.capture.fx_import import placeholders
from fmtprop.capture.specialise import specialised_module
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import CALLS_FOR_PLAN, Plans
from fmtprop.compiling.shapes import Shapes
from fmtprop.compiling.turns import compare
from fmtprop.dynamo import artifacts
from fmtprop.dynamo.caches import Grow
from fmtprop.dynamo.pieces import Piece, is_symbolic
from fmtprop.errors import FmtpropError, ScaleError
from fmtprop.ir.tensors import defer
from fmtprop.jit import Words, no_code
from fmtprop.ops.pytorch import OpOverload
from fmtprop.runtime.weights import SharedForms

_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr

#: numbers of a tensor that are compared, and candidates for them
_COMPARED, _CANDIDATES = 8, 64


class Weights:
    """The state of tensors when a plan was made from them.

    `tensors`: the tensors; they are kept alive, so that no other tensor can get the memory of one.

    PyTorch counts the changes of a tensor, and another tensor has other memory. A change in place through ``.data`` or
    through NumPy is not counted: it is detected if it changes one of eight numbers of the tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._state = [*map(_VERSION, self._tensors), *map(_ADDRESS, self._tensors)]
        words = () if no_code() else [word for tensor in self._tensors for word in _words(tensor.detach())]
        self._watch = Words(words) if words else None

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the same tensors with the same numbers."""
        same = all(map(is_, self._tensors, tensors))
        same = same and [*map(_VERSION, tensors), *map(_ADDRESS, tensors)] == self._state
        return same and (self._watch is None or not self._watch.has_changed)


def _words(tensor: torch.Tensor) -> list[int]:
    """Return addresses of some numbers, of which none is zero if possible: a factor does not change zeros."""
    count = tensor.numel()
    places = sorted({place * (count - 1) // (_CANDIDATES - 1) for place in range(_CANDIDATES)}) if count else []
    axes = list(zip(tensor.shape, tensor.stride(), strict=True))[::-1]
    offsets = [_offset(place, axes) for place in places]
    values = tensor.as_strided((max(offsets, default=-1) + 1,), (1,))[offsets]
    ordered = sorted(zip((values == 0).tolist(), offsets, strict=True), key=lambda one: one[0])
    known = [offset for _, offset in ordered][: max(_COMPARED, int((values != 0).sum()))]
    step = -(-len(known) // _COMPARED) or 1
    return [(tensor.data_ptr() + offset * tensor.element_size()) & ~3 for offset in known[::step]]


def _offset(place: int, axes: Sequence[tuple[int, int]]) -> int:
    """Return an element's distance from the first one; axes are (size, stride), the last one first."""
    offset = 0
    for size, stride in axes:
        place, index = divmod(place, size)
        offset += index * stride
    return offset


class _WatchedShapes(Shapes):
    """What the plans of a computation with these weights share."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__(weights)
        self.weights = Weights(weights)

    def keep(self, weights: Sequence[torch.Tensor]) -> None:
        """Forget what was packed if a weight was changed since."""
        if not self.weights.are(weights):
            self.forms, self.weights = SharedForms(weights), Weights(weights)


#: by weights, which their values keep alive, and computation
_SHARED: WeakValueDictionary[Hashable, _WatchedShapes] = WeakValueDictionary()


def _shared(weights: Sequence[torch.Tensor], computation: Hashable) -> _WatchedShapes:
    """Return what plans of a computation share, however often PyTorch captured it."""
    if not weights:
        return _WatchedShapes(())
    key = computation, *map(id, weights)
    shared = _SHARED.get(key)
    if shared is None:
        shared = _SHARED[key] = _WatchedShapes(weights)
    shared.keep(weights)
    return shared


_LOG = logging.getLogger(__name__)

#: plans that a region keeps, one for each shape
MOST_PLANS = 8

#: times that a plan is made anew because weights changed, before PyTorch runs the graph: packing them pays no more
_MOST_CHANGES = 8

#: a plan for a later shape is not compared with PyTorch again if all comparisons so far were clear: calls of at least
#: these seconds, and the plan at most at this share of PyTorch's time
_LONG_SECONDS, _CLEAR_SHARE = 0.01, 0.9

#: bytes of a tensor that is copied for each trial of a plan that changes it
_SMALL_NBYTES = 4096


@dataclass(frozen=True)
class Ready:
    """The executor of a graph for inputs of one shape, and the reason."""

    #: the plan; None if PyTorch runs the graph
    net: CompiledModel | None
    #: the reason for PyTorch, or the speed-up of the plan
    reason: str


class LeftToPyTorch(Exception):
    """A region is called that PyTorch is to run, as it was captured: its functional form takes up to twice as long."""


class InPyTorch:
    """Calls that PyTorch always runs."""

    _boxed_call = True

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self._run = module, module.forward
        self.outcomes = [Ready(None, "it has sizes that change, or writes to its inputs")]
        #: the captured graph would copy caches
        self.is_left_to_pytorch = not any(isinstance(node.target, Grow) for node in module.graph.nodes)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the calls."""
        results: Sequence[Any] = self._run(*args)
        return results


class Region:
    """A functional graph, ready to be called by AOTAutograd, with a list of inputs.

    `piece`: the graph, its inputs that are constants as long as they are not changed, and those that it changes. Their
    new contents are there after the run, as plans are tried on copies. `is_all`: whether the
    region is all of a captured graph, which changes no input. The region's caller runs that graph at
    :class:`LeftToPyTorch`, and asks whether a new plan :meth:`wins` beside it. Else plans compete with `module`.
    `is_direct`: whether the captured graph has the same arguments and results, so that it can be called instead. `new`:
    its `plan` is the plan that this thread's last call has made and that was not compared; else None.
    `is_left_to_pytorch`: whether PyTorch runs all calls from now on: there is one shape, and its plan is not faster.
    """

    _boxed_call = True

    def __init__(self, piece: Piece, options: Options, *, is_all: bool = False) -> None:
        self.module, self.options, self.is_all = piece.in_pytorch or piece.module, options, is_all
        self._program, self._changed, constants = piece.module, piece.changed, piece.constants
        self.new = _New()
        self.is_direct = self.is_left_to_pytorch = False
        self._constants = sorted(constants)
        self._weights = _chooser(self._constants)
        inputs = placeholders(self.module)
        self.arity = len(inputs)
        self._varying = [i for i in range(self.arity) if i not in constants]
        self._symbolic = any(is_symbolic(node.meta.get("val")) for node in inputs)
        self._plans: Plans[object, _Plan] = Plans(MOST_PLANS)
        self._shapes: _WatchedShapes | None = None
        #: the plan of a graph of fixed sizes
        self._only: _Plan | None = None
        self._changes = 0
        #: of each comparison, whether the plan was clearly faster than a long call of PyTorch
        self._clear: list[bool] = []

    @property
    def outcomes(self) -> list[Ready]:
        """The executor of the graph for each shape so far."""
        outcomes = [plan.outcome for plan in self._plans.values()] or [Ready(None, "it was never called")]
        rare = self._plans.rare
        reason = f"{rare} shapes were met less than {CALLS_FOR_PLAN} times after the first {MOST_PLANS} shapes"
        return [*outcomes, Ready(None, reason)] if rare else outcomes

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run the graph."""
        only = self._only
        if only is not None:
            packed = only.weights
            if packed is None or packed.are(self._weights(args)):
                return only.run(args)
        key = self._key(args) if self._symbolic else ()
        plan = self._plans.known(key)
        if plan is None and not self.options.plans_all and self._plans.is_rare(key):
            return self._run_eager(args)
        if plan is None or plan.is_stale(self._weights(args)):
            plan = self._plan(key, args)
        return plan.run(args)

    def _key(self, args: Sequence[Any]) -> object:
        """Return a key that differs between calls with different shapes."""
        varying = (args[i] for i in self._varying)
        return tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in varying)

    def _plan(self, key: object, args: Sequence[Any]) -> _Plan:
        weights = self._weights(args)

        def make() -> _Plan:
            self._changes += self._plans.known(key) is not None
            made = self._made(args, weights)
            if self.is_all and made.outcome.net is not None and not made.outcome.reason:
                self.new.plan = made
            else:
                _tell(made.outcome)
            return made

        plan = self._plans.get(key, make, lambda plan: not plan.is_stale(weights))
        self._settle(plan)
        return plan

    def _settle(self, plan: _Plan) -> None:
        if not self._symbolic:
            self._only, self.is_left_to_pytorch = plan, plan.weights is None

    def _made(self, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> _Plan:
        if self._changes > _MOST_CHANGES:
            return self._eager(f"its weights have changed {self._changes} times")
        if not all(type(value) in (torch.Tensor, torch.nn.Parameter, int) and _is_here(value) for value in args):
            return self._eager("an input is not a plain tensor in the CPU's memory")
        if any(weight.is_inference() for weight in weights):
            return self._eager("a weight was made in inference mode: PyTorch does not count its changes")
        packed = Weights(weights)
        try:
            functional, options = self._imported(args)
            key = artifacts.key_of(functional.graph, options)
            earlier = artifacts.learned(key)
            if earlier is not None and earlier.choices is None:
                return self._eager(earlier.reason)
            self._shapes = shapes = _shared(weights, (repr(self.options), self._calls()))
            if earlier is not None and earlier.choices is not None:
                # its key has the options and the machine: there, the plan passed its check
                shapes.note_choices(*earlier.choices, is_checked=True)
            net = compile_graph(functional.graph, options, shapes=shapes)
            run = functional.binding.around(net.run_flat)
            made = _Plan(packed, run, Ready(net, earlier.reason if earlier is not None else ""), key)
            trial = self._trial(args)
            if self.is_all or earlier is not None:
                run(trial())
            else:
                self._decide(made, lambda: run(trial()), lambda: self._run_eager(trial()))
        except FmtpropError as error:
            if isinstance(error.__cause__, ScaleError):
                raise  # PyTorch would divide by it
            return self._eager(str(error))
        return made

    def _trial(self, args: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """Return a function that gives arguments for a trial: copies of those that the graph changes.

        A counter begins anew in each trial, and may not count beyond a cache; large copies are made once.
        """
        if not self._changed:
            return lambda: args
        copies = {place: args[place].clone() for place in self._changed}
        small = [place for place, copy in copies.items() if copy.nbytes <= _SMALL_NBYTES]

        def trial() -> Sequence[Any]:
            for place in small:
                copies[place] = args[place].clone()
            return [copies.get(place, value) for place, value in enumerate(args)]

        return trial

    def wins(self, ours: Callable[[], object], theirs: Callable[[], object]) -> bool:
        """Compare the plan that this thread's last call has made, if it made one, with the captured graph."""
        made, self.new.plan = self.new.plan, None
        if made is None:
            return True
        self._decide(made, ours, theirs)
        self._settle(made)
        _tell(made.outcome)
        return made.outcome.net is not None

    def _decide(self, made: _Plan, ours: Callable[[], object], theirs: Callable[[], object]) -> None:
        """Keep a new plan where it is the faster."""
        net = made.outcome.net
        if net is not None and self.options.codes:
            made.outcome = Ready(net, f"{self.options.codes}: PyTorch would compute with other numbers")
            artifacts.record(made.key, net, made.outcome.reason)
            return
        if net is not None and self._clear and all(self._clear) and net.compilation.is_like_another_shape:
            made.outcome = Ready(net, "another shape's choices, which were clearly faster than PyTorch")
            artifacts.record(made.key, net, made.outcome.reason)
            return
        faster, (seconds, others) = compare(ours, theirs)
        self._clear.append(seconds <= _CLEAR_SHARE * others and others >= _LONG_SECONDS)
        if faster or net is None:
            made.outcome = Ready(net, f"{seconds * 1e6:.0f} us, PyTorch takes {others * 1e6:.0f}")
            artifacts.record(made.key, net, made.outcome.reason)
            return
        made.weights, made.run = None, self._run_eager
        made.outcome = Ready(None, f"PyTorch is as fast: {others * 1e6:.0f} us, the plan {seconds * 1e6:.0f} us")
        artifacts.record(made.key, None, made.outcome.reason)
        net.close()

    def _eager(self, reason: str) -> _Plan:
        return _Plan(None, self._run_eager, Ready(None, reason))

    def _imported(self, args: Sequence[Any]) -> tuple[Functional, Options]:
        program = specialised_module(self._program, args) if self._symbolic else self._program
        functional = import_functional(program, {i: args[i] for i in self._constants}, "region", self._changed)
        functional = replace(
            functional, graph=defer(functional.graph, lent=True)
        )  # each call asks whether they were changed
        return functional, replace(self.options, boundary=functional.boundary)

    def _calls(self) -> tuple[str, ...]:
        """Return what the graph computes for any sizes: for some of them, PyTorch captures a model anew."""
        calls = (str(node.target) for node in self.module.graph.nodes if isinstance(node.target, OpOverload))
        return tuple(call for call in calls if not call.startswith("aten.sym_"))

    def _run_eager(self, args: Sequence[Any]) -> Sequence[Any]:
        if self.is_all:
            raise LeftToPyTorch
        results: Sequence[Any] = self.module.forward(*args)
        return results


@dataclass
class _Plan:
    """The executor of a graph. Without packed weights, it is right for any weights."""

    weights: Weights | None
    run: Callable[[Sequence[Any]], Sequence[Any]]
    outcome: Ready
    key: str | None = None

    def is_stale(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether the packed weights differ from the present content of these tensors."""
        packed = self.weights  # read once: another thread may leave the plan to PyTorch
        return packed is not None and not packed.are(weights)


class _New(threading.local):
    """The plan that this thread has made and not yet compared."""

    plan: _Plan | None = None


def _chooser(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[torch.Tensor]]:
    """Return a function that selects some arguments."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: [args[place] for place in places]


def _tell(outcome: Ready) -> None:
    _LOG.info("a graph runs %s: %s", "as a plan" if outcome.net else "in PyTorch", outcome.reason)


def _is_here(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    return value.device.type == "cpu" and value.layout == torch.strided
