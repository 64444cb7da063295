"""Steps of training: policies compared on one module, and fmtprop raced against PyTorch.

A step is one turn of a training loop: gradients to zero, forward, loss, backward, the optimiser. Before anything is
timed, loss, gradients and buffers of one step are compared with those of eager PyTorch in f32. Rounding errors in the
gradients of a deep network's first layers are large, those of its last layers small: so each tensor has a measure of
its own, the error that PyTorch itself makes in another memory format, in bf16 under autocast, and with parameters that
differ by a rounding: a number that a ReLU takes for positive in one of them, and not in the other, changes the
gradients of all layers before by a thousandth or more.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmtprop.api import Options
from fmtprop.bench.compare import Agreement
from fmtprop.bench.contenders import REFERENCE, Contender
from fmtprop.bench.interleave import Benchmark
from fmtprop.bench.peers import Inductor, TorchEager, autocast, in_channels_last, module_in_channels_last
from fmtprop.bench.policies import Progress
from fmtprop.bench.processes import Prepared, call_in_process, interleave_processes
from fmtprop.capture.factories import Made
from fmtprop.errors import FmtpropError
from fmtprop.report import Comparison
from fmtprop.report.comparison import Measure
from fmtprop.runtime.process import use_threads
from fmtprop.training.module import TrainingModule
from fmtprop.training.pytorch import AnyDropout, BackendCompilerFailed
from fmtprop.training.rival import rival_of

#: makes the same module each time; picklable for a race
Make = Callable[[], Made]

#: the error of a step: the distance of a loss, a gradient or a buffer from PyTorch's, in PyTorch's own errors
STEPS = Measure(
    "loss, gradients or buffers are off by",
    "errors that PyTorch itself makes in another memory format or by another rounding",
    {"f32": 3.0, "bf16": 3.0, "f16": 3.0},
    "the unit of errors is the error that PyTorch itself makes in another memory format or by another rounding",
)

#: relative change of parameters, as large as the rounding errors of long sums, and how many draws of it are run
_ROUNDING, _DRAWS = 1e-5, 4

#: PyTorch's own errors count as at least this share of a tensor's norm, by precision, and of the largest norm of all
#: gradients, since some gradients are 0 but for rounding
_LEAST_ERROR, _LEAST_OF_ALL = {"f32": 1e-3, "bf16": 1e-2, "f16": 2e-3}, 1e-5


@dataclass(frozen=True)
class Expected:
    """A step of PyTorch in f32, with the errors of other ways to compute it in PyTorch."""

    #: loss, gradients and buffers by description
    figures: Mapping[str, torch.Tensor]
    errors: Mapping[str, float]
    precision: str

    @classmethod
    def of(cls, make: Make, precision: str) -> Expected:
        """Run PyTorch; without dropout for the errors, since channels-last draws in another order."""
        figures, exact = (figures_of(made, made.module) for made in (make(), without_dropout(make)))
        other = without_dropout(make)
        module, inputs = channels_last(other.module, other.inputs)
        others = figures_of(replace(other, inputs=inputs), module, precision)
        runs = [others]
        for seed in range(_DRAWS):
            near = without_dropout(make)
            _round_otherwise(near.module, seed)
            runs.append(figures_of(near, near.module, precision))
        errors = {name: max(_distance(run[name], tensor) for run in runs) for name, tensor in exact.items()}
        return cls(figures, errors, precision)

    def distance(self, found: Mapping[str, torch.Tensor]) -> tuple[float, str]:
        """Return the largest distance of figures from the expected ones, in PyTorch's own errors, and its place."""
        norms = {name: float(tensor.double().norm()) for name, tensor in self.figures.items()}
        all_gradients = max((norm for name, norm in norms.items() if name.startswith("the gradient")), default=0.0)
        worst, where = 0.0, ""
        for name, tensor in self.figures.items():
            least = max(_LEAST_ERROR[self.precision] * norms[name], _LEAST_OF_ALL * all_gradients)
            own = max(self.errors[name], least, torch.finfo(torch.float32).tiny)
            ratio = _distance(found[name], tensor) / own
            if not ratio <= worst:  # NaN is the worst
                worst, where = ratio, name
        return worst, where

    def agreement(self, found: Mapping[str, torch.Tensor]) -> Agreement:
        """Compare figures with the expected ones."""
        (worst, where), limit = self.distance(found), STEPS.tolerances[self.precision]
        passed = worst <= limit
        return Agreement(passed, worst, limit, "" if passed else f"{where} is off by {worst:.3g} {STEPS.unit}")


