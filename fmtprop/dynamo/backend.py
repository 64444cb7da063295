"""The backend of ``torch.compile``: it takes a graph and returns a callable.

Owns the options, and the choice of graphs that are worth a plan. :mod:`fmtprop.dynamo.region` runs graphs.

A model that trains without one graph that reached the backend is a warning. TorchDynamo leaves some modules to eager
PyTorch without a word: those of PyTorch's own classes within ``DistributedDataParallel``. It tells a backend of
nothing but graphs; so the steps of optimisers are counted until the first one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import fx
from torch.optim.optimizer import register_optimizer_step_post_hook

from fmtprop.capture.fx_import import placeholders
from fmtprop.compiling.options import KEPT, Options
from fmtprop.compiling.stages import check_f16
from fmtprop.compiling.turns import compare
from fmtprop.dynamo.caches import growing
from fmtprop.dynamo.pieces import (
    Piece,
    Pieces,
    has_codes,
    has_fixed_products,
    in_place,
    parted,
    without_repeats,
    without_writes,
)
from fmtprop.dynamo.pytorch import OWN_MEMORY, PlainTensorMeta, backends, counters, saves_functions
from fmtprop.dynamo.region import InPyTorch, LeftToPyTorch, Region
from fmtprop.dynamo.saved_graph import SavedGraph
from fmtprop.errors import OptionError
from fmtprop.targets.registry import provider
from fmtprop.training.capture import metadata_now, training_backend
from fmtprop.training.step import TrainingStep
from fmtprop.training.views import WithViews, without_views

#: steps of optimisers, after the first frame that TorchDynamo looked at, before the warning
STEPS = 3


class StepCounter:
    """Counts steps of all optimisers, until a graph arrives or the warning was given."""

    def __init__(self) -> None:
        self._steps = 0
        self._hook = register_optimizer_step_post_hook(self._count)

    def end(self) -> None:
        """Stop counting: a graph has arrived."""
        self._hook.remove()

    def _count(self, *_: Any) -> None:
        if "fmtprop" not in backends or not counters["frames"]["total"]:
            return  # torch.compile was not asked for the backend, or its result was not called
        if counters["stats"]["unique_graphs"]:
            return  # another backend's
        self._steps += 1
        if self._steps < STEPS:
            return
        self.end()
        warnings.warn(
            f"torch.compile was asked for backend 'fmtprop', and optimisers made {STEPS} steps since, but no graph has "
            "reached fmtprop: the model trains in eager PyTorch. TorchDynamo skips modules of PyTorch's own classes, "
            "such as nn.Sequential, within DistributedDataParallel: compile the module first and wrap the result, "
            "DistributedDataParallel(torch.compile(module, backend='fmtprop'))",
            RuntimeWarning,
            stacklevel=2,
        )


#: options of fp.compile without a meaning for a captured graph: its inputs and outputs do not have the user's names
_NAMELESS = ("boundary", "pin", "progress", "stage")

#: torch.compile's modes -> the `tune` option with this meaning
_MODES: Mapping[str | None, str | None] = {
    None: None,
    "default": None,
    "max-autotune": "measure",
    "max-autotune-no-cudagraphs": "measure",
}

#: option of this door alone
_GROW = "grow_caches"

#: a function that is called with each new region and training step
Observer = Callable[[Any], None]

#: PyTorch imports this module when it is asked for the backend by name; it tells nothing more before the first graph
_WATCH = StepCounter()


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Make a graph of TorchDynamo ready to run; ``torch.compile(model, backend="fmtprop")`` calls this.

    `mode`: ``"max-autotune"`` measures costs on this machine, as ``tune="measure"`` does. `options`: options of
    :func:`fmtprop.compile`: ``dtype``, ``policy``, ``target``, ``tune``, ``verify``, …; and ``grow_caches``, False by
    default: caches that grow by ``torch.cat`` get memory with room behind them, so that the next concat copies only the
    new elements. Then old and new cache share memory, and neither is contiguous. Raises OptionError if a mode or an
    option is unknown, or a value is not one of its values, and UnsupportedOpError if this CPU lacks f16.
    """
    _WATCH.end()
    if saves_functions():
        return SavedGraph.of(module, (mode, dict(options or {})))
    return made(module, example_inputs, mode, options)


