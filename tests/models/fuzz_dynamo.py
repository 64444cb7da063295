"""Random models through ``torch.compile(backend="fmtprop")``: sizes that change, parts in bf16, weights that change.

Owns the changes of a program that only this door sees, and the comparison with eager PyTorch. See
:mod:`tests.models.fuzz`.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by
from tests.models import fuzz
from tests.models.choices import chosen
from tests.models.fuzz import Model, Program, Step, fresh

_POLICIES = ("optimal", "optimal", "propagate", "naive")


def check_captured(program: Program, seed: int) -> str | None:
    """Return the error of a program's plans behind torch.compile, None if all is well.

    Parameters
    ----------
    program : Program
        Drawn for inference.
    seed : int
        Chooses the policy, the calls in bf16, the sizes that change, and the change of weights.
    """
    rng = random.Random(f"captured {seed}")
    rounded = rng.random() < 0.3
    if rounded:
        program = _in_parts_bf16(program, rng)
    model = Model(program).eval()
    first = [fresh(t, 1) for t in program.inputs.values()]
    sized = _other_sizes(model, first, rng)
    calls = [first] if sized is None else [first, sized]
    dynamic = True if sized is not None else rng.choice([None, False])
    how = {"policy": rng.choice(_POLICIES), "tune": "model", "confirm": False}
    regions: list[Any] = []
    change = rng.choice(list(CHANGES))
    try:
        with _always_ours(), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            torch._dynamo.reset()
            run = torch.compile(model, backend=regions_by(options_of(None, how), regions.append), dynamic=dynamic)
            for number, inputs in enumerate([*calls, *calls]):
                if number == len(calls):
                    CHANGES[change](model, rng)
                wrong = _difference(model, run, inputs, rounded)
                if wrong:
                    after = f" after {change}" if number >= len(calls) else ""
                    shapes = [tuple(t.shape) for t in inputs]
                    return f"dynamo: {wrong}; call {number}{after}, shapes {shapes}, dynamic={dynamic}, {how}"
    except Exception as error:
        if not _is_captured(model, calls, dynamic):
            return None  # PyTorch's own capture fails
        return f"dynamo: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    finally:
        torch._dynamo.reset()
    for one in regions:
        for outcome in one.outcomes:
            fuzz.CHOSEN.update(["a graph of PyTorch's"] if outcome.net is None else chosen(outcome.net.graph))
    return None


def _difference(model: Model, run: Callable[..., Any], inputs: Sequence[torch.Tensor], rounded: bool) -> str | None:
    """Return how the results of a call differ from eager PyTorch's."""
    given, other = [[t.clone() for t in inputs] for _ in range(2)]
    expected = model(*other)
    got = run(*given)
    if not fuzz.is_finite(expected):
        return None
    program = model.program
    wrong = fuzz.differ(
        fuzz.without_ties(program, list(inputs), got, expected), expected, fuzz.ROUNDER if rounded else 1.0
    )
    if wrong and not fuzz.is_noise(model, list(inputs), expected, rounded):
        return wrong
    if any(not torch.equal(a, b) for a, b in zip(given, other, strict=True)):
        return "an input has other numbers than after PyTorch's call"
    return None


def _is_captured(model: Model, calls: Sequence[Sequence[torch.Tensor]], dynamic: bool | None) -> bool:
    """Say whether PyTorch's own backend runs the calls."""
    torch._dynamo.reset()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = torch.compile(model, backend="aot_eager", dynamic=dynamic)
            for inputs in calls:
                run(*(t.clone() for t in inputs))
    except Exception:
        return False
    return True


@contextmanager
def _always_ours() -> Iterator[None]:
    """Run plans where PyTorch is faster, too."""
    without_limit = torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000)
    with without_limit, mock.patch.object(region, "compare", lambda ours, theirs: (ours() is not None, (0.0, 1.0))):
        yield


# ---------------------------------------------------------------- sizes and types


