"""Measurement of other ways to run a model: channels-last, mkldnn tensors, Inductor with frozen weights, fmtprop."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import monotonic
from typing import Any

import torch

from fmtprop.api import compile as compile_model
from fmtprop.errors import FmtpropError
from fmtprop.lens.gain import LEAST_TURNS, LONGEST_SECONDS, WAYS, Gain, Measurement, gain_of, mean_of
from fmtprop.lens.tracer import logging, output_of
from fmtprop.ops.pytorch import tree_flatten, tree_map_only
from fmtprop.runtime.agreement import error_of_numbers
from fmtprop.system.printable import first_line
from fmtprop.system.timing import seconds_of
from fmtprop.verbose import Ledger

#: errors of a way to run a model that PyTorch or fmtprop does not support: they are reported, and the others run
FAILURES = (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError, FmtpropError)

#: number of turns before the measured ones
_WARMUP = 2


Run = Callable[[], Any]


def measure(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], names: Sequence[str], repeats: int
) -> tuple[Measurement, ...]:
    """Run a model in several ways, in turns.

    `repeats`: least number of turns. More follow while a gain is uncertain, for some seconds.
    """
    runs: dict[str, Run] = {"eager": lambda: module(*inputs)}
    failed: dict[str, Measurement] = {}
    expected = _flat(runs["eager"]())
    logs: dict[str, tuple[int, float]] = {}
    errors: dict[str, float] = {}
    for name in ("eager", *names):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runs[name] = run = runs.get(name) or VARIANTS[name](module, inputs)
                got = [run() for _ in range(_WARMUP)][-1]
            errors[name] = max(map(error_of_numbers, _flat(got), expected), default=0.0)
            logs[name] = _logged(name, run)
        except FAILURES as error:
            runs.pop(name, None)
            failed[name] = Measurement(name, failure=first_line(error)[:200])
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = monotonic() + LONGEST_SECONDS
    turns = repeats
    while len(times["eager"]) < turns:
        for name, run in runs.items():
            times[name].append(seconds_of(run))
        if len(times["eager"]) == turns and not _is_enough(times) and monotonic() < end:
            turns += LEAST_TURNS
    return tuple(
        failed.get(name) or Measurement(name, mean_of(times[name]), _gain(times, name), *logs[name], errors[name])
        for name in ("eager", *names)
    )


def _gain(times: Mapping[str, Sequence[float]], name: str) -> Gain | None:
    if name == "eager":
        return None
    # turns are sampled whole, and the middle is the difference of the two times that stand beside it
    return gain_of([[eager, -seconds] for eager, seconds in zip(times["eager"], times[name], strict=True)])


def _is_enough(times: Mapping[str, Sequence[float]]) -> bool:
    run_seconds = median(times["eager"])
    gains = [gain for name in times if (gain := _gain(times, name)) is not None]
    return len(times["eager"]) >= LEAST_TURNS and all(gain.is_narrow(run_seconds) for gain in gains)


def _logged(name: str, run: Run) -> tuple[int, float]:
    """Return number and seconds of the reorders of one run."""
    if name == "fmtprop":
        report = run.net.report(repeats=3)  # type: ignore[attr-defined]
        return len(report.reorders), report.reorder_seconds
    with tempfile.TemporaryFile(mode="w+b", buffering=0) as sink, logging():
        with output_of(sink) as read:
            run()
        ledger = Ledger()
        ledger.read(read().splitlines())
    return ledger.reorders.count, ledger.reorders.seconds


def _channels_last(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Run:
    changed = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    given = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
    return lambda: changed(*given)


def _mkldnn(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Run:
    from torch.utils import mkldnn

    changed = mkldnn.to_mkldnn(copy.deepcopy(module))  # type: ignore[no-untyped-call]
    return lambda: _dense(changed(*(x.to_mkldnn() if x.is_floating_point() else x for x in inputs)))


def _inductor(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Run:
    compiled = torch.compile(copy.deepcopy(module), options={"freezing": True})
    compiled(*inputs)
    return lambda: compiled(*inputs)


class _Fmtprop:
    def __init__(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.net, self._inputs = compile_model(module, tuple(inputs)), inputs

    def __call__(self) -> Any:
        return self.net(*self._inputs)


#: ways to run a model, except eager
VARIANTS: dict[str, Callable[[torch.nn.Module, Sequence[torch.Tensor]], Run]] = dict(
    zip(WAYS, (_channels_last, _mkldnn, _inductor, _Fmtprop), strict=True)
)


def _flat(result: Any) -> list[torch.Tensor]:
    leaves, _ = tree_flatten(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _dense(result: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to_dense() if x.is_mkldnn else x, result)
