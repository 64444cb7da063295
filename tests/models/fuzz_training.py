"""Random models that train: results, gradients and buffers of two steps beside eager PyTorch's, by both doors.

Owns the calls that only training has, and the comparison of steps. See :mod:`tests.models.fuzz`.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError
from tests.models.fuzz import REFUSED, Draw, Model, Program, fresh, values_of
from tests.models.fuzz_calls import groups_of

#: error of a tensor relative to its largest number, to PyTorch's own error, and to the largest number of all
_RELATIVE, _OWN, _OF_ALL = 1e-4, 10.0, 5e-6

#: the first of these where a program computes in bf16 or f16: a plan rounds once where PyTorch rounds a sum and its
#: product, twice by at most half of a last digit
_RELATIVE_OF_NARROW = 2.0**-8

#: one step: results, gradients of inputs and parameters, buffers, by name
Figures = dict[str, torch.Tensor]


def check_steps(program: Program, seed: int, doors: Sequence[str] = ("fp.compile", "torch.compile")) -> str | None:
    """Return the error of a program's steps of training by either door, None if all is well.

    Parameters
    ----------
    program : Program
        Drawn for training.
    seed : int
        Chooses frozen parameters, inputs with gradients, policy and memory option.
    doors : sequence of str, optional
        The doors.
    """
    model = Model(program).train()
    learned = _freeze(model, program, seed)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = [[fresh(t, number).clone() for t in program.inputs.values()] for number in (1, 2)]
    expected = _run(model, model, program, inputs, learned, state)
    if expected is None or not all(bool(torch.isfinite(t).all()) for one in expected for t in one.values()):
        return None
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in values_of(program).values())
    relative = _RELATIVE_OF_NARROW if narrow else _RELATIVE
    for door in doors:
        torch._dynamo.reset()
        try:
            found = _run(model, _compiled(model, inputs[0], learned, door, seed), program, inputs, learned, state)
        except ImportModelError as error:
            if any(text in str(error) for text in REFUSED):
                continue
            return f"{door}: import: {error}"
        except Exception as error:
            return f"{door}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        if found is None:
            return f"{door}: nothing requires gradients, PyTorch's results do"
        if wrong := _differ(found, expected, lambda: _moved_steps(model, program, inputs, learned, state), relative):
            return f"{door}: {wrong}"
    return None


def _freeze(model: Model, program: Program, seed: int) -> frozenset[str]:
    """Freeze some parameters by name; return the inputs that get gradients."""

    def chosen(name: str, share: float) -> bool:
        return random.Random(f"{seed} {name}").random() < share

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name, 0.7))
    floats = (name for name, tensor in program.inputs.items() if tensor.dtype.is_floating_point)
    return frozenset(name for name in floats if chosen(name, 0.4))


def _compiled(
    model: nn.Module, inputs: Sequence[torch.Tensor], learned: frozenset[str], door: str, seed: int
) -> Callable[..., Any]:
    draw = random.Random(f"how {seed}")
    how = {
        "policy": draw.choice(["optimal", "optimal", "propagate", "naive"]),
        "memory": draw.choice(["save", "save", "recompute"]),
        "tune": "model",
        "confirm": False,
    }
    if door == "torch.compile":
        return torch.compile(model, backend="fmtprop", options=how)
    given = tuple(
        tensor.clone().requires_grad_(name in learned)
        for name, tensor in zip(model.program.inputs, inputs, strict=True)
    )
    return fp.compile(model, given, training=True, **how)


def _run(
    model: Model,
    call: Callable[..., Any],
    program: Program,
    inputs: Sequence[Sequence[torch.Tensor]],
    learned: frozenset[str],
    state: dict[str, torch.Tensor],
) -> list[Figures] | None:
    """Run a step on each list of inputs; None if PyTorch itself cannot differentiate the program."""
    model.load_state_dict(state)
    # the plan of torch.compile shall run, not the faster of it and PyTorch
    with mock.patch("fmtprop.dynamo.backend.compare", lambda ours, theirs, _: (True, (0.0, 1.0))):
        steps = []
        for tensors in inputs:
            given = [t.clone().requires_grad_(n in learned) for n, t in zip(program.inputs, tensors, strict=True)]
            model.zero_grad()
            torch.manual_seed(1)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=UserWarning, module="torch")
                if call is model:
                    try:
                        results = _step(model, call, program, given)
                    except (RuntimeError, NotImplementedError):
                        return None
                else:
                    results = _step(model, call, program, given)
            if results is None:
                return None
            steps.append(results)
    model.load_state_dict(state)
    model.zero_grad()
    return steps


def _step(model: Model, call: Callable[..., Any], program: Program, given: Sequence[torch.Tensor]) -> Figures | None:
    results = torch.utils._pytree.tree_leaves(call(*given))
    floats = [result for result in results if result.dtype.is_floating_point]
    # in a random order, since sums of neighbours that cancel would show only their rounding
    order = torch.Generator().manual_seed(0)
    losses = [
        (result.double() * (2 * torch.rand(result.shape, dtype=torch.double, generator=order) - 1)).sum()
        for result in floats
        if result.requires_grad and result.numel()
    ]
    if not losses:
        return None
    torch.stack(losses).sum().backward()
    found = {f"result {place}": result.detach().double() for place, result in enumerate(floats)}
    tensors = {**dict(zip(program.inputs, given, strict=True)), **dict(model.named_parameters())}
    found |= {f"gradient of {name}": t.grad.double() for name, t in tensors.items() if t.grad is not None}
    buffers = {f"buffer {name}": b.detach().double() for name, b in model.named_buffers() if b.is_floating_point()}
    return found | buffers


def _moved_steps(
    model: Model,
    program: Program,
    inputs: Sequence[Sequence[torch.Tensor]],
    learned: frozenset[str],
    state: dict[str, torch.Tensor],
) -> list[list[Figures]]:
    """Return eager steps of which the last digits of inputs and parameters were changed: their condition."""
    found = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        moved = [[_moved(t, generator) for t in tensors] for tensors in inputs]
        changed = {name: _moved(t, generator) for name, t in state.items()}
        if (steps := _run(model, model, program, moved, learned, changed)) is not None:
            found.append(steps)
    return found


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return (tensor * (1 + 3e-7 * noise)).to(tensor.dtype)


def _differ(
    found: list[Figures], expected: list[Figures], others: Callable[[], list[list[Figures]]], relative: float
) -> str | None:
    noise: list[list[Figures]] | None = None
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        missing = [name for name in theirs if name not in ours]
        # a compiled step is one function, whose gradients are zeros where PyTorch has none
        more = [name for name, tensor in ours.items() if name not in theirs and _largest(tensor) > 0]
        if missing or more:
            return f"step {number}: gradients are missing: {missing}; gradients that PyTorch has not: {more}"
        largest = max((_largest(tensor) for tensor in theirs.values()), default=0.0)
        for name, tensor in theirs.items():
            if ours[name].shape != tensor.shape:
                return f"step {number}, {name} is {tuple(ours[name].shape)}, not {tuple(tensor.shape)}"
            error = _largest(ours[name] - tensor)
            if error <= max(relative * _largest(tensor), _OF_ALL * largest):
                continue
            noise = others() if noise is None else noise
            own = max((_largest(other[number][name] - tensor) for other in noise), default=0.0)
            if not error <= _OWN * own:
                figures = f"{error:.1e} of {_largest(tensor):.1e}; rounding moves it by {own:.1e}"
                return f"step {number}, {name} is off by {figures}"
    return None


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().nan_to_num(torch.inf).max()) if tensor.numel() else 0.0


# ---------------------------------------------------------------- the calls

#: name -> (what draws and adds the call, how often relative to the others)
TRAINING_CALLS: dict[str, tuple[Callable[[Draw], object], int]] = {}


def call(weight: int) -> Callable[[Callable[[Draw], object]], Callable[[Draw], object]]:
    def register(function: Callable[[Draw], object]) -> Callable[[Draw], object]:
        TRAINING_CALLS[function.__name__] = (function, weight)
        return function

    return register


@call(8)
def batch_statistics(d: Draw) -> object:
    x = d.pick((2, 3, 4, 4, 5), lambda t: t.numel() > 0 and t.numel() > t.shape[1])
    size, rng = d.values[x].shape[1], d.rng
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    how = {
        "momentum": rng.choice([0.1, 0.1, 0.3, 1.0]),
        "affine": rng.random() < 0.8,
        "track_running_stats": rng.random() < 0.8,
    }
    made = kinds[d.values[x].ndim](size, **how).train(rng.random() < 0.85)
    return d.call(f"{type(made).__name__}({size}, {how})", made, [x], made)


@call(5)
def dropout(d: Draw) -> object:
    rng = d.rng
    x, p = d.pick(), rng.choice([0.1, 0.5])
    kind = rng.choice([F.dropout, F.dropout, F.dropout, F.dropout2d, F.alpha_dropout])
    if kind is F.dropout2d and d.values[x].ndim != 4:
        kind = F.dropout
    return d.call(f"{kind.__name__}({p})", lambda x: kind(x, p, True), [x])


@call(3)
def recurrent(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3,), lambda t: 0 < t.shape[-1] <= 32 and t.numel() > 0)
    torch.manual_seed(rng.randrange(1000))
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    how = {
        "num_layers": rng.choice([1, 1, 2]),
        "bidirectional": rng.random() < 0.4,
        "batch_first": rng.random() < 0.5,
        "bias": rng.random() < 0.8,
    }
    if how["num_layers"] == 2:
        how["dropout"] = rng.choice([0.0, 0.3])
    made = kind(d.values[x].shape[-1], rng.choice([3, 5, 8]), **how)
    return d.call(f"{kind.__name__}({how})[0]", lambda x: made(x)[0], [x], made)


@call(3)
def encoder(d: Draw) -> object:
    rng = d.rng
    x = d.pick((3,), lambda t: 0 < t.shape[-1] <= 32 and t.numel() > 0)
    size = d.values[x].shape[-1]
    torch.manual_seed(rng.randrange(1000))
    p = rng.choice([0.0, 0.1])
    if rng.random() < 0.5:
        made: nn.Module = nn.MultiheadAttention(size, groups_of(d, size), p, batch_first=True)
        return d.call(f"mha(x, x, x, {p=})[0]", lambda x: made(x, x, x, need_weights=False)[0], [x], made)
    made = nn.TransformerEncoderLayer(size, groups_of(d, size), 16, p, norm_first=rng.random() < 0.5)
    return d.call(f"encoder layer({p=})", made, [x], made)


@call(3)
def detached(d: Draw) -> object:
    x = d.pick()
    if d.rng.random() < 0.5:
        return d.call("x.detach()", lambda x: x.detach() * 1, [x])
    return d.call("x + (x * 2).detach()", lambda x: x + (x * 2).detach(), [x])


@call(4)
def loss(d: Draw) -> object:
    x, rng = d.pick(range(1, 5), lambda t: t.numel() > 0), d.rng
    shape = d.values[x].shape
    if len(shape) == 2 and rng.random() < 0.6:
        labels = torch.arange(shape[0]) % shape[1]
        smooth = rng.choice([0.0, 0.1])
        return d.call(f"cross_entropy({smooth})", lambda x: F.cross_entropy(x, labels, label_smoothing=smooth), [x])
    y = d.weight(*shape)
    kind = rng.choice([F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
    return d.call(f"{kind.__name__}", lambda x, y: kind(x, y), [x, y])


@call(3)
def own_parameters(d: Draw) -> object:
    """A convolution or a linear layer, sometimes used twice."""
    x, rng = d.pick((2, 3, 4, 4)), d.rng
    size = d.values[x].shape[-1 if d.values[x].ndim < 4 else 1]
    if not size:
        return None
    torch.manual_seed(rng.randrange(1000))
    made: nn.Module = nn.Linear(size, size) if d.values[x].ndim < 4 else nn.Conv2d(size, size, 3, padding=1)
    y = d.call("layer", made, [x], made)
    return d.call("the same layer", lambda y: made(y), [y]) if rng.random() < 0.4 else y
