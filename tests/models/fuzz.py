"""Random models: a program of PyTorch calls over random tensors, drawn from a seed, run, and cut down when it fails.

Owns what a program is, how one is drawn, compared with PyTorch and made smaller. Which calls there are is
:mod:`tests.models.fuzz_calls`'s affair. By hand, for many seeds:

    python -m tests.models.fuzz --seeds 1000:2000

runs them in child processes, so that a crash costs one seed and leaves a trace. Besides the policies, each model is
compiled as :mod:`tests.models.odd` says: by random costs, with random pins, with another number of threads. With
``--train``, steps of training are compared instead (:mod:`tests.models.fuzz_training`), with ``--policies
dynamo-{seed}`` calls through ``torch.compile`` (:mod:`tests.models.fuzz_dynamo`), with ``--policies shapes-{seed}``
calls with five shapes (:mod:`tests.models.fuzz_shapes`).
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import random
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fmtprop.api import CompiledModel, Options, compile_graph
from fmtprop.capture import from_torch
from fmtprop.capture.fx_import import import_calls
from fmtprop.errors import ImportModelError
from fmtprop.ir import Graph
from fmtprop.ir.tensors import tensor_type
from tests.models import odd
from tests.models.choices import chosen
from tests.threads import torch_threads

#: error relative to the largest expected magnitude
TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
#: how many times as much results in bf16 may be off as those in f32
ROUNDER = TOLERANCE[torch.bfloat16] / TOLERANCE[torch.float32]
#: refusals that are right: the import says so, with a remedy
REFUSED = ("modifies its input", "run-time check", "changes windows of a tensor")
#: most elements of a tensor, unless told
SIZE = 30_000
#: largest magnitude
RANGE = 1e3
#: calls that tell places of numbers along the last axis, or in an image
PLACES = ("argmax(-1)", "max(-1)", "sort", "topk(2)", "max_pool2d(2, return_indices")


#: what a model is compiled by unless told; "odd-7" is random costs of seed 7, "pins-7" some of their formats as pins,
#: "default" is what a user gets, with plans that run against each other, "bf16:propagate" computes in bf16; "dynamo-7"
#: goes through torch.compile (:mod:`tests.models.fuzz_dynamo`), "shapes-7" has five shapes, each alone
POLICIES = ("propagate", "naive", "plain")

_BF16, _DYNAMO, _SHAPES = "bf16:", "dynamo-", "shapes-"


#: how often each way to run was chosen since the process began
CHOSEN: Counter[str] = Counter()


class Unfit(Exception):
    """The call that was tried does not fit the tensors that there are."""


@dataclass(frozen=True)
class Step:
    """One call: ``results = function(*args)``, all by name; ``module`` holds its parameters if it has its own."""

    text: str
    function: Callable[..., Any]
    args: tuple[str, ...]
    results: tuple[str, ...]
    module: nn.Module | None = None

    def __str__(self) -> str:
        return f"{', '.join(self.results)} = {self.text}  # reads {', '.join(self.args)}"


@dataclass(frozen=True)
class Program:
    """Calls in order, with the tensors that they start from and the form in which results are handed over."""

    inputs: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    form: str = "tuple"
    #: for training, the seed that chooses what is frozen
    training: int | None = None

    def __str__(self) -> str:
        lines = [f"input     {n}: {t.dtype} {tuple(t.shape)} strides {t.stride()}" for n, t in self.inputs.items()]
        lines += [f"parameter {n}: {t.dtype} {tuple(t.shape)}" for n, t in self.parameters.items()]
        return "\n".join([*lines, *map(str, self.steps), f"return {self.form}({', '.join(self.outputs)})"])


class Model(nn.Module):
    """A program as a module."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        #: moves what calls write into memory of their own, None for nothing
        self.moved: Callable[[torch.Tensor], torch.Tensor] | None = None
        for name, tensor in program.parameters.items():
            if tensor.dtype.is_floating_point:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.children_of_steps = nn.ModuleList([s.module for s in program.steps if s.module is not None])

    def forward(self, *inputs: torch.Tensor) -> Any:
        values: dict[str, Any] = dict(zip(self.program.inputs, inputs, strict=True))
        values |= {name: getattr(self, name) for name in self.program.parameters}
        for step in self.program.steps:
            made = step.function(*(values[name] for name in step.args))
            made = made if isinstance(made, tuple | list) else (made,)
            values |= dict(zip(step.results, self._moved(values, made), strict=True))
        results = [values[name] for name in self.program.outputs]
        match self.program.form:
            case "one":
                return results[0]
            case "dict":
                return {f"out_{i}": value for i, value in enumerate(results)}
            case "nested":
                return results[0], {"rest": results[1:]}
        return tuple(results)

    def _moved(self, values: dict[str, Any], made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.moved is None:
            return made
        known = {t.untyped_storage().data_ptr() for t in values.values()}
        is_own = [t.is_floating_point() and t.untyped_storage().data_ptr() not in known for t in made]
        return [self.moved(t) if own else t for t, own in zip(made, is_own, strict=True)]


# ---------------------------------------------------------------- drawing


@dataclass
class Draw:
    """A program in the making; its tensors are computed as it grows, so that every call is known to be legal."""

    rng: random.Random
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    largest: int = SIZE

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return torch.randn(tuple(shape), generator=generator)

    def input(self, tensor: torch.Tensor) -> str:
        if len(self.inputs) >= 8:
            raise Unfit
        name = f"x{len(self.inputs)}"
        self.values[name] = tensor
        self.inputs.append(name)
        return name

    def parameter(self, tensor: torch.Tensor) -> str:
        """Add a parameter; sometimes a used one of that shape, an input, or a computed tensor instead."""
        same = [n for n in self.parameters if self.values[n].shape == tensor.shape]
        if same and self.rng.random() < 0.3:
            return self.rng.choice(same)
        if self.rng.random() < 0.08:
            return self.input(tensor)
        name = f"p{len(self.parameters)}"
        self.values[name] = tensor
        self.parameters.append(name)
        return self.call("p * 2", lambda p: p * 2, [name]) if self.rng.random() < 0.05 else name

    def weight(self, *shape: int, positive: bool = False) -> str:
        fan = 1
        for size in shape[1:]:
            fan *= size
        tensor = self.normal(shape) / max(fan, 1) ** 0.5
        return self.parameter(tensor.abs() + 0.5 if positive else tensor)

    def pick(self, ndim: Sequence[int] = range(7), fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """Return a float tensor of one of these ranks, recent ones rather than old ones; make one where none is."""
        found = [
            name
            for name, t in self.values.items()
            if t.ndim in ndim and t.dtype == torch.float32 and name not in self.parameters and fits(t)
        ]
        if not found or self.rng.random() < 0.04:
            rank = self.rng.choice(list(ndim))
            tensor = self.normal(self.shape(rank))
            if not fits(tensor):
                raise Unfit
            return self.input(self.strided(tensor))
        return self.rng.choice(found[-4:] if self.rng.random() < 0.7 else found)

    def shape(self, rank: int) -> list[int]:
        rng = self.rng
        batch, channels = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 6, 8, 8, 12, 16, 16, 17, 24, 32])
        rest = [
            rng.choice([1, 2, 4, 5, 7, 8]) if rank > 4 else rng.choice([1, 3, 4, 7, 8, 9, 12, 14]) for _ in range(6)
        ]
        if rng.random() < 0.01:
            batch = 0
        return [batch, channels, *rest][:rank]

    def strided(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = self.rng.random()
        if kind < 0.15 and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        if kind < 0.25 and tensor.ndim > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind < 0.35:
            flat = torch.zeros(tensor.numel() + 1)
            flat[1:] = tensor.flatten()
            return flat[1:].view(tensor.shape)  # not aligned to more than one element
        return tensor

    def call(
        self, text: str, function: Callable[..., Any], args: Sequence[str], module: nn.Module | None = None
    ) -> str:
        """Add a call; return the name of its first result."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = function(*(self.values[name] for name in args))
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise Unfit from error
        made = tuple(made) if isinstance(made, tuple | list) else (made,)
        for tensor in made:
            if tensor.numel() > self.largest or tensor.is_complex():
                raise Unfit
            if tensor.numel() and not bool((tensor.double().abs() < RANGE).all()):
                raise Unfit
        names = tuple(f"v{len(self.steps)}" + (f"_{i}" if len(made) > 1 else "") for i in range(len(made)))
        self.steps.append(Step(text, function, tuple(args), names, module))
        self.values |= dict(zip(names, made, strict=True))
        return names[0]

    def program(self) -> Program:
        rng = self.rng
        computed = [name for step in self.steps for name in step.results]
        if not computed:
            raise Unfit
        outputs = [computed[-1], *(name for name in computed[:-1] if rng.random() < 0.15)][:6]
        if rng.random() < 0.05:
            outputs.append(outputs[0])
        if rng.random() < 0.03:
            outputs.append(rng.choice([*self.inputs, *self.parameters]))
        form = rng.choice(["tuple", "tuple", "dict", "nested"]) if len(outputs) > 1 else rng.choice(["one", "tuple"])
        return Program(
            {name: self.values[name] for name in self.inputs},
            {name: self.values[name] for name in self.parameters},
            tuple(self.steps), tuple(outputs), form,
        )  # fmt: skip


def draw(seed: int, calls: int = 12, blocks: bool = False, training: bool = False) -> Program:
    """Draw a program of about so many calls, or a network of real sizes."""
    from tests.models.fuzz_blocks import draw_blocks
    from tests.models.fuzz_calls import CALLS
    from tests.models.fuzz_training import TRAINING_CALLS

    if blocks:
        return replace(draw_blocks(seed), training=seed if training else None)
    known = {**CALLS, **TRAINING_CALLS} if training else CALLS

    rng = random.Random(seed)
    torch.manual_seed(seed)  # dropout
    state = Draw(rng)
    names, weights = list(known), [weight for _, weight in known.values()]
    favourites = rng.sample(names, 6)
    for _ in range(calls):
        name = rng.choice(favourites) if rng.random() < 0.3 else rng.choices(names, weights)[0]
        kept = (dict(state.values), list(state.inputs), list(state.parameters), list(state.steps))
        try:
            known[name][0](state)
        except Unfit:
            state.values, state.inputs, state.parameters, state.steps = kept
    if not state.steps:
        x = state.input(state.normal([2, 3]))
        state.call("relu", torch.relu, [x])
    # what in-place calls did to the drawn tensors must not be in the inputs
    program = state.program()
    # nobody reads random numbers of dead calls: a compiled step need not draw them
    return replace(_without_dead(program), training=seed) if training else program


# ---------------------------------------------------------------- checking


def check(program: Program, policies: Sequence[str] = POLICIES, runs: int = 2, fast: bool = False) -> str | None:
    """Return what is wrong with a program's compiled forms, None where all is well."""
    if program.training is not None:
        from tests.models.fuzz_training import check_steps

        return check_steps(program, program.training)
    if alone := [policy for policy in policies if policy.startswith((_DYNAMO, _SHAPES))]:
        from tests.models.fuzz_dynamo import check_captured
        from tests.models.fuzz_shapes import check_shapes

        checks = {_DYNAMO: check_captured, _SHAPES: check_shapes}
        ways = [(kind + "-", int(seed)) for kind, _, seed in (policy.partition("-") for policy in alone)]
        found = (checks[kind](program, seed) for kind, seed in ways)
        return next((wrong for wrong in found if wrong is not None), None)
    if fast and (graph := traced(program)) is None:
        return None
    model = Model(program).eval()
    inputs = [fresh(t, 0) for t in program.inputs.values()]
    if fast:
        program = replace(program, form="one" if len(program.outputs) == 1 else "tuple")
        model = Model(program).eval()
    try:
        if not fast:
            graph = from_torch(model, tuple(inputs))
    except ImportModelError as error:
        if any(text in str(error) for text in REFUSED):
            return None
        return f"import: {error}"
    # a product that the model itself computes in bf16 differs by a rounding
    is_narrow = any(value.dtype is torch.bfloat16 for value in values_of(program).values())
    for policy in policies:
        try:
            net = compiled(graph, policy)
            if isinstance(net, CompiledModel):
                CHOSEN.update(chosen(net.graph))
            for seed in range(1, runs + 1):
                inputs = [fresh(t, seed) for t in program.inputs.values()]
                kept = [t.clone() for t in inputs]
                with torch.no_grad():
                    expected, hides = _with_hidden(model, [t.clone() for t in inputs])
                with torch_threads(1 + (seed + len(policy)) % 2 if "-" in policy else torch.get_num_threads()):
                    if isinstance(net, CompiledModel):
                        forget(net)
                    got = net(*inputs)
                if hides or not is_finite(expected):
                    continue  # where NaN differs is documented, and tested by itself
                is_bf16 = policy.startswith(_BF16) or is_narrow
                wrong = differ(without_ties(program, kept, got, expected), expected, ROUNDER if is_bf16 else 1.0)
                if wrong and not (
                    is_noise(model, kept, expected, is_bf16)
                    or depends_on_strides(model, kept, expected)
                    or is_wrong(model, kept, expected)
                ):
                    return f"{policy}, run {seed}: {wrong}"
                if any(not torch.equal(a, b) for a, b in zip(inputs, kept, strict=True)):
                    return f"{policy}, run {seed}: an input was changed"
        except Exception as error:
            return f"{policy}: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    return None


def _with_hidden(model: Model, inputs: Sequence[torch.Tensor]) -> tuple[Any, bool]:
    """Return a model's results, and whether a conversion to integers may have made a number of NaN or infinity."""
    finite: list[bool] = []
    converts = any(step.text.startswith(("to(torch.int", "to(torch.bool")) for step in model.program.steps)
    if converts:
        model.moved = lambda tensor: (finite.append(bool(torch.isfinite(tensor).all())), tensor)[1]
    results = model(*inputs)
    model.moved = None
    return results, not all(finite)


def compiled(graph: Graph, policy: str) -> CompiledModel:
    """Compile by a policy, or in one of the ways of :data:`POLICIES`."""
    kind, _, seed = policy.partition("-")
    if policy == "default":
        return compile_graph(graph, Options())
    if kind == "odd":
        return odd.compile_odd(graph, int(seed))
    if kind == "pins":
        pins = odd.some_pins(graph, odd.compile_odd(graph, int(seed) + 1), int(seed))
        net = odd.compile_odd(graph, int(seed), pins)
        if lost := odd.lost_pins(net, pins):
            raise AssertionError(f"pins without effect: {lost}")
        return net
    dtype = "bf16" if policy.startswith(_BF16) else "f32"
    return compile_graph(graph, Options(dtype, policy.removeprefix(_BF16), tune="model", confirm=False))


def forget(net: CompiledModel) -> None:
    """Fill the memory of the activations with NaN, which no result may have."""
    context, give_back = net._executor.lease()
    context.arena.memory.fill_(0xFF)
    give_back()


def traced(program: Program) -> Graph | None:
    """Import a program without ``torch.export``, ten times faster; None for what only the exporter can make a graph of.

    Nothing makes in-place calls functional here, and modules keep their parameters to themselves.
    """
    if any(step.module is not None or "_(" in step.text for step in program.steps):
        return None

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip([*program.inputs, *program.parameters], tensors, strict=True))
        for step in program.steps:
            made = step.function(*(values[name] for name in step.args))
            made = made if isinstance(made, tuple | list) else (made,)
            values |= dict(zip(step.results, made, strict=True))
        return tuple(values[name] for name in program.outputs)

    tensors = [t.detach() for t in (*program.inputs.values(), *program.parameters.values())]
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*tensors)
    if any(node.op == "get_attr" or "lift" in str(node.target) for node in module.graph.nodes):
        return None
    graph = Graph("traced")
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    values = {}
    for placeholder, name, tensor in zip(placeholders, [*program.inputs, *program.parameters], tensors, strict=True):
        type_ = tensor_type(tensor)
        add = graph.input(name, type_) if name in program.inputs else graph.constant(name, type_, tensor.contiguous())
        values[placeholder] = add
    for value in import_calls(graph, module, values):
        graph.output(value)
    return graph