def _round_otherwise(module: nn.Module, seed: int) -> None:
    """Change each parameter about as much as a rounding does."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, module.parameters()):
            parameter.mul_(1 + _ROUNDING * torch.randn(parameter.shape, generator=drawn))


def figures_of(step: Made, call: Callable[..., Any], precision: str = "f32") -> dict[str, torch.Tensor]:
    """Return loss, gradients and buffers after one step, by description; the module is as before afterwards."""
    state = copy.deepcopy(step.module.state_dict())
    torch.manual_seed(0)
    with autocast(precision):
        loss = step.loss(call(*step.inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"the loss": loss.detach()}
    for name, parameter in step.module.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad.contiguous()
            parameter.grad = None
    for name, buffer in step.module.named_buffers():
        if buffer.is_floating_point():
            found[f"the buffer {name}"] = buffer.detach().clone()
    step.module.load_state_dict(state)
    return found


def compare_steps(
    make: Make,
    options: Sequence[Options],
    *,
    threads: int | None = None,
    repeats: int = 10,
    progress: Progress | None = None,
) -> Comparison:
    """Plan a step of training in several ways, check each against PyTorch, and measure it.

    `threads`: threads of torch and oneDNN, for the whole process. Default: unchanged. Result: its ``failures`` name the
    policies with other losses, gradients or buffers than PyTorch. Raises FmtpropError if the module cannot be compiled
    or run.
    """
    use_threads(threads)
    say, total = progress or (lambda what, done, total: None), 1 + 2 * len(options)
    say("running in PyTorch", 0, total)
    expected: dict[str, Expected] = {}
    reports, errors = [], []
    for done, option in enumerate(options):
        say(f"compiling under {option.policy}", 1 + 2 * done, total)
        step = make()
        call = TrainingModule(step.module, step.inputs, option)
        net = call.nets[0]
        if net.precision not in expected:
            expected[net.precision] = Expected.of(make, net.precision)
        say(f"measuring {option.policy}", 2 + 2 * done, total)
        errors.append(expected[net.precision].distance(figures_of(step, call))[0])
        reports.append(replace(net.report(repeats=repeats), model=type(step.module).__name__))
        net.close()
    say("done", total, total)
    return Comparison.of(reports, errors, STEPS)


def race_steps(
    make: Make,
    contenders: Sequence[Contender],
    *,
    dtype: str = "f32",
    reference: str = REFERENCE,
    threads: int | None = None,
    rounds: int = 20,
    repeats: int = 1,
    progress: Progress | None = None,
) -> Benchmark:
    """Race contenders on whole steps, the optimiser included; each has a process, and is compared with PyTorch first.

    `threads`: threads of every contender. Default: torch's setting. Raises FmtpropError if a process dies.
    """
    count, make = threads or torch.get_num_threads(), partial(without_dropout, make)
    with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as name:
        file = Path(name) / "expected.pt"
        call_in_process("torch", partial(write_expected, make, dtype, file))
        return interleave_processes(
            {one.name: partial(prepare_step, make, one, file, count) for one in contenders},
            reference=reference,
            rounds=rounds,
            repeats=repeats,
            warmup=1,
            threads=count,
            progress=progress,
        )


def check_contenders(contenders: Sequence[Contender]) -> None:
    """Refuse runtimes that cannot train."""
    for one in contenders:
        if not isinstance(one.how, Options | TorchEager | Inductor):
            raise FmtpropError(
                f"contender {one.name} cannot train; torch, torch-channels-last, inductor and fmtprop can"
            )


def write_expected(make: Make, precision: str, file: Path) -> None:
    """Write the expected figures to a file; for a process of its own."""
    torch.save(asdict(Expected.of(make, precision)), file)


def prepare_step(make: Make, contender: Contender, file: Path, threads: int) -> Prepared:
    """Make a contender's step in this process, and compare it with the expected figures."""
    use_threads(threads)
    expected = Expected(**torch.load(file, weights_only=True))
    step, precision = make(), expected.precision
    call: Callable[..., Any] = step.module
    if isinstance(contender.how, Options):
        how, precision = contender.how, "f32"
        call = TrainingModule(step.module, step.inputs, how, rival_of(how))
    elif isinstance(contender.how, Inductor):
        call = torch.compile(step.module)
    elif isinstance(contender.how, TorchEager) and contender.how.channels_last:
        module, inputs = channels_last(step.module, step.inputs)
        step = replace(step, module=module, inputs=inputs)
    try:
        figures = figures_of(step, call, precision)
    except BackendCompilerFailed as error:
        raise FmtpropError(f"{contender.name} cannot compile this step: {error}") from error
    for reason in [one.reason for one in call.steps if one.net is None] if isinstance(call, TrainingModule) else ():
        warnings.warn(f"contender {contender.name}: PyTorch runs a step: {reason}", RuntimeWarning, stacklevel=2)
    learned = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(learned, 1e-4, momentum=0.9, weight_decay=1e-4)

    def run() -> None:
        optimiser.zero_grad()
        with autocast(precision):
            loss = step.loss(call(*step.inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return Prepared(run, expected.agreement(figures), contender.versions())


def channels_last(module: nn.Module, inputs: Sequence[Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a module and images in channels-last; other tensors as they are."""
    images = (in_channels_last(value) if isinstance(value, torch.Tensor) else value for value in inputs)
    return module_in_channels_last(module), tuple(images)


def without_dropout(make: Make) -> Made:
    """Make a module without dropout, since no two ways to run it draw alike."""
    step = make()
    module = copy.deepcopy(step.module)  # a function may return the same module each time
    for part in module.modules():
        if isinstance(part, AnyDropout):
            part.p = 0.0
    return replace(step, module=module)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm())
