"""One network of the sweep, in a process of its own: compiled in several ways, compared, timed against PyTorch.

Owns what is asked of one network. Which networks there are is :mod:`benchmarks.sweep_models`' affair; processes, limits
and tables are :mod:`benchmarks.sweep`'s.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import headline
from benchmarks.sweep_models import NETWORKS
from fmtprop import dnnl
from fmtprop.api import CompiledModel, Options, compile_graph
from fmtprop.bench import Environment
from fmtprop.bench.compare import tensors_of
from fmtprop.bench.interleave import time_turn, uncollected
from fmtprop.capture import from_torch
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.ir.structure import flatten_arguments
from fmtprop.passes.target import is_loop
from fmtprop.report import TOLERANCES
from fmtprop.report.model import op_with_tail
from fmtprop.runtime.agreement import error_of_numbers
from fmtprop.runtime.plan import Step
from fmtprop.runtime.process import use_threads

__all__ = ["Record", "Variant", "in_f64", "run", "settle"]

#: how much worse than PyTorch's own error, both against f64, an answer may be before it counts as wrong
_FACTOR = 10.0
#: rounds of the timing: as many as this time allows, within these bounds
_SECONDS, _FEWEST, _MOST = 2.5, 3, 15
#: timed runs in a turn
_REPEATS = 3


@dataclass(frozen=True)
class Variant:
    """A way to compile: data type and policy; the policy ``"again"`` is the default with everything cached."""

    dtype: str
    policy: str

    def __str__(self) -> str:
        return f"{self.dtype}/{self.policy}"


@dataclass
class Record:
    """What came of one network in one variant."""

    name: str
    variant: str
    #: ``right``, ``wrong``, ``unsupported`` or ``crash``; of those that ended it, ``timeout`` or ``memory``
    status: str = "right"
    stage: str = "build"
    #: why it is not right, in a line
    reason: str = ""
    precision: str = ""
    #: `error`, `eager_error`: root of the mean square of the differences from f64, relative to that of the right
    #: values: fmtprop's, PyTorch's in the same data type. The largest of the outputs.
    error: float | None = None
    eager_error: float | None = None
    worst: float | None = None
    #: `compile_seconds`, `eager_seconds`, `seconds`: of the compilation without the export; of PyTorch's faster memory
    #: format and of fmtprop, a run
    compile_seconds: float | None = None
    eager_seconds: float | None = None
    seconds: float | None = None
    #: median over the rounds of fmtprop's time over PyTorch's
    ratio: float | None = None
    reorders: int | None = None
    steps: int | None = None
    #: `host`, `ref`: share of the run that PyTorch's operators, and oneDNN's reference kernels, take
    host: float | None = None
    ref: float | None = None
    export_seconds: float | None = None
    total_seconds: float | None = None
    #: which of these steps take most, grouped by operation and implementation, where they take 2 % or more
    dear: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    where: str = ""


def run(
    name: str, variants: Sequence[Variant], threads: int, timed: bool, say: Callable[[dict[str, Any]], None]
) -> None:
    """Try one network in all variants; say what comes of it, and before each stage what is being done.

    `timed`: whether to time at all. `say`: takes a :class:`Record` as a dictionary; one whose stage is ``"done"`` is
    complete.
    """
    use_threads(threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="sweep-") as cache:
        os.environ["FMTPROP_CACHE_DIR"] = cache  # nothing is cached, whatever ran before
        _Trial(name, threads, say).run(variants, timed)


class _Trial:
    """The network, PyTorch's answers, and the imported graph, which all variants share."""

    def __init__(self, name: str, threads: int, say: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.say = name, say
        self.since = time.perf_counter()
        self.clock = time.perf_counter
        self.threads = threads

    def run(self, variants: Sequence[Variant], timed: bool) -> None:
        record = Record(self.name, str(variants[0]))
        self.enter(record, "build")
        self.module, args, self.kwargs = NETWORKS[self.name]()
        self.args = tuple(args)
        settle(self.module, self.args, self.kwargs)
        self.enter(record, "eager")
        self.right = in_f64(self.module, self.args, self.kwargs)
        with torch.inference_mode():
            self.expected = tensors_of(self.module(*self.args, **self.kwargs))
            start = self.clock()
            self.module(*self.args, **self.kwargs)
            self.eager_seconds = self.clock() - start
        self.enter(record, "export")
        start = self.clock()
        try:
            with torch.no_grad():
                graph = from_torch(self.module, self.args, kwargs=self.kwargs, name=self.name)
        except FmtpropError as error:
            record.status, record.reason = "unsupported", _line(error)
            for variant in variants:
                record.variant = str(variant)
                self.enter(record, "done")
            return
        self.export_seconds = self.clock() - start
        for index, variant in enumerate(variants):
            self.try_variant(graph, variant, timed and index == 0)

    def enter(self, record: Record, stage: str) -> None:
        record.stage = stage
        record.total_seconds = self.clock() - self.since
        self.say(asdict(record))

    def try_variant(self, graph: Graph, variant: Variant, timed: bool) -> None:
        record = Record(self.name, str(variant), export_seconds=self.export_seconds)
        if variant.dtype == "bf16" and not dnnl.supports("bf16"):
            record.status, record.reason = "unsupported", "no bf16 on this CPU"
            self.enter(record, "done")
            return
        try:
            self.enter(record, "compile")
            net = self.compile(graph, variant, record)
            self.enter(record, "run")
            self.compare(net, variant, record)
            self.enter(record, "profile")
            self.profile(net, record)
            if timed and record.status == "right":
                self.enter(record, "time")
                self.time(net, variant, record)
        except Exception as error:
            record.status = "crash"
            record.reason = f"{record.stage}: {type(error).__name__}: {_line(error)}"
        self.enter(record, "done")

    def compile(self, graph: Graph, variant: Variant, record: Record) -> CompiledModel:
        policy = Options.policy if variant.policy == "again" else variant.policy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = self.clock()
            net = compile_graph(graph, Options(dtype=variant.dtype, policy=policy))
            record.compile_seconds = self.clock() - start
        record.warned = tuple(_line(w.message) for w in caught if issubclass(w.category, RuntimeWarning))
        record.precision = net.precision
        return net

    def compare(self, net: CompiledModel, variant: Variant, record: Record) -> None:
        """Compare with f64, or with PyTorch's f32 where there is none; a second run must give the same."""
        got = tensors_of(net(*self.args, **self.kwargs))
        again = tensors_of(net(*self.args, **self.kwargs))
        right = self.expected if self.right is None else self.right
        eager = self.expected if record.precision == "f32" else self.eager_outputs(variant)
        same = len(got) == len(right)
        record.worst = _largest(map(error_of_numbers, got, right)) if same else math.inf
        worst_of_eager = _largest(map(error_of_numbers, eager, right))
        record.error = _largest(map(_spread, got, right))
        record.eager_error = _largest(map(_spread, eager, right))
        bound = max(TOLERANCES[record.precision], _FACTOR * worst_of_eager)
        if record.worst > bound:
            record.status, record.reason = "wrong", f"off by {record.worst:.1e}, eager by {worst_of_eager:.1e}"
        elif any(not torch.equal(a, b) for a, b in zip(got, again, strict=True) if not a.isnan().any()):
            record.status, record.reason = "wrong", "two runs differ"

    def eager_outputs(self, variant: Variant) -> list[torch.Tensor]:
        """Return PyTorch's outputs in the data type of the variant; in f32 where an operator does not have it."""
        try:
            return tensors_of(self.eager(variant)())
        except (NotImplementedError, RuntimeError):
            return self.expected

    def profile(self, net: CompiledModel, record: Record) -> None:
        steps = net.plan.steps
        inputs = flatten_arguments(net.graph.structure, self.args, self.kwargs)
        runs = [net._executor.profile(inputs)[1] for _ in range(3)]
        times = [min(run) for run in zip(*runs, strict=True)]
        total = sum(times) or 1.0
        record.steps = len(steps)
        record.where = _where(self.threads)
        record.reorders = sum(step.node.op == "reorder" for step in steps)
        shares = [t / total for t in times]
        record.host = sum(t for t, step in zip(shares, steps, strict=True) if step.target == "reference")
        record.ref = sum(t for t, step in zip(shares, steps, strict=True) if is_loop(_impl(step)))
        record.dear = _dear(shares, steps)
        record.seconds, record.eager_seconds = total, self.eager_seconds

    def time(self, net: CompiledModel, variant: Variant, record: Record) -> None:
        """Let fmtprop and both of PyTorch's memory formats take turns."""
        runs: dict[str, Callable[[], Any]] = {"fmtprop": lambda: net(*self.args, **self.kwargs)}
        for name, memory_format in (("plain", None), ("channels-last", torch.channels_last)):
            with suppress(RuntimeError):  # not every network has channels, or PyTorch's operators in this data type
                run = self.eager(variant, memory_format)
                run()
                runs[name] = run
        if len(runs) == 1:
            return
        times: dict[str, list[float]] = {name: [] for name in runs}
        start = self.clock()
        with uncollected():
            while len(times["fmtprop"]) < _FEWEST or (
                len(times["fmtprop"]) < _MOST and self.clock() - start < _SECONDS
            ):
                for name, take in runs.items():
                    times[name].append(time_turn(take, (), _REPEATS))
        best = min((name for name in runs if name != "fmtprop"), key=lambda name: median(times[name]))
        record.seconds, record.eager_seconds = median(times["fmtprop"]) / 1e3, median(times[best]) / 1e3
        record.ratio = median(ours / theirs for ours, theirs in zip(times["fmtprop"], times[best], strict=True))

    def eager(self, variant: Variant, memory_format: torch.memory_format | None = None) -> Callable[[], Any]:
        """Return a run of PyTorch's own: in the data type of the variant, in a memory format."""
        module, args, kwargs = self.module, self.args, self.kwargs
        dtype = torch.bfloat16 if variant.dtype == "bf16" else torch.float32
        if dtype != torch.float32:
            module, args, kwargs = _converted(module, args, kwargs, dtype)
        if memory_format is not None:
            module = copy.deepcopy(module).to(memory_format=memory_format)
            args = tuple(a.contiguous(memory_format=memory_format) if a.ndim == 4 else a for a in args)

        def run() -> Any:
            with torch.inference_mode():
                return module(*args, **kwargs)

        return run


def settle(module: nn.Module, args: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Give batch normalizations the statistics of two batches, so that activations keep their size; set to eval."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
        norm.reset_running_stats()
        norm.train()
    if norms:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for _ in range(2):
                more = {key: _another(value, generator) for key, value in kwargs.items()}
                module(*(_another(a, generator) for a in args), **more)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.eval()


def _another(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other numbers, twice as many: of a single one there is no variance."""
    if not tensor.is_floating_point():
        return torch.cat([tensor, tensor])
    return torch.randn(2 * tensor.shape[0], *tensor.shape[1:], generator=generator)


def _converted(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return copy.deepcopy(module).to(dtype), tuple(map(cast, args)), {key: cast(v) for key, v in kwargs.items()}


def in_f64(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Return the outputs in f64, None where the module has numbers of its own that are not."""
    try:
        double, args, kwargs = _converted(module, args, kwargs, torch.float64)
        with torch.inference_mode():
            return tensors_of(double(*args, **kwargs))
    except (RuntimeError, TypeError):
        return None


def _spread(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root of the mean square of the differences, relative to that of the expected values."""
    if not expected.is_floating_point() or got.shape != expected.shape:
        return 0.0
    got, expected = got.double(), expected.double()
    finite = expected.isfinite() & got.isfinite()
    size = float(expected[finite].square().sum().sqrt())
    return float((got - expected)[finite].square().sum().sqrt()) / (size or 1.0)


def _where(threads: int) -> str:
    library = dnnl.lib()
    versions = {"onednn": f"{'.'.join(map(str, library.version))} ({library.isa})"}
    return headline(Environment.capture(threads, versions))


def _dear(shares: Sequence[float], steps: Sequence[Step]) -> tuple[str, ...]:
    """Return which of PyTorch's operators and oneDNN's reference kernels take most, with one example of each."""
    groups: dict[tuple[str, str], list[tuple[float, Step]]] = {}
    for share, step in zip(shares, steps, strict=True):
        if step.target == "reference" or is_loop(_impl(step)):
            name = getattr(step.node.attrs, "target", "") or op_with_tail(step.node)
            groups.setdefault((name, _impl(step)), []).append((share, step))
    found = []
    for (name, impl), members in groups.items():
        share, (_, one) = sum(share for share, _ in members), max(members, key=lambda member: member[0])
        if share >= 0.02:
            formats = " ".join(str(access.desc) for access in (*one.operands.values(), *one.results))
            found.append((share, f"{share:.0%} {len(members)} x {name} {impl}: {formats}"))
    return tuple(text for _, text in sorted(found, reverse=True)[:3])


def _impl(step: Step) -> str:
    return step.node.choice.impl if step.node.choice is not None else ""


def _largest(errors: Any) -> float:
    return max(errors, default=0.0)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
