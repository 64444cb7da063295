"""Latency of whole models on several oneDNN libraries: what a newer one brings.

``python -m benchmarks.bench_libraries resnet50 --libraries OLD/libdnnl.so.3 NEW/libdnnl.so.3`` compiles the same graph
on each library, with costs measured for each, compares all outputs with PyTorch's f32, and times those that agree,
alternately and each in a process of its own. Ratios are to the first library's time, taken within a round.
``ONEDNN_MAX_CPU_ISA`` in front shows another instruction set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from math import prod

from benchmarks.common import add_options, add_race_options, headline, table, tell, tell_turns, warn_if_busy, write_json
from benchmarks.models import TEN, Model
from fmtprop.api import Options
from fmtprop.bench import Benchmark
from fmtprop.bench.contenders import Contender, race
from fmtprop.errors import FmtpropError

__all__ = ["main", "ratios", "render"]


def measure(model: Model, arguments: argparse.Namespace) -> Benchmark:
    """Race one model on all libraries."""
    options = Options(dtype=arguments.dtype, tune=arguments.tune)
    libraries = [Contender(path, options, library=path) for path in arguments.libraries]
    return race(
        model.graph(),
        libraries,
        reference=libraries[0].name,
        threads=arguments.threads,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        seed=arguments.seed,
        inputs=model.inputs(),
        module=model.module(),
        progress=partial(tell_turns, model),
    )


def ratios(benchmark: Benchmark) -> list[float | None]:
    """Return each library's time over the first's, None where its outputs are wrong."""
    return [entry.speedup and 1 / entry.speedup.median for entry in benchmark.entries]


def render(results: Sequence[tuple[Model, Benchmark]]) -> str:
    """Return a table of all models: milliseconds on the first library, and the others' times over them."""
    rows = []
    for model, benchmark in results:
        first = benchmark.entries[0].latency
        cells = [f"{first.median:.2f}" if first else "wrong"]
        for entry in benchmark.entries[1:]:
            if entry.speedup is None:
                cells.append(f"not timed: {entry.agreement.message}")
            else:
                low, middle, high = (1 / x for x in (entry.speedup.high, entry.speedup.median, entry.speedup.low))
                cells.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        rows.append([str(model), *cells])
    columns = list(zip(*(ratios(benchmark) for _, benchmark in results), strict=True))[1:]
    rows.append(["geometric mean", "", *(_mean(column) for column in columns)])
    others = [entry.name for entry in results[0][1].entries[1:]]
    return table("time over the first library's", ["model", "ms on the first", *others], rows)


def _mean(column: Sequence[float | None]) -> str:
    timed = [ratio for ratio in column if ratio is not None]
    return f"{prod(timed) ** (1 / len(timed)):.2f}" if timed else ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_libraries", description=__doc__.splitlines()[0])
    add_options(parser, TEN)
    add_race_options(parser, "measure")
    parser.add_argument("--libraries", nargs="+", required=True, metavar="FILE", help="files of oneDNN v3.x")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parsed = _parse(arguments)
    warn_if_busy(os.getloadavg()[0])
    results: list[tuple[Model, Benchmark]] = []
    for name in parsed.models:
        model = Model(name)
        try:
            benchmark = measure(model, parsed)
        except FmtpropError as error:
            print(f"error: {model}: {error}", file=sys.stderr)
            return 1
        tell("")
        results.append((model, benchmark))
        write_json(parsed.json, [{"model": m.name, "dtype": parsed.dtype, **b.to_dict()} for m, b in results])
    print(headline(results[0][1].environment), render(results), sep="\n")
    return int(any(benchmark.failures for _, benchmark in results))


if __name__ == "__main__":
    sys.exit(main())