def fresh(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return other numbers of the same kind, in the same strides."""
    if seed == 0 or not tensor.dtype.is_floating_point:
        return tensor
    generator = torch.Generator().manual_seed(seed)
    if seed > 1:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return result.copy_(torch.randn(tensor.shape, generator=generator))


def differ(got: Any, expected: Any, scale: float = 1.0) -> str | None:
    """Return how results differ: structure, type, shape or numbers."""
    ours, spec = torch.utils._pytree.tree_flatten(got)
    theirs, wanted = torch.utils._pytree.tree_flatten(expected)
    if spec != wanted:
        return f"structure {spec} instead of {wanted}"
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"output {index} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if not b.numel():
            continue
        if not b.dtype.is_floating_point:
            if not torch.equal(a, b):
                return f"output {index} ({b.dtype}) differs in {int((a != b).sum())} of {b.numel()} elements"
            continue
        x, y = a.double(), b.double()
        odd = ~torch.isfinite(y)
        if not torch.equal(x[odd].nan_to_num(7.0), y[odd].nan_to_num(7.0)):
            return f"output {index}: {int(odd.sum())} of {b.numel()} elements are not finite in PyTorch, others here"
        if odd.all():
            continue
        error = ((x - y)[~odd].abs().nan_to_num(torch.inf).max() / y[~odd].abs().max().clamp(min=1e-3)).item()
        if error > scale * min(TOLERANCE[b.dtype], TOLERANCE[torch.bfloat16] / max(scale, 1.0)):
            return f"output {index} is off by {error:.1e}"
    return None


def without_ties(program: Program, inputs: Sequence[torch.Tensor], got: Any, expected: Any) -> Any:
    """Return results in which other places of a maximum, or another order, are PyTorch's where the numbers are as good.

    A place is as good as another where both numbers, as PyTorch computes them, are equal within the tolerance.
    """
    ours, form = torch.utils._pytree.tree_flatten(got)
    theirs = torch.utils._pytree.tree_leaves(expected)
    odd = [
        i
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
        if a.dtype == b.dtype == torch.int64 and a.shape == b.shape and not torch.equal(a, b)
    ]
    if not odd or len(ours) != len(program.outputs):
        return got
    values = values_of(replace(program, inputs=dict(zip(program.inputs, inputs, strict=True))))
    values = {**program.parameters, **dict(zip(program.inputs, inputs, strict=True)), **values}
    for i in odd:
        step = next((s for s in program.steps if program.outputs[i] in s.results), None)
        if step is None or not step.text.startswith(PLACES):
            continue
        numbers = values[step.args[0]].flatten(-2) if "pool" in step.text else values[step.args[0]]
        places = [t.flatten(-2) if "pool" in step.text else t for t in (ours[i], theirs[i])]
        if _are_as_good(numbers, *(t[..., None] if t.ndim < numbers.ndim else t for t in places)):
            ours[i] = theirs[i]
    return torch.utils._pytree.tree_unflatten(ours, form)


def _are_as_good(numbers: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if int(ours.min()) < 0 or int(ours.max()) >= numbers.shape[-1]:
        return False
    row = ours.sort(-1).values
    if not (row[..., 1:] > row[..., :-1]).all():
        return False  # one place twice
    numbers = numbers.double()
    error = (numbers.gather(-1, ours) - numbers.gather(-1, theirs)).abs().max()
    return bool(error <= TOLERANCE[torch.float32] * numbers.abs().max().clamp(min=1e-3))


def is_finite(results: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(results)
    return all(bool(torch.isfinite(t).all()) for t in leaves if t.dtype.is_floating_point)


def is_noise(model: Model, inputs: Sequence[torch.Tensor], expected: Any, is_bf16: bool = False) -> bool:
    """Tell whether PyTorch's own answer changes as much when numbers between calls change in their last digits."""
    epsilon, scale = (2e-3, 0.3 * ROUNDER) if is_bf16 else (1e-6, 0.1)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)

        def moved(tensor: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            return tensor * (1 + epsilon * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)

        others = [moved(t) if t.dtype.is_floating_point else t for t in inputs]
        parameters = [(p, p.clone()) for p in model.parameters()]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16 and seed == 0):
            for parameter, _ in parameters:
                parameter.copy_(moved(parameter))
            model.moved = moved if seed else None
            found = torch.utils._pytree.tree_map(lambda a, b: a.to(b.dtype), model(*others), expected)
            for parameter, kept in parameters:
                parameter.copy_(kept)
        model.moved = None
        if differ(found, expected, scale) is not None:
            return True
    return False


