"""Memory that compiling and running a model adds to a process, for fmtprop and for OpenVINO.

``python -m benchmarks.bench_memory resnet50 vgg16`` gives every model and runtime a fresh process that imports
everything and takes the baseline; then it loads the model from disk in the runtime's own format (a graph file with
safetensors beside it, OpenVINO's IR), compiles it, runs it, and reports how far memory has grown: in the steady state
between runs (RSS, and PSS, which splits shared pages among their users) and at the highest point on the way (the
kernel's own mark, reset at the baseline). Outputs are compared with PyTorch's in another process.

The targets: the highest point at or below OpenVINO's; and in the steady state weights + 1.3 × the peak of live
activations + 100 MB. Weights are counted as the graph has them, once. Live activations are what a plan must hold at
one step whatever its cleverness: the tensors already written and still to be read, without scratchpads, padding of the
arena, or the caller's own input and output. A missed target does not change the exit code, which is 1 where a model
failed or its outputs are wrong. Linux only: it reads ``/proc``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_options, headline, table, tell, write_json
from benchmarks.models import TEN, Model
from fmtprop import dnnl
from fmtprop.api import Options
from fmtprop.api import compile as compile_model
from fmtprop.bench import Agreement, Environment, OpenVINO, compare_outputs, export_onnx
from fmtprop.bench.compare import tensors_of
from fmtprop.bench.contenders import Contender, contender
from fmtprop.bench.peers import require
from fmtprop.bench.processes import call_in_process
from fmtprop.capture import GraphModule, save
from fmtprop.errors import FmtpropError
from fmtprop.ir.tensors import materialise
from fmtprop.report import TOLERANCES
from fmtprop.runtime.plan import Home, Plan

__all__ = ["Footprint", "Usage", "live_activations", "main", "parse_status"]

MB = 1e6
ALLOWANCE = 100 * MB
ACTIVATION_FACTOR = 1.3
PEERS = ("openvino", "openvino-bf16")

_GRAPH, _IR, _ONNX, _TENSORS = "graph.json", "model.xml", "model.onnx", "tensors.pt"


@dataclass(frozen=True)
class Usage:
    """Memory of a process."""

    #: `rss`, `pss`, `peak`: resident, proportional and highest resident bytes
    rss: int
    pss: int
    peak: int

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.rss - other.rss, self.pss - other.pss, self.peak - other.peak)


@dataclass(frozen=True)
class Needs:
    """What a plan holds, and what it would have to."""

    #: `weights`, `activations`: bytes of the graph's constants and of the activations alive at once
    weights: int
    activations: int
    #: `arena`, `constants`: bytes that the plan holds for them
    arena: int
    constants: int

    @property
    def limit(self) -> float:
        """Bytes that the steady state may take over the baseline."""
        return self.weights + ACTIVATION_FACTOR * self.activations + ALLOWANCE


@dataclass(frozen=True)
class Footprint:
    """What one model needs in one runtime."""

    model: str
    contender: str
    baseline: Usage
    #: growth since the baseline, between runs; its peak is that of loading, compiling and running
    grown: Usage
    agreement: Agreement
    #: fmtprop's plan; ``None`` for a peer
    needs: Needs | None

    @property
    def met(self) -> bool | None:
        """Whether the resident growth is within the limit; ``None`` for a peer."""
        return None if self.needs is None else self.grown.rss <= self.needs.limit


def live_activations(plan: Plan) -> int:
    """Return the largest sum of activations that are alive at one step.

    `plan`: the plan; its scratchpads and constants do not count, nor the caller's inputs and outputs.
    """
    scratchpads = {step.scratchpad for step in plan.steps}
    tensors = [
        buffer for index, buffer in enumerate(plan.buffers) if buffer.home is Home.ARENA and index not in scratchpads
    ]
    return max((sum(b.nbytes for b in tensors if b.first <= n <= b.last) for n in range(len(plan.steps))), default=0)


def parse_status(text: str, field: str) -> int:
    r"""Return a field of a ``/proc`` status file in bytes.

    >>> parse_status("VmHWM:\t    200 kB\nVmRSS:\t    100 kB\n", "VmRSS")
    102400
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise FmtpropError(f"/proc has no field {field}; memory is measured on Linux only")


