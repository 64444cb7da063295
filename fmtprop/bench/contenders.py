"""Contenders of a benchmark by name: fmtprop with given options, variants of it, and every peer.

Owns the material of contenders in separate processes: graph, inputs and expected outputs go to files, from which every
process makes the same weights. :mod:`fmtprop.bench.processes` does the timing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmtprop import __version__, dnnl
from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench.compare import compare_outputs, tensors_of
from fmtprop.bench.interleave import Benchmark
from fmtprop.bench.peers import PEERS, OnnxRuntime, OpenVINO, Peer, export_onnx, peer
from fmtprop.bench.processes import Prepared, interleave_processes
from fmtprop.capture import GraphModule, load, save
from fmtprop.capture.factories import FlatModule
from fmtprop.compiling.loading import load_one
from fmtprop.compiling.stages import check_memory
from fmtprop.dnnl.locate import NEWER_HINT, candidates
from fmtprop.errors import FmtpropError, UnsupportedOpError
from fmtprop.ir.graph import Graph
from fmtprop.report import outputs_of
from fmtprop.runtime.process import use_threads

#: the reference of all ratios, and the first word of the variants' names
REFERENCE = "fmtprop"


@dataclass(frozen=True)
class Material:
    """The inputs of a contender's compilation; peers take the module."""

    graph: Graph
    #: makes the same model in PyTorch
    module: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    #: ONNX file of the module; the first contender that needs it exports it
    onnx: Path
    threads: int


@dataclass(frozen=True)
class Contender:
    """One way to run a graph."""

    name: str
    #: options of fmtprop, or the other runtime, which must be picklable
    how: Options | Peer
    #: a plan file of fmtprop, which is loaded instead of a compilation
    plan: str = ""
    #: file of the oneDNN that its process loads. Default: the one that fmtprop prefers.
    library: str = ""

    @property
    def precision(self) -> str:
        """Data type of compute-intensive ops, such as ``"bf16"``; it decides the tolerance."""
        return self.how.dtype if isinstance(self.how, Options) else getattr(self.how, "precision", "f32")

    def prepare(self, material: Material) -> Callable[..., Any]:
        """Compile."""
        if self.library:
            dnnl.load(self.library)  # which this process must not have done yet
        use_threads(material.threads)
        if isinstance(self.how, Options):
            if not dnnl.supports(self.precision):
                raise FmtpropError(f"{self.name}: oneDNN has no {self.precision} on this CPU ({dnnl.lib().isa})")
            if self.plan:
                net = load_one(self.plan)
                return lambda *inputs: tuple(net.run_flat(inputs))
            return compile_graph(material.graph, self.how)
        return _with_onnx(self.how, material).prepare(material.module(), material.inputs, material.threads)

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that it uses."""
        if not isinstance(self.how, Options):
            return self.how.versions()
        library = dnnl.lib()
        version = ".".join(map(str, library.version))
        if self.library:
            return {"fmtprop": __version__, self.name: f"({library.isa})"}
        return {"fmtprop": __version__, "onednn": f"{version} ({library.isa}, {library.runtime})"}


def contender(name: str, options: Options | None = None) -> Contender:
    """Make the contender with a name.

    `name`: ``"fmtprop"``, a variant of it such as ``"fmtprop-propagate"`` or ``"fmtprop-plain-bf16"``, or a key of
    ``fmtprop.bench.PEERS``. After the first hyphen of a variant come values of ``dtype``, ``policy`` and ``tune``.
    `options`: options of ``"fmtprop"``; a variant changes them.

    >>> contender("openvino-bf16").precision
    'bf16'
    >>> contender("fmtprop-plain-bf16").how.policy
    'plain'
    """
    own, *parts = name.split("-")
    if own == REFERENCE:
        chosen = options or Options()
        for part in parts:
            chosen = _changed(chosen, part, name)
        return Contender(name, chosen)
    if name in PEERS:
        return Contender(name, peer(name))
    raise FmtpropError(
        f"unknown contender {name!r}; known: {REFERENCE}, {REFERENCE}-VALUE with a value of dtype, policy or tune, "
        f"{', '.join(PEERS)}"
    )


def against(names: Sequence[str], options: Options | None = None) -> list[Contender]:
    """Make the contenders of a race, fmtprop and others; all must be installed.

    >>> [one.name for one in against(["torch"])]
    ['fmtprop', 'torch']
    """
    if not names:
        raise FmtpropError("no peer to compare with; give at least one, such as torch")
    everyone = [REFERENCE, *names]
    twice = sorted({name for name in everyone if everyone.count(name) > 1})
    if twice:
        raise FmtpropError(f"peer {twice[0]!r} is given twice")
    chosen = [contender(name, options) for name in everyone]
    for one in chosen:
        one.versions()  # imports its packages, to find a missing one before minutes of compilation
    return chosen


def libraries(options: Options | None = None) -> list[Contender]:
    """Make a contender of each oneDNN that is installed, the one in use first."""
    own = os.path.realpath(dnnl.lib().path)
    files = [one for one in candidates() if one.usable and one.version]
    files.sort(key=lambda one: os.path.realpath(one.path) != own)
    if len(files) < 2:
        found = ", ".join(f"{one.version} ({one.path})" for one in files) or "none as a file"
        raise FmtpropError(f"there is one oneDNN to time, not two: {found}. {NEWER_HINT}")
    chosen = options or Options()
    names = [f"oneDNN {one.version}, {one.threads}" for one in files]
    return [
        Contender(name if names.count(name) == 1 else f"{name}, {one.path}", chosen, library=one.path)
        for name, one in zip(names, files, strict=True)
    ]


def race(
    graph: Graph,
    contenders: Sequence[Contender],
    *,
    reference: str = REFERENCE,
    threads: int | None = None,
    rounds: int = 20,
    repeats: int = 3,
    seed: int = 0,
    inputs: Sequence[torch.Tensor] | None = None,
    module: Callable[[], nn.Module] | None = None,
    onnx: Path | None = None,
    others: Mapping[str, Callable[[], Prepared]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Race contenders on one graph: same weights, inputs and threads, one process each; outputs are compared first.

    `threads`: threads of every contender. Default: torch's setting. `module`: makes the module that the graph was
    imported from; picklable, called in the peers' processes. Without it, peers run the graph's ops one by one, which
    may be slower than the original if an op was decomposed. `onnx`: ONNX file of the module, written if it does not
    exist. Default: a temporary file. Raises FmtpropError if the graph is too large for this machine, or a process dies.
    """
    check_memory(graph)
    count = threads or torch.get_num_threads()
    flat = graph.copy()
    flat.structure = ""  # every runtime takes and returns flat tensors
    original = module() if module else GraphModule(flat)
    examples = original.examples if inputs is None and isinstance(original, FlatModule) else inputs
    given = tuple(random_inputs(flat, seed) if examples is None else examples)
    with torch.inference_mode():
        expected = tensors_of(original(*(tensor.clone() for tensor in given)))
    del original
    with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as name:
        folder = Path(name)
        save(flat, folder / "graph.json")
        torch.save({"inputs": given, "expected": expected}, folder / "tensors.pt")
        del expected, flat
        where = onnx or folder / "onnx" / "model.onnx"
        prepares = {one.name: partial(_prepare, one, folder, module, where, count) for one in contenders}
        return interleave_processes(
            {**prepares, **(others or {})},
            reference=reference,
            rounds=rounds,
            repeats=repeats,
            seed=seed,
            threads=count,
            progress=progress,
        )


