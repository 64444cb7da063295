"""Time before the first answer: importing the package, loading a graph, compiling it stage by stage.

``python -m benchmarks.bench_compile resnet50`` imports in fresh interpreters (median of several), then gives every
model a fresh process in which nothing has been compiled before. *Cold* is the first time ever: each distinct primitive
is checked against its reference, in an empty cache directory; *warm* has these checks remembered. Stages are those of
``CompiledModel.compile_seconds``; *load* reads the graph file, *first run* builds the context and runs once. Outputs
are compared with PyTorch's; the exit code is 1 where they are wrong or a model could not be compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from unittest import mock

import torch

from benchmarks.common import add_options, headline, table, tell, write_json
from benchmarks.models import Model
from fmtprop import dnnl
from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench import Agreement, Environment, compare_outputs
from fmtprop.bench.contenders import contender
from fmtprop.bench.processes import call_in_process
from fmtprop.builtin import builtin_names
from fmtprop.capture import GraphModule, load
from fmtprop.errors import FmtpropError
from fmtprop.report import TOLERANCES

__all__ = ["Compilation", "import_seconds", "main"]

#: what a program may import, and torch alone for comparison
IMPORTS = ("fmtprop", "fmtprop.layout", "torch", "fmtprop.api")


@dataclass(frozen=True)
class Compilation:
    """What one compilation took."""

    model: str
    #: whether the primitives' checks had to be made or were remembered
    cache: str
    #: by stage: ``load``, those of ``CompiledModel.compile_seconds``, ``first run``
    seconds: Mapping[str, float]
    agreement: Agreement


def import_seconds(module: str, repeats: int = 5) -> float:
    """Return the median time of importing a module in a fresh interpreter, its start-up not counted."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    figures = []
    for _ in range(repeats + 1):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise FmtpropError(f"import {module} failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
        figures.append(float(done.stdout))
    return median(figures[1:])


def compile_twice(model: str, threads: int, folder: str) -> list[Compilation]:
    """Compile a model cold and warm, in a process each that share a cache directory."""
    return [
        call_in_process(f"{model}, {cache}", partial(measure, model, cache, threads, folder))
        for cache in ("cold", "warm")
    ]


def measure(model: str, cache: str, threads: int, folder: str) -> Compilation:
    """Load, compile and run a model in this process, which should be fresh."""
    torch.set_num_threads(threads)
    dnnl.lib()  # found and loaded once per process, whatever is compiled
    with mock.patch.dict(os.environ, FMTPROP_CACHE_DIR=folder):
        start = perf_counter()
        graph = load(model)
        loaded = perf_counter()
        net = compile_graph(graph, Options())
        compiled = perf_counter()
    inputs = random_inputs(graph)
    ready = perf_counter()
    outputs = net.run_flat(inputs)
    ran = perf_counter()
    reference = Model(model).graph()
    reference.structure = ""
    with torch.inference_mode():
        expected = GraphModule(reference)(*inputs)
    stages = dict(net.compile_seconds)
    rest = compiled - loaded - sum(stages.values())
    seconds = {"load": loaded - start, **stages, "rest": rest, "first run": ran - ready}
    return Compilation(model, cache, seconds, compare_outputs(outputs, expected, TOLERANCES[net.precision]))


def render(imports: Mapping[str, float], compilations: Sequence[Compilation]) -> str:
    """Return both tables and what is wrong."""
    lines = [[name, f"{1e3 * value:.0f}"] for name, value in imports.items()]
    parts = [table("import", ["module", "ms"], lines), ""]
    if compilations:
        stages = list(dict.fromkeys(stage for one in compilations for stage in one.seconds))
        rows = [
            [f"{one.model}, {one.cache}", *(_milliseconds(one, stage) for stage in stages), _total(one)]
            for one in compilations
        ]
        parts.append(table("compilation, ms", ["model", *stages, "total"], rows))
    wrong = [one for one in compilations if not one.agreement.passed]
    parts += [f"{one.model}, {one.cache}: WRONG OUTPUTS: {one.agreement.message}" for one in wrong]
    return "\n".join(parts)


def _milliseconds(one: Compilation, stage: str) -> str:
    return f"{1e3 * one.seconds[stage]:.0f}" if stage in one.seconds else ""  # warm, nothing runs in a race


def _total(one: Compilation) -> str:
    return f"{1e3 * sum(one.seconds.values()):.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_compile", description=__doc__.splitlines()[0])
    add_options(parser, builtin_names())
    parser.add_argument("--repeats", type=int, default=5, help="interpreters per import (default: 5)")
    options = parser.parse_args(arguments)
    imports: dict[str, float] = {}
    compilations: list[Compilation] = []
    failed = False
    for module in IMPORTS:
        tell(f"import {module}")
        imports[module] = import_seconds(module, options.repeats)
    for model in options.models:
        tell(model)
        try:
            with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as folder:
                compilations += compile_twice(model, options.threads, folder)
        except FmtpropError as error:
            print(f"\n{error}", file=sys.stderr)
            failed = True
    tell("")
    environment = Environment.capture(options.threads, contender("fmtprop").versions())
    print(headline(environment), "", render(imports, compilations), sep="\n")
    rows = [asdict(one) for one in compilations]
    write_json(options.json, {"environment": asdict(environment), "imports": imports, "compilations": rows})
    return int(failed or not all(one.agreement.passed for one in compilations))


if __name__ == "__main__":
    sys.exit(main())