def made(
    module: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """Make a captured graph ready to run: :func:`backend` for a graph that PyTorch does not save."""
    given = dict(options or {})
    grow = given.pop(_GROW, False)
    if not isinstance(grow, bool):
        raise OptionError(f"backend 'fmtprop': {_GROW!r} must be True or False, got {grow!r}")
    return regions_by(options_of(mode, given), lambda region: None, grow=grow)(module, example_inputs)


SavedGraph.made = staticmethod(made)


def options_of(mode: str | None, given: Mapping[str, Any] | None) -> Options:
    """Return the options of a compilation from those of ``torch.compile``.

    >>> options_of("max-autotune", {"dtype": "bf16"}).tune
    'measure'
    """
    if mode not in _MODES:
        known = ", ".join(repr(name) for name in _MODES if name is not None)
        raise OptionError(f"backend 'fmtprop' has no mode {mode!r}; it has {known}")
    known_options = [field.name for field in fields(Options) if field.name not in _NAMELESS]
    for name in given or {}:
        if name not in known_options:
            known = ", ".join([*known_options, _GROW])
            raise OptionError(f"backend 'fmtprop' has no option {name!r}; it has {known}")
    tune = _MODES[mode]
    return Options(**({"tune": tune} if tune else {}) | dict(given or {}))


def regions_by(
    options: Options, observe: Observer, *, grow: bool = False
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Return a backend with these options; an observer is told of its regions."""
    check_f16(provider(options.target)(), options.dtype)  # else PyTorch would run the graph, in f32
    made: list[Region | InPyTorch] = []  # PyTorch captures one graph at a time

    def compile_inference(functional: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        functional, views = without_views(without_repeats(functional))
        constants = _constant_inputs(functional)
        if grow and has_fixed_products(functional, constants):
            functional = growing(functional)
        coded = bool(options.codes) or has_codes(functional, constants)
        whole, functional = without_writes(functional), in_place(functional)
        pieces = parted(functional, constants, own_views=coded)
        if len(pieces) > 1 and whole is not None and len(parted(whole.module, constants)) == 1:
            pieces = [replace(whole, constants=constants, in_pytorch=functional)]
        is_all = len(pieces) == 1 and _changes_nothing()
        runs = [run_of(piece, is_all) for piece in pieces]
        if views is None and isinstance(runs[0], Region):
            runs[0].is_direct = is_all and _adds_nothing()
        made.extend(runs)
        for one in runs:
            observe(one)
        run: Callable[..., Any] = runs[0]
        if len(runs) > 1:
            run = Pieces(functional, list(zip(runs, pieces, strict=True)))
        return run if views is None else WithViews(run, views)

    def run_of(piece: Piece, is_all: bool) -> Region | InPyTorch:
        if piece.is_ours:
            return Region(piece, options, is_all=is_all)
        return InPyTorch(piece.module)

    trained = replace(options, special_values=KEPT) if options.special_values == "fast" else options

    def make_step(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> TrainingStep:
        step = TrainingStep(forward, backward, outputs, trained)
        observe(step)
        return step

    functionalised = training_backend(
        make_step, compile_inference, options, compare=compare, required=False, writes=True
    )

    def compile_captured(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made.clear()
        run = functionalised(module, example_inputs)
        if not made:
            return run
        only = made[0]
        if isinstance(only, Region) and only.is_all:
            only.is_direct &= only.arity == len(example_inputs)  # AOTAutograd passes a tensor once
            return _instead(run, module.forward, only)
        return _beside(run, module.forward, tuple(made))

    return compile_captured


def _beside(
    run: Callable[..., Any], captured: Callable[..., Any], parts: tuple[Region | InPyTorch, ...]
) -> Callable[..., Any]:
    """Return a function that runs the parts of a graph, or the captured graph where PyTorch would run all parts."""
    settled = False

    def call(*args: Any) -> Any:
        nonlocal settled
        if settled:
            return captured(*args)
        results = run(*args)
        settled = all(part.is_left_to_pytorch for part in parts)
        return results

    return call


def _instead(run: Callable[..., Any], captured: Callable[..., Any], whole: Region) -> Callable[..., Any]:
    """Return a function that runs a region that is a whole graph, or the captured graph where this is faster.

    The functional form has about twice as many calls: each linear layer is a transposition and a product there. So the
    region competes with the captured graph.
    """

    def call(*args: Any) -> Any:
        if whole.is_left_to_pytorch:
            return captured(*args)
        try:
            results = whole(args) if whole.is_direct else run(*args)
        except LeftToPyTorch:
            return captured(*args)
        if whole.new.plan is None or whole.wins(lambda: run(*args), lambda: captured(*args)):
            return results
        return captured(*args)

    return call


def _changes_nothing() -> bool:
    """Return whether the graph in the making changes none of its inputs."""
    metadata = metadata_now()
    return metadata is not None and not any(one.mutates_data or one.mutates_metadata for one in metadata.input_info)


def _adds_nothing() -> bool:
    """Return whether AOTAutograd would keep arguments and results of the calls in the graph in the making."""
    metadata = metadata_now()
    return (
        metadata is not None
        and all(one.output_type in OWN_MEMORY for one in metadata.output_info)
        and all(isinstance(one, PlainTensorMeta) for one in metadata.subclass_inp_meta)
        and not (metadata.num_intermediate_bases or metadata.tokens or metadata.is_rng_op_functionalized)
        and metadata.grad_enabled_mutation is None
    )


def _constant_inputs(functional: fx.GraphModule) -> frozenset[int]:
    """Return the positions of parameters and buffers that the graph in the making reads and does not change."""
    metadata = metadata_now()
    if metadata is None:
        return frozenset()
    # inputs in front of all others keep calls with effects in order; the graph may do without them
    tokens, own = len(metadata.tokens), len(metadata.input_info)
    gone = tokens + own - len(placeholders(functional))
    static = (i for i in metadata.static_input_indices if not metadata.input_info[i - tokens].mutates_data)
    return frozenset(i - gone for i in static)
