"""Steps of training beside PyTorch's: eager in both memory formats and Inductor, f32 and bf16.

``python -m benchmarks.bench_training resnet50 bert_base --dtype f32 bf16`` gives every network and contender a process.
A step, and its comparison with PyTorch's before anything is timed, are those of ``fmtprop bench --train``
(:mod:`fmtprop.bench.training`). Contenders take turns. Peak memory is that of the whole process, so that it can be
compared.

The targets: at least 1.3 times the steps a second of the best other in geometric mean, no network below 1.0. A missed
target does not change the exit code, which is 1 where gradients are wrong or a contender failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import headline, table, tell, tell_turns, warn_if_busy, write_json
from fmtprop import dnnl
from fmtprop.api import Options
from fmtprop.bench import Benchmark
from fmtprop.bench.contenders import REFERENCE as OURS
from fmtprop.bench.contenders import Contender, contender
from fmtprop.bench.processes import call_in_process
from fmtprop.bench.training import prepare_step, race_steps, write_expected
from fmtprop.capture.factories import Made
from fmtprop.errors import FmtpropError
from graphs.architectures import ARCHITECTURES

__all__ = ["CASES", "Case", "main"]

CONTENDERS = (OURS, "torch", "torch-channels-last", "inductor")
TARGET = 1.3


class Head(nn.Module):
    """A network of tokens with a classifier on the first one."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return two numbers for each sequence."""
        return self.head(self.body(tokens)[:, 0])


class Recurrent(nn.Module):
    """Two layers of LSTM and a classifier on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(512, 512, 2, batch_first=True), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ten numbers for each sequence."""
        return self.head(self.layers(x)[0][:, -1])


@dataclass(frozen=True)
class Case:
    """A network and its batch."""

    #: a built-in graph, or ``"lstm"``
    name: str
    batch: int
    #: precision of products; parameters are f32
    dtype: str = "f32"

    def __str__(self) -> str:
        return f"{self.name} × {self.batch}, {self.dtype}"

    def module(self) -> nn.Module:
        """Return the network with its seeded weights, in training mode; without dropout, which nobody draws alike."""
        torch.manual_seed(0)
        if self.name == "lstm":
            return Recurrent()
        module = ARCHITECTURES[self.name].module()
        if self.name == "bert_base":
            module = Head(module, 768)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return module.train().requires_grad_(True)

    def inputs(self) -> torch.Tensor:
        """Return the batch."""
        if self.name == "lstm":
            return torch.randn(self.batch, 64, 512, generator=torch.Generator().manual_seed(0))
        example = ARCHITECTURES[self.name].example_input
        return torch.cat([example(100 * (1 + place)) for place in range(self.batch)])

    def trainable(self) -> Made:
        """Return the network with its batch and a loss."""
        return Made(self.module(), (self.inputs(),), loss_of)


#: network -> batch
CASES = {"resnet50": 16, "mobilenet_v2": 32, "densenet121": 8, "unet": 4, "bert_base": 8, "lstm": 16}


def loss_of(results: torch.Tensor) -> torch.Tensor:
    """Return a loss: cross entropy of classes, or the squared distance from a random image."""
    generator = torch.Generator().manual_seed(1)
    if results.ndim == 2:
        return F.cross_entropy(results.float(), torch.randint(results.shape[1], results.shape[:1], generator=generator))
    return F.mse_loss(results.float(), torch.rand(results.shape, generator=generator))


def contenders(options: argparse.Namespace, dtype: str) -> list[Contender]:
    """Return the contenders that the command line asks for."""
    how = Options(dtype=dtype, tune=options.tune, memory=options.memory, special_values="kept")
    return [contender(name, how) for name in options.vs]


def peak_megabytes(case: Case, entry: Contender, file: Path, threads: int) -> float:
    """Return the highest resident memory of steps after the first ones, in this process, which should be fresh."""
    run = prepare_step(case.trainable, entry, file, threads).run
    run()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    for _ in range(2):
        run()
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def race(case: Case, options: argparse.Namespace) -> Benchmark:
    """Time the contenders of a case."""
    return race_steps(
        case.trainable,
        contenders(options, case.dtype),
        dtype=case.dtype,
        rounds=options.rounds,
        repeats=options.repeats,
        threads=options.threads,
        progress=partial(tell_turns, case),
    )


