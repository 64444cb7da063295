"""Where a model loses time to other runtimes: fmtprop's steps beside OpenVINO's and ONNX Runtime's layers.

``python -m benchmarks.bench_layers vit_b16`` profiles every runtime in a process of its own, in turns, and puts side by
side what each spends on one kind of work, then on layers of one kind and size (the dimensions of the result), those
where fmtprop loses most to the fastest of the others first. What one runtime fuses into another layer shows as a loss
in one group and a gain in another: read the sums too. Profiling slows every runtime down a little;
``benchmarks.bench_models`` has the times that count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import add_options, headline, table, write_json
from benchmarks.layers import (
    Group,
    Layer,
    compare_layers,
    prepare_fmtprop,
    prepare_onnxruntime,
    prepare_openvino,
)
from benchmarks.models import Model
from fmtprop.api import Options
from fmtprop.bench import Environment, OpenVINO
from fmtprop.bench.contenders import REFERENCE, Contender, contender, export
from fmtprop.bench.processes import call_in_process, converse
from fmtprop.capture import GraphModule, save
from fmtprop.errors import FmtpropError

__all__ = ["main", "middle", "render"]

PEERS = ("openvino", "openvino-bf16", "onnxruntime")


def middle(turns: Sequence[Sequence[Layer]]) -> list[Layer]:
    """Return the layers with the median of their times; every turn has the same ones in the same order."""
    return [
        replace(same[0], milliseconds=median(one.milliseconds for one in same)) for same in zip(*turns, strict=True)
    ]


def profile(model: Model, arguments: argparse.Namespace) -> dict[str, list[Layer]]:
    """Profile a model in every runtime."""
    options = Options(dtype=arguments.dtype, policy=arguments.policy, tune=arguments.tune)
    entries = [contender(name, options) for name in dict.fromkeys([REFERENCE, *arguments.vs])]
    for entry in entries:  # before anything is exported for them
        if not isinstance(entry.how, Options | OpenVINO) and entry.name != "onnxruntime":
            raise FmtpropError(f"{entry.name}: layers are known of {REFERENCE} and {', '.join(PEERS)} only")
    with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as name:
        folder = Path(name)
        graph = model.graph()
        graph.structure = ""
        save(graph, folder / "graph.json")
        inputs = model.inputs()
        torch.save(inputs, folder / "inputs.pt")
        onnx = model.onnx or folder / "onnx" / "model.onnx"
        if not onnx.exists() and not all(isinstance(entry.how, Options) for entry in entries):
            make = model.module() or partial(GraphModule, graph)
            call_in_process("ONNX export", partial(export, make, tuple(inputs), onnx))
        prepares = {entry.name: _preparer(entry, folder, onnx, arguments) for entry in entries}
        answers = converse(prepares, arguments.rounds)
    return {name: middle(turns) for name, turns in answers.items()}


def _preparer(
    entry: Contender, folder: Path, onnx: Path, arguments: argparse.Namespace
) -> Callable[[], Callable[[], list[Layer]]]:
    how, threads, runs = entry.how, arguments.threads, arguments.runs
    if isinstance(how, Options):
        return partial(prepare_fmtprop, folder, how, threads, runs)
    if isinstance(how, OpenVINO):
        return partial(prepare_openvino, folder, onnx, how.precision, threads, runs)
    return partial(prepare_onnxruntime, folder, onnx, threads, runs)


def render(model: str, profiles: Mapping[str, Sequence[Layer]], most: int) -> str:
    """Return the table by kind and the table of the groups with the largest losses."""
    names = list(profiles)
    kinds = compare_layers(profiles, by_size=False)
    sums = {name: sum(layer.milliseconds for layer in layers) for name, layers in profiles.items()}
    total = Group("all", (), sums, {name: len(layers) for name, layers in profiles.items()}, {})
    rows = [[group.kind, *_cells(group, names)] for group in [*kinds, total]]
    columns = [cell for name in names for cell in (f"{name}, ms", "layers")]
    lines = [table(f"{model} by kind", ["kind", *columns], rows), ""]
    rows = [
        [f"{group.kind} {'×'.join(map(str, group.dims))}", *_cells(group, names)]
        for group in compare_layers(profiles)[:most]
    ]
    lines.append(table("largest losses by size", ["layer", *columns], rows))
    for group in compare_layers(profiles)[:most]:
        impls = "; ".join(f"{name}: {group.impls[name] or '–'}" for name in names)
        lines.append(f"{group.kind} {'×'.join(map(str, group.dims))}: {impls}")
    return "\n".join(lines)


def _cells(group: Group, names: Sequence[str]) -> list[str]:
    return [cell for name in names for cell in (f"{group.milliseconds[name]:.3f}", str(group.counts[name]))]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_layers", description=__doc__.splitlines()[0])
    add_options(parser, ["resnet50"])
    known = f"of {REFERENCE}-VALUE (a policy, tune or dtype), {', '.join(PEERS)}"
    parser.add_argument("--vs", nargs="+", default=["openvino", "onnxruntime"], metavar="NAME", help=known)
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--dtype", default=Options.dtype, help="fmtprop's precision (default: %(default)s)")
    parser.add_argument("--policy", default=Options.policy, help="fmtprop's policy (default: %(default)s)")
    parser.add_argument("--tune", default=Options.tune, help="where fmtprop's costs come from (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every runtime (default: 3)")
    parser.add_argument("--runs", type=int, default=10, help="profiled runs in a turn (default: 10)")
    parser.add_argument("--most", type=int, default=12, help="groups to show (default: 12)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile what the command line asks for."""
    parsed = _parse(arguments)
    records: list[dict[str, Any]] = []
    try:
        versions = {key: text for name in [REFERENCE, *parsed.vs] for key, text in contender(name).versions().items()}
        print(headline(Environment.capture(parsed.threads, versions)))
        for name in parsed.models:
            model = Model(name, parsed.batch)
            profiles = profile(model, parsed)
            print("", render(str(model), profiles, parsed.most), sep="\n", flush=True)
            layers = {runtime: [asdict(layer) for layer in found] for runtime, found in profiles.items()}
            records.append({"model": name, "batch": parsed.batch, "layers": layers})
            write_json(parsed.json, records)
    except FmtpropError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