def is_wrong(model: Model, inputs: Sequence[torch.Tensor], expected: Any) -> bool:
    """Tell whether PyTorch's answer is not that of f64: its attention reads other memory for windows that overlap."""
    wide = copy.deepcopy(model).double()
    try:
        with torch.no_grad():
            found = wide(*(t.double() if t.dtype.is_floating_point else t for t in inputs))
    except RuntimeError:  # a call with tensors of its own data type
        return False
    leaves = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
    return differ([a.to(b.dtype) for a, b in leaves], torch.utils._pytree.tree_leaves(expected)) is not None


def depends_on_strides(model: Model, inputs: Sequence[torch.Tensor], expected: Any) -> bool:
    """Tell whether PyTorch's own answer is another one for inputs in the strides of the example.

    An in-place call behind ``flatten`` changes the tensor that it flattened, or a copy; a capture knows one of them.
    """
    examples = model.program.inputs.values()
    with torch.no_grad():
        captured = model(*(torch.empty_like(e, dtype=t.dtype).copy_(t) for e, t in zip(examples, inputs, strict=True)))
    return differ(captured, expected) is not None


# ---------------------------------------------------------------- cutting down


def minimise(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a smaller program that still fails: outputs dropped, calls replaced by inputs, forms simplified."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> list[Program]:
    values = values_of(program)
    found = [replace(program, outputs=(name,), form="one") for name in program.outputs if len(program.outputs) > 1]
    if program.form != "one" and len(program.outputs) == 1:
        found.append(replace(program, form="one"))
    for index in range(len(program.steps) - 1, -1, -1):
        # results of the call before become the results of the program
        if len(program.outputs) == 1 and program.outputs[0] in program.steps[index].results:
            found += [replace(program, outputs=(a,)) for a in program.steps[index].args if a not in program.parameters]
    for index in range(len(program.steps)):
        step = program.steps[index]
        inputs = {**program.inputs, **{name: values[name] for name in step.results}}
        found.append(replace(program, inputs=inputs, steps=program.steps[:index] + program.steps[index + 1 :]))
    dead = _without_dead(program)
    found = [_without_dead(p) for p in found]
    size = len(program.steps), len(program.outputs), program.form != "one"
    found = [p for p in found if p.steps and (len(p.steps), len(p.outputs), p.form != "one") < size]
    return [dead, *found] if len(dead.steps) < len(program.steps) else found


def values_of(program: Program) -> dict[str, torch.Tensor]:
    values = {name: t.clone() for name, t in {**program.inputs, **program.parameters}.items()}
    first: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for step in program.steps:
            made = step.function(*(values[name] for name in step.args))
            made = made if isinstance(made, tuple | list) else (made,)
            values |= dict(zip(step.results, made, strict=True))
            first |= {name: values[name].clone() for name in step.results}
    return first


def _without_dead(program: Program) -> Program:
    needed, steps = set(program.outputs), []
    for step in reversed(program.steps):
        if needed & set(step.results) or "_(" in step.text:  # an in-place call
            needed |= set(step.args)
            steps.append(step)
    keep = {n: t for n, t in program.inputs.items() if n in needed}
    parameters = {n: t for n, t in program.parameters.items() if n in needed}
    return replace(program, inputs=keep, parameters=parameters, steps=tuple(reversed(steps)))


def reduced(program: Program, fast: bool = False, policies: Sequence[str] = POLICIES) -> tuple[Program, str] | None:
    """Check a program; return the smallest failing one and what is wrong, None where all is well."""
    if (wrong := check(program, policies, fast=fast)) is None:
        return None
    failing = wrong.partition(":")[0].partition(",")[0]
    policies = [policy for policy in policies if policy == failing] or policies
    kind = wrong.split(":")[1][:12] if ":" in wrong else wrong

    def fails(candidate: Program) -> bool:
        try:
            found = check(candidate, policies, fast=fast)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
            return False  # cutting made it illegal
        return found is not None and (found.split(":")[1][:12] if ":" in found else found) == kind

    small = minimise(program, fails)
    return small, check(small, policies, fast=fast) or wrong


# ---------------------------------------------------------------- by hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--batch", type=int, default=50, help="seeds per child process; 0 for none")
    parser.add_argument("--blocks", action="store_true", help="networks of real sizes instead of calls")
    parser.add_argument("--train", action="store_true", help="steps of training instead of runs")
    parser.add_argument("--fast", action="store_true", help="import without torch.export, what can be")
    parser.add_argument("--policies", default=",".join([*POLICIES, "optimal", "odd-{seed}", "pins-{seed}"]))
    parser.add_argument("--raw", action="store_true", help="do not cut failures down")
    options = parser.parse_args()
    first, end = map(int, options.seeds.split(":"))
    if options.batch == 0:
        _run_here(range(first, end), options)
        return
    while first < end:
        done = _run_child(first, min(first + options.batch, end), options)
        first = done + 1


def _run_here(seeds: Sequence[int], options: argparse.Namespace) -> None:
    faulthandler.enable()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r".*run-time check.*")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    for seed in seeds:
        print(f"@{seed}", flush=True)
        faulthandler.dump_traceback_later(300, exit=True)
        policies = options.policies.format(seed=seed).split(",")
        program = draw(seed, options.calls, options.blocks, options.train)
        if options.raw:
            wrong = check(program, policies, fast=options.fast)
            failed = None if wrong is None else (program, wrong)
        else:
            failed = reduced(program, options.fast, policies)
        faulthandler.cancel_dump_traceback_later()
        if failed is not None:
            print(f"FAILED {seed}\n{failed[0]}\n=> {failed[1]}\n", flush=True)
    print(f"~{json.dumps(CHOSEN)}", flush=True)


def _run_child(first: int, end: int, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "tests.models.fuzz", "--seeds", f"{first}:{end}", "--batch", "0"]
    command += [
        "--calls",
        str(options.calls),
        "--policies",
        options.policies,
        *(["--raw"] if options.raw else []),
        *(["--fast"] if options.fast else []),
        *(["--blocks"] if options.blocks else []),
        *(["--train"] if options.train else []),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last, tail = first, []
    for line in child.stdout or ():
        if line.startswith("@"):
            last, tail = int(line[1:]), []
        elif line.startswith("~"):
            CHOSEN.update(json.loads(line[1:]))
        else:
            tail.append(line)
            print(line, end="", flush=True)
    if child.wait():
        print(f"CRASHED {last}: exit code {child.returncode}", flush=True)
        # after the line above: what crashed may be PyTorch itself
        print(draw(last, options.calls, options.blocks, options.train), flush=True)
        return last
    print(f"done to {end}; models that have {dict(CHOSEN.most_common())}", flush=True)
    return end - 1


if __name__ == "__main__":
    from tests.models import fuzz  # the module that the calls import, not a second one named __main__

    fuzz.main()