def _other_sizes(model: Model, inputs: Sequence[torch.Tensor], rng: random.Random) -> list[torch.Tensor] | None:
    """Return inputs in which one size is another wherever it occurs at one axis; None if PyTorch cannot run them."""
    axes = sorted({(axis, size) for t in inputs for axis, size in enumerate(t.shape)})
    for axis, size in rng.sample(axes, min(len(axes), 4)):
        other = size + rng.choice([1, 2, 3]) if size < 2 or rng.random() < 0.7 else size - 1

        def resized(tensor: torch.Tensor, axis: int = axis, size: int = size, other: int = other) -> torch.Tensor:
            if axis >= tensor.ndim or tensor.shape[axis] != size:
                return tensor
            places = torch.arange(other) % max(size, 1)
            return tensor.index_select(axis, places) if size else tensor

        made = [resized(t) for t in inputs]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(*(t.clone() for t in made))
        except Exception:  # PyTorch refuses these sizes
            continue
        return made
    return None


def _in_parts_bf16(program: Program, rng: random.Random) -> Program:
    """Return the program with some calls in bf16, between conversions."""
    steps = list(program.steps)
    for index, step in enumerate(steps):
        if step.module is None and "_(" not in step.text and rng.random() < 0.5:
            tried = replace(program, steps=(*steps[:index], _in_bf16(step), *steps[index + 1 :]))
            try:
                values = fuzz.values_of(tried)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                continue
            if all(bool(values[name].isfinite().all()) for name in step.results):
                steps[index] = tried.steps[index]
    return replace(program, steps=tuple(steps))


def _in_bf16(step: Step) -> Step:
    def function(*tensors: torch.Tensor) -> Any:
        made = step.function(*(t.bfloat16() if t.dtype is torch.float32 else t for t in tensors))
        widened = [
            t.float() if t.dtype is torch.bfloat16 else t for t in (made if isinstance(made, tuple | list) else (made,))
        ]
        return tuple(widened) if isinstance(made, tuple | list) else widened[0]

    return replace(step, text=f"{step.text} in bf16", function=function)


# ---------------------------------------------------------------- weights


def _floats(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]


def _in_place(model: nn.Module, rng: random.Random) -> None:
    for _, _, parameter in _floats(model):
        parameter.mul_(0.5)


def _data(model: nn.Module, rng: random.Random) -> None:
    for _, _, parameter in _floats(model):
        parameter.data = parameter.data * 0.75


def _loaded(model: nn.Module, rng: random.Random) -> None:
    model.load_state_dict({n: t * 0.5 if t.is_floating_point() else t for n, t in model.state_dict().items()})


def _replaced(model: nn.Module, rng: random.Random) -> None:
    for module, name, parameter in _floats(model):
        setattr(module, name, nn.Parameter(parameter * 0.5, requires_grad=parameter.requires_grad))


def _frozen(model: nn.Module, rng: random.Random) -> None:
    for _, _, parameter in _floats(model):
        parameter.requires_grad_(False).add_(0.125)


def _one_number(model: nn.Module, rng: random.Random) -> None:
    for _, _, parameter in rng.sample(_floats(model), min(1, len(_floats(model)))):
        parameter.view(-1)[:1] += 1


def _stepped(model: nn.Module, rng: random.Random) -> None:
    parameters = [p for _, _, p in _floats(model)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    if parameters:
        torch.optim.SGD(parameters, lr=0.1).step()
    model.zero_grad()


def _buffers(model: nn.Module, rng: random.Random) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(1.25)


#: eight changes of weights between two calls
CHANGES: dict[str, Callable[[nn.Module, random.Random], None]] = {
    "a change in place": _in_place,
    "other .data": _data,
    "load_state_dict": _loaded,
    "other parameters": _replaced,
    "requires_grad_ and a change": _frozen,
    "a change of one number": _one_number,
    "an optimiser's step": _stepped,
    "other buffers": _buffers,
}