def _prepare(
    entry: Contender, folder: Path, module: Callable[[], nn.Module] | None, onnx: Path, threads: int
) -> Prepared:
    """Run in the contender's process: read the files, compile, compare."""
    graph = load(folder / "graph.json")
    tensors = torch.load(folder / "tensors.pt", weights_only=True)
    inputs = tensors["inputs"]
    material = Material(graph, module or partial(GraphModule, graph), inputs, onnx, threads)
    run = partial(entry.prepare(material), *inputs)
    agreement = compare_outputs(run(), tensors["expected"], outputs_of(graph).tolerances[entry.precision])
    return Prepared(run, agreement, entry.versions())


def _with_onnx(other: Peer, material: Material) -> Peer:
    """Give a peer the path of the ONNX file, if it takes one; peers share it because torch's export takes long."""
    if not isinstance(other, OnnxRuntime | OpenVINO):
        return other
    if not material.onnx.exists():
        export(material.module, material.inputs, material.onnx)
    return replace(other, onnx=material.onnx)


def export(module: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...], onnx: Path) -> None:
    """Write an ONNX file and its weights in one step: if their folder exists, it is complete.

    Raises FmtpropError if a package is missing, or torch cannot export the module.
    """
    final = onnx.parent
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onnx-", dir=final.parent) as name:
        unfinished = Path(name) / "onnx"
        unfinished.mkdir()
        export_onnx(module(), inputs, unfinished / onnx.name)
        unfinished.rename(final)


def _changed(options: Options, value: str, name: str) -> Options:
    """Set the option that has this value."""
    changes: Sequence[dict[str, Any]] = ({"dtype": value}, {"policy": value}, {"tune": value})
    for change in changes:
        try:
            return replace(options, **change)
        except UnsupportedOpError:
            continue
    raise FmtpropError(f"unknown contender {name!r}: {value!r} is not a value of dtype, policy or tune")
