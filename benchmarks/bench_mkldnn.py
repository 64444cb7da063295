"""The mkldnn target beside other ways to run a network on PyTorch's own oneDNN, and beside the onednn target.

``python -m benchmarks.bench_mkldnn`` races, on ResNet-50, MobileNetV2 and VGG-16 with the same weights: fmtprop with
``target="mkldnn"``, fmtprop with the library, torch eager, torch eager in channels last, and what PyTorch itself
offers for mkldnn tensors, ``torch.fx.experimental.optimization.optimize_for_inference``. Outputs are compared with
PyTorch's first; each contender has a process of its own, turns are interleaved, ratios are taken within a round.

The target is to be faster than all three of PyTorch's ways; the ratio to the library is stated. A missed target does
not change the exit code, a wrong output does.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.common import add_options, headline, table, tell, warn_if_busy, write_json
from benchmarks.models import Model
from fmtprop.api import Options
from fmtprop.bench import Benchmark, Quartiles
from fmtprop.bench.contenders import Contender, race
from fmtprop.bench.interleave import Entry
from fmtprop.bench.peers import Peer, TorchEager
from fmtprop.errors import FmtpropError

__all__ = ["OptimizeForInference", "main", "render"]

OURS, LIBRARY = "mkldnn target", "onednn target"
PEERS = ("torch", "torch channels_last", "optimize_for_inference")


@dataclass(frozen=True)
class OptimizeForInference(Peer):
    """PyTorch's own conversion of a module to mkldnn tensors, batch normalizations folded."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "optimize_for_inference"

    def prepare(self, module: nn.Module, example_inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
        """See :class:`fmtprop.bench.peers.Peer`."""
        from torch.fx.experimental.optimization import optimize_for_inference
        from torch.fx.proxy import TraceError

        del example_inputs
        torch.set_num_threads(threads)
        try:
            optimized = optimize_for_inference(copy.deepcopy(module).eval())
        except TraceError as error:
            raise FmtpropError(f"peer {self.name}: torch.fx cannot trace this module: {error}") from error

        def run(*inputs: torch.Tensor) -> Any:
            with torch.inference_mode():
                return optimized(*inputs)

        return run


def measure(model: Model, arguments: argparse.Namespace) -> Benchmark:
    """Race all contenders on one model."""
    ours = Options(target="mkldnn", policy=arguments.policy)
    peers = (TorchEager(), TorchEager(channels_last=True), OptimizeForInference())
    return race(
        model.graph(),
        [
            Contender(OURS, ours),
            Contender(LIBRARY, Options(policy=arguments.policy)),
            *(Contender(peer.name, peer) for peer in peers),
        ],
        reference=OURS,
        threads=arguments.threads,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        inputs=model.inputs(),
        module=model.module(),
    )


def render(model: Model, benchmark: Benchmark) -> str:
    """Return a table of one model, what is wrong, and the verdict."""
    rows, verdicts = [], []
    for entry in benchmark.entries:
        latency = entry.latency
        if latency is None:
            rows.append([entry.name, "not timed", "", "", ""])
            continue
        ratio = _times_ours(benchmark, entry)
        spread = f"{latency.low:.2f} – {latency.high:.2f}"
        rows.append([entry.name, f"{latency.median:.2f}", spread, _text(ratio), f"{entry.agreement.error:.0e}"])
        if entry.name in PEERS and ratio is not None:
            verdicts.append(f"{'met' if ratio.median > 1 else 'missed'}: {ratio.median:.2f} × faster than {entry.name}")
    title = f"{model}: {benchmark.rounds} rounds of {benchmark.repeats} runs, {benchmark.environment.threads} threads"
    lines = [table(title, ["contender", "ms (median)", "IQR", f"× {OURS} [quartiles]", "error"], rows)]
    lines += [f"{entry.name}: {entry.agreement.message}" for entry in benchmark.entries if not entry.agreement.passed]
    return "\n".join([*lines, *verdicts])


def _times_ours(benchmark: Benchmark, entry: Entry) -> Quartiles | None:
    """Return a contender's time in multiples of the mkldnn target's, round by round."""
    ours = benchmark[OURS].milliseconds
    if not ours or not entry.milliseconds:
        return None
    return Quartiles.of([theirs / own for theirs, own in zip(entry.milliseconds, ours, strict=True)])


def _text(ratio: Quartiles | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_options(parser, ("resnet50", "mobilenet_v2", "vgg16"))
    parser.add_argument("--rounds", type=int, default=15, help="turns of every contender (default: 15)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs in a turn (default: 3)")
    parser.add_argument("--policy", default="propagate", help="how fmtprop chooses formats (default: propagate)")
    options = parser.parse_args(arguments)
    warn_if_busy(os.getloadavg()[0])
    failed, figures = False, []
    for name in options.models:
        model = Model(name)
        tell(f"{name}: compiling and comparing")
        benchmark = measure(model, options)
        if not figures:
            print(headline(benchmark.environment))
        print(render(model, benchmark), flush=True)
        failed |= any(not e.agreement.passed for e in benchmark.entries if e.name in (OURS, LIBRARY))
        figures.append({"model": name, **benchmark.to_dict()})
    if options.json is not None:
        write_json(options.json, figures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
