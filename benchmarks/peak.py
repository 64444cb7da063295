"""The fastest arithmetic that oneDNN reaches on this machine, as a contender of a race.

A share of the peak means something only against a peak of the same minutes: so it takes its turns like everyone else.
Owns the kernels that are tried; knows nothing of the models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import nn

from fmtprop import dnnl
from fmtprop.api import Options, compile_graph
from fmtprop.bench.compare import compare_outputs
from fmtprop.bench.processes import Prepared
from fmtprop.capture import from_torch
from fmtprop.errors import FmtpropError
from fmtprop.layout import MemoryDesc
from fmtprop.report import TOLERANCES
from fmtprop.runtime.process import use_threads

__all__ = ["PEAK", "PEAK_FLOPS", "prepare_peak"]

#: name of the contender
PEAK = "peak"

#: layers of one run: enough that what happens at its ends does not count
DEPTH = 4

#: operations of a run of each kernel
PEAK_FLOPS = DEPTH * 2 * 256 * 256 * 9 * 28 * 28

_TRIALS = 5


def kernels() -> list[tuple[nn.Module, torch.Tensor]]:
    """Return a 3x3 convolution, a 1x1 convolution and a product with as many operations each, and their inputs."""
    return [
        (_repeated(lambda: nn.Conv2d(256, 256, 3, padding=1)), torch.randn(1, 256, 28, 28)),
        (_repeated(lambda: nn.Conv2d(512, 512, 1)), torch.randn(1, 512, 42, 42)),
        (_repeated(lambda: nn.Linear(768, 768)), torch.randn(784, 768)),
    ]


def prepare_peak(precision: str, threads: int) -> Prepared:
    """Compile every kernel, check them, and return the one that was fastest in a few runs.

    `precision`: what it computes in.
    """
    if precision == "bf16" and not dnnl.supports("bf16"):
        raise FmtpropError(f"{PEAK}: oneDNN has no bf16 on this CPU ({dnnl.lib().isa})")
    use_threads(threads)
    torch.manual_seed(0)
    return min((_prepared(module, x, precision) for module, x in kernels()), key=lambda one: _best(one.run))


def _repeated(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(make() for _ in range(DEPTH))).eval().requires_grad_(False)


def _prepared(module: nn.Module, x: torch.Tensor, precision: str) -> Prepared:
    graph = from_torch(module, x)
    boundary = {}
    if x.ndim == 4:  # as oneDNN's kernels want it: a conversion at the boundary is no arithmetic
        x = x.contiguous(memory_format=torch.channels_last)
        desc = MemoryDesc(tuple(x.shape), "f32", tag="acdb")
        boundary = {node.name: desc for node in (*graph.input_nodes, *graph.output_nodes)}
    # Winograd's filtering has fewer operations than are counted: it would make a peak that no machine has
    options = Options(dtype=precision, boundary=boundary, winograd=False)
    run = partial(compile_graph(graph, options), x)
    return Prepared(run, compare_outputs(run(), module(x), TOLERANCES[precision]))


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    return min(seconds)