def peaks_of(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Return the peak memory of each contender in megabytes."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as folder:
        file = Path(folder) / "expected.pt"
        call_in_process(str(case), partial(write_expected, case.trainable, case.dtype, file))
        for entry in contenders(options, case.dtype):
            tell(f"{case}: memory of {entry.name}")
            job = partial(peak_megabytes, case, entry, file, options.threads)
            found[entry.name] = call_in_process(f"{case}, {entry.name}", job)
    return found


def ratio(result: Benchmark) -> float | None:
    """Return the best other's time over ours; None where one of the two is missing."""
    others = [entry.latency.median for entry in result.entries if entry.name != OURS and entry.latency is not None]
    own = result[OURS].latency
    return min(others) / own.median if others and own is not None else None


def render(results: Sequence[tuple[Case, Benchmark]], peaks: dict[str, dict[str, float]]) -> str:
    """Return the table and the verdicts."""
    rows = []
    for case, result in results:
        for entry in result.entries:
            peak = peaks.get(str(case), {}).get(entry.name)
            time, rate = ("", "")
            if entry.latency is not None:
                time, rate = f"{entry.latency.median:.0f}", f"{1000 * case.batch / entry.latency.median:.1f}"
            speedup = "" if entry.speedup is None else f"{1 / entry.speedup.median:.2f}"
            error = f"{entry.agreement.error:.2f}"
            rows.append([str(case), entry.name, time, rate, speedup, error, "" if peak is None else f"{peak:.0f}"])
    columns = ["network", "contender", "ms a step", "a second", "its time", "error", "peak MB"]
    lines = [table("a step of training; its time is relative to fmtprop's", columns, rows)]
    found = {str(case): value for case, result in results if (value := ratio(result)) is not None}
    if found:
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        word = "met" if mean >= TARGET and min(found.values()) >= 1 else "MISSED"
        slowest = min(found, key=lambda name: found[name])
        least = f"least {found[slowest]:.2f} × ({slowest})"
        lines.append(f"target {TARGET} × the best other, none below 1.0: {word}, {mean:.2f} ×; {least}")
    return "\n".join([*lines, *(f"{case}: {text}" for case, result in results for text in result.failures)])


def _cases(options: argparse.Namespace) -> Iterable[Case]:
    for name in options.networks:
        for dtype in options.dtype:
            yield Case(name, options.batch or CASES[name], dtype)


def _network(name: str) -> str:
    if name not in CASES:
        raise argparse.ArgumentTypeError(f"no network {name!r}; there are {', '.join(CASES)}")
    return name


def _precisions() -> list[str]:
    return ["f32", "bf16"] if dnnl.supports("bf16") else ["f32"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_training", description=__doc__.splitlines()[0])
    # not choices: argparse would look for the whole default among them
    parser.add_argument("networks", nargs="*", type=_network, default=list(CASES), metavar="NETWORK")
    parser.add_argument("--batch", type=int, help="for all networks (default: each has its own)")
    parser.add_argument(
        "--dtype", nargs="+", default=_precisions(), choices=("f32", "bf16"), help="default: those that this CPU has"
    )
    parser.add_argument("--vs", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="CONTENDER")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contender (default: 2)")
    parser.add_argument("--tune", default="auto", help="where fmtprop's costs come from (default: %(default)s)")
    parser.add_argument("--memory", default="save", choices=("save", "recompute"))
    parser.add_argument("--peak", action="store_true", help="also measure each contender's memory")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every contender (default: 3)")
    parser.add_argument("--repeats", type=int, default=1, help="timed steps in a turn (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = parse(arguments)
    warn_if_busy(os.getloadavg()[0])
    results: list[tuple[Case, Benchmark]] = []
    peaks: dict[str, dict[str, float]] = {}
    failed = False
    for case in _cases(options):
        try:
            result = race(case, options)
            if options.peak:
                peaks[str(case)] = peaks_of(case, options)
        except FmtpropError as error:
            print(f"\n{case}: {error}", file=sys.stderr)
            failed = True
            continue
        if not results:
            print(headline(result.environment), flush=True)
        results.append((case, result))
        failed |= bool(result.failures)
        print(render([(case, result)], peaks), flush=True)
        races = [{"case": asdict(one), **figures.to_dict()} for one, figures in results]
        write_json(options.json, {"races": races, "peak_megabytes": peaks})
    if len(results) > 1:
        print("", render(results, peaks), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