def usage() -> Usage:
    """Read the memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii", errors="replace")
    return Usage(parse_status(status, "VmRSS"), parse_status(rollup, "Pss"), parse_status(status, "VmHWM"))


def write_files(model: Model, folder: Path, ir: bool) -> None:
    """Write the model in every runtime's format, inputs, and PyTorch's outputs; for a process of its own."""
    graph, inputs = model.graph(), model.inputs()
    graph.structure = ""
    for node in graph.nodes():
        if node.op == "constant":  # numbers on disk, as a user's model has them, not a recipe for them
            graph.constants[node.name] = materialise(graph.constants[node.name], node.results[0])
    save(graph, folder / _GRAPH)
    module = GraphModule(graph)
    with torch.inference_mode():
        torch.save({"inputs": inputs, "expected": tensors_of(module(*inputs))}, folder / _TENSORS)
    if ir:
        export_onnx(module, inputs, folder / _ONNX)
        ov = require("openvino", "openvino")
        # f32 in the file too, as in the graph file; the file is mapped, so it must stay until the process ends
        ov.save_model(ov.Core().read_model(folder / _ONNX), folder / _IR, compress_to_fp16=False)


def measure(model: str, entry: Contender, folder: Path, threads: int, runs: int) -> Footprint:
    """Load, compile and run a model in this process, which should be fresh."""
    torch.set_num_threads(threads)
    tensors = torch.load(folder / _TENSORS, weights_only=True)
    dnnl.lib()
    entry.versions()  # imports the peer
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = usage()
    run, plan = _load(entry, folder, tensors["inputs"], threads)
    for _ in range(runs):
        outputs = run(*tensors["inputs"])
    gc.collect()
    grown = usage() - before
    agreement = compare_outputs(outputs, tensors["expected"], TOLERANCES[entry.precision])
    return Footprint(model, entry.name, before, grown, agreement, _needs(folder, plan) if plan else None)


def _load(
    entry: Contender, folder: Path, inputs: Sequence[torch.Tensor], threads: int
) -> tuple[Callable[..., Any], Plan | None]:
    how = entry.how
    if isinstance(how, Options):
        net = compile_model(folder / _GRAPH, dtype=how.dtype, policy=how.policy, tune=how.tune)
        return net, net.plan
    if not isinstance(how, OpenVINO):
        raise FmtpropError(f"{entry.name}: memory is measured for fmtprop and {', '.join(PEERS)}")
    # the file is read in place of an exported module
    return OpenVINO(how.precision, folder / _IR).prepare(torch.nn.Identity(), inputs, threads), None


def _needs(folder: Path, plan: Plan) -> Needs:
    weights = (folder / _GRAPH).with_suffix(".safetensors").stat().st_size
    return Needs(weights, live_activations(plan), plan.arena_nbytes, plan.constant_nbytes)


def ratios(footprints: Sequence[Footprint]) -> Mapping[str, float]:
    """Return the peak of fmtprop over OpenVINO's of the same precision, by model."""
    peaks = {(one.model, one.contender): one.grown.peak for one in footprints if one.agreement.passed}
    found = {}
    for (model, name), peak in peaks.items():
        theirs = peaks.get((model, "openvino-bf16" if name.endswith("bf16") else "openvino"))
        if name.startswith("fmtprop") and theirs:
            found[f"{model}, {name}"] = peak / theirs
    return found


def render(footprints: Sequence[Footprint]) -> str:
    """Return the tables and what is wrong."""
    columns = ["model", "runtime", "RSS", "PSS", "peak", "weights", "live", "arena", "constants", "limit", "target"]
    rows = []
    for one in footprints:
        sizes = [one.grown.rss, one.grown.pss, one.grown.peak]
        verdict = ""
        if one.needs is not None:
            needs = one.needs
            sizes += [needs.weights, needs.activations, needs.arena, needs.constants, round(needs.limit)]
            verdict = "met" if one.met else "MISSED"
        cells = [f"{size / MB:.1f}" for size in sizes]
        rows.append([one.model, one.contender, *cells, *[""] * (8 - len(cells)), verdict])
    lines = [table("MB; RSS, PSS and peak over the baseline", columns, rows)]
    for name, ratio in ratios(footprints).items():
        word = "met" if ratio <= 1 else "MISSED"
        lines.append(f"target {name}: peak at most OpenVINO's: {word}, {ratio:.2f} × its")
    wrong = [one for one in footprints if not one.agreement.passed]
    return "\n".join(
        [*lines, *(f"{one.model}, {one.contender}: WRONG OUTPUTS: {one.agreement.message}" for one in wrong)]
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description=__doc__.splitlines()[0])
    add_options(parser, TEN)
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="batch sizes (default: 1)")
    known = f"fmtprop, fmtprop-VALUE (a policy, tune or dtype), {', '.join(PEERS)}"
    parser.add_argument("--of", nargs="+", default=["fmtprop", "openvino"], metavar="NAME", help=known)
    parser.add_argument("--runs", type=int, default=10, help="runs before the steady state (default: 10)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    footprints: list[Footprint] = []
    failed = False
    try:
        entries = [contender(name) for name in options.of]
        models = [Model(name, batch) for name in options.models for batch in options.batch]
        versions = {key: text for entry in entries for key, text in entry.versions().items()}
    except FmtpropError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    environment = Environment.capture(options.threads, versions)
    print(headline(environment), flush=True)
    for model in models:
        with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as folder:
            tell(f"{model}: writing its files")
            try:
                ir = any(isinstance(entry.how, OpenVINO) for entry in entries)
                call_in_process(str(model), partial(write_files, model, Path(folder), ir))
                for entry in entries:
                    tell(f"{model}: {entry.name}")
                    job = partial(measure, str(model), entry, Path(folder), options.threads, options.runs)
                    footprints.append(call_in_process(f"{model}, {entry.name}", job))
            except FmtpropError as error:
                print(f"\n{error}", file=sys.stderr)
                failed = True
        rows = [{**asdict(one), "met": one.met} for one in footprints]
        write_json(options.json, {"environment": asdict(environment), "footprints": rows, "ratios": ratios(footprints)})
    tell("")
    print("", render(footprints), sep="\n")
    return int(failed or not all(one.agreement.passed for one in footprints))


if __name__ == "__main__":
    sys.exit(main())
