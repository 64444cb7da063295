"""Memory that a compiled model needs, beside what it has to hold.

``python -m benchmarks.bench_memory resnet50 vgg16`` gives every model a fresh process that imports everything, loads
oneDNN and the graph, and then takes the baseline; compiles, runs, compares the outputs with PyTorch's in another
process, and reports how far memory has grown: in the steady state between runs (RSS, and PSS, which splits shared
pages among their users) and at the highest point on the way (the kernel's own mark, reset at the baseline).

The target is weights + 1.3 × the peak of live activations + 100 MB. Weights are counted as the graph has them, once.
Live activations are what a plan must hold at one step whatever its cleverness: the tensors already written and still
to be read, without scratchpads, padding of the arena, or the caller's own input and output. A missed target does not
change the exit code, which is 1 where a model failed or its outputs are wrong. Linux only: it reads ``/proc``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.common import add_options, batched, headline, table, tell, write_json
from fmtprop import dnnl
from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench import Agreement, Environment, compare_outputs
from fmtprop.bench.compare import tensors_of
from fmtprop.bench.contenders import Contender
from fmtprop.bench.processes import call_in_process
from fmtprop.errors import FmtpropError
from fmtprop.frontends import as_module
from fmtprop.passes.policies import POLICIES
from fmtprop.report import TOLERANCES
from fmtprop.runtime.plan import Home, Plan

__all__ = ["Footprint", "Usage", "live_activations", "main", "parse_status"]

MB = 1e6
ALLOWANCE = 100 * MB
ACTIVATION_FACTOR = 1.3


@dataclass(frozen=True)
class Usage:
    """Memory of a process.

    Parameters
    ----------
    rss, pss, peak : int
        Resident, proportional and highest resident bytes.
    """

    rss: int
    pss: int
    peak: int

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.rss - other.rss, self.pss - other.pss, self.peak - other.peak)


@dataclass(frozen=True)
class Footprint:
    """What one model needs.

    Parameters
    ----------
    model : str
        Its name.
    batch : int
        Images at a time.
    policy : str
        How formats were chosen.
    weights, activations : int
        Bytes of the graph's constants and of the activations alive at once.
    arena, constants : int
        Bytes that the plan holds for them.
    baseline : Usage
        Before compilation.
    steady : Usage
        Growth since the baseline, between runs.
    agreement : Agreement
        Comparison of the outputs with PyTorch's.
    """

    model: str
    batch: int
    policy: str
    weights: int
    activations: int
    arena: int
    constants: int
    baseline: Usage
    steady: Usage
    agreement: Agreement

    @property
    def limit(self) -> float:
        """Bytes that the steady state may take over the baseline."""
        return self.weights + ACTIVATION_FACTOR * self.activations + ALLOWANCE

    @property
    def met(self) -> bool:
        """Whether the resident growth is within the limit."""
        return self.steady.rss <= self.limit


def live_activations(plan: Plan) -> int:
    """Return the largest sum of activations that are alive at one step.

    Parameters
    ----------
    plan : Plan
        The plan; its scratchpads and constants do not count, nor the caller's inputs and outputs.

    Returns
    -------
    int
        Bytes.
    """
    scratchpads = {step.scratchpad for step in plan.steps}
    tensors = [
        buffer for index, buffer in enumerate(plan.buffers) if buffer.home is Home.ARENA and index not in scratchpads
    ]
    return max((sum(b.nbytes for b in tensors if b.first <= n <= b.last) for n in range(len(plan.steps))), default=0)


def parse_status(text: str, field: str) -> int:
    r"""Return a field of a ``/proc`` status file in bytes.

    Examples
    --------
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


def measure(model: str, batch: int, policy: str, threads: int, runs: int, expected: Path) -> Footprint:
    """Compile and run a model in this process, which should be fresh."""
    torch.set_num_threads(threads)
    graph = batched(model, batch)
    dnnl.lib()
    inputs = random_inputs(graph)
    weights = sum(node.results[0].nbytes for node in graph.nodes() if node.op == "constant")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = usage()
    net = compile_graph(graph, Options(policy=policy))
    del graph
    for _ in range(runs):
        outputs = net.run_flat(inputs)
    gc.collect()
    grown = usage() - before
    agreement = compare_outputs(outputs, torch.load(expected, weights_only=True), TOLERANCES[net.precision])
    return Footprint(
        model, batch, policy, weights, live_activations(net.plan), net.plan.arena_nbytes, net.plan.constant_nbytes,
        before, grown, agreement,
    )  # fmt: skip


def expect(model: str, batch: int, path: Path) -> None:
    """Write PyTorch's outputs to a file."""
    graph = batched(model, batch)
    graph.structure = ""
    with torch.inference_mode():
        result = as_module(graph)(*random_inputs(graph))
    torch.save(tensors_of(result), path)


def render(footprints: Sequence[Footprint]) -> str:
    """Return the table and what is wrong."""
    columns = ["model", "policy", "weights", "live", "arena", "constants", "RSS", "PSS", "peak", "limit", "target"]
    rows = []
    for one in footprints:
        sizes = (one.weights, one.activations, one.arena, one.constants, one.steady.rss, one.steady.pss)
        verdict = "met" if one.met else "MISSED"
        cells = [f"{size / MB:.1f}" for size in (*sizes, one.steady.peak, one.limit)]
        rows.append([f"{one.model} × {one.batch}", one.policy, *cells, verdict])
    wrong = [f"{one.model}: WRONG OUTPUTS: {one.agreement.message}" for one in footprints if not one.agreement.passed]
    return "\n".join([table("MB; RSS, PSS and peak over the baseline", columns, rows), *wrong])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_memory", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="batch sizes (default: 1)")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=["propagate"])
    parser.add_argument("--runs", type=int, default=10, help="runs before the steady state (default: 10)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    footprints: list[Footprint] = []
    failed = False
    for model, batch, policy in product(options.models, options.batch, options.policy):
        tell(f"{model}, batch {batch}, {policy}")
        try:
            with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as folder:
                expected = Path(folder) / "expected.pt"
                call_in_process(f"{model} in PyTorch", partial(expect, model, batch, expected))
                job = partial(measure, model, batch, policy, options.threads, options.runs, expected)
                footprints.append(call_in_process(model, job))
        except FmtpropError as error:
            print(f"\n{error}", file=sys.stderr)
            failed = True
    tell("")
    environment = Environment.capture(options.threads, Contender("fmtprop", "f32").versions())
    print(headline(environment), "", render(footprints), sep="\n")
    rows = [{**asdict(one), "limit": one.limit, "met": one.met} for one in footprints]
    write_json(options.json, {"environment": asdict(environment), "footprints": rows})
    return int(failed or not all(one.agreement.passed for one in footprints))


if __name__ == "__main__":
    sys.exit(main())
