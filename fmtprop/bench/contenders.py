"""Who can take part in a benchmark by name: fmtprop under each policy and precision, and every peer.

Owns how a graph becomes contenders that live in processes of their own: the graph, the inputs and the right outputs
go to files, from which every process makes the same weights. Timing is :mod:`fmtprop.bench.processes`' affair.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmtprop import __version__, dnnl
from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench.compare import compare_outputs, tensors_of
from fmtprop.bench.interleave import Benchmark
from fmtprop.bench.peers import PEERS, peer
from fmtprop.bench.policies import use_threads
from fmtprop.bench.processes import Prepared, interleave_processes
from fmtprop.errors import FmtpropError
from fmtprop.frontends import as_module, load, save
from fmtprop.ir.graph import Graph
from fmtprop.report import TOLERANCES

__all__ = ["OURS", "REFERENCE", "Contender", "contender", "race_in_processes"]

#: what all ratios are relative to
REFERENCE = "fmtprop"

#: fmtprop's own contenders
OURS: Mapping[str, Options] = {
    REFERENCE: Options(),
    "fmtprop-plain": Options(policy="plain"),
    "fmtprop-naive": Options(policy="naive"),
    "fmtprop-bf16": Options(dtype="bf16"),
}


@dataclass(frozen=True)
class Contender:
    """One way to run a graph.

    Parameters
    ----------
    name : str
        A key of ``OURS`` or of ``fmtprop.bench.PEERS``.
    precision : {"f32", "bf16"}
        What compute-intensive ops run in: decides how large an error may be.
    """

    name: str
    precision: str

    def prepare(self, graph: Graph, inputs: Sequence[torch.Tensor], threads: int) -> Callable[..., Any]:
        """Compile a graph.

        Parameters
        ----------
        graph : Graph
            Imported, with flat inputs and outputs.
        inputs : sequence of torch.Tensor
            Inputs of its shapes.
        threads : int
            Threads, for the whole process.

        Returns
        -------
        callable
            Takes the inputs, returns the outputs.

        Raises
        ------
        FmtpropError
            If a package is missing, or this machine does not have the precision.
        """
        use_threads(threads)
        if self.name not in OURS:
            return peer(self.name).prepare(as_module(graph), inputs, threads)
        if self.precision == "bf16" and not dnnl.supports("bf16"):
            raise FmtpropError(f"{self.name}: oneDNN has no bf16 on this CPU ({dnnl.lib().isa})")
        return compile_graph(graph, OURS[self.name])

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that it uses."""
        if self.name not in OURS:
            return peer(self.name).versions()
        library = dnnl.lib()
        version = ".".join(map(str, library.version))
        return {"fmtprop": __version__, "onednn": f"{version} ({library.isa}, {library.runtime})"}


def contender(name: str) -> Contender:
    """Make the contender of a name.

    Parameters
    ----------
    name : str
        A key of ``OURS`` or of ``fmtprop.bench.PEERS``.

    Returns
    -------
    Contender

    Raises
    ------
    FmtpropError
        If the name is unknown; the message lists those that are known.

    Examples
    --------
    >>> contender("openvino-bf16")
    Contender(name='openvino-bf16', precision='bf16')
    """
    if name in OURS:
        return Contender(name, OURS[name].dtype)
    if name in PEERS:
        return Contender(name, getattr(peer(name), "precision", "f32"))
    raise FmtpropError(f"unknown contender {name!r}; known: {', '.join([*OURS, *PEERS])}")


def race_in_processes(
    graph: Graph,
    names: Sequence[str],
    *,
    threads: int,
    rounds: int = 20,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Race contenders on one graph: same weights, same input, same threads, a process each, answers compared first.

    Parameters
    ----------
    graph : Graph
        Imported.
    names : sequence of str
        Contenders beside ``"fmtprop"``, which always runs and is what ratios are relative to.
    threads : int
        Threads of every contender.
    rounds, repeats, seed : int, optional
        See :func:`fmtprop.bench.processes.interleave_processes`; the seed is also that of the inputs.
    progress : callable, optional
        Called with a description, turns done and turns in all.

    Returns
    -------
    Benchmark
        fmtprop first, then the others in their order. Outputs are compared with PyTorch's f32.

    Raises
    ------
    FmtpropError
        A name is unknown or a process dies.
    """
    chosen = [contender(name) for name in dict.fromkeys([REFERENCE, *names])]
    flat = graph.copy()
    flat.structure = ""  # every runtime takes and gives flat tensors
    inputs = random_inputs(flat, seed)
    with torch.inference_mode():
        expected = tensors_of(as_module(flat)(*inputs))
    with tempfile.TemporaryDirectory(prefix="fmtprop-bench-") as folder:
        save(flat, Path(folder) / "graph.json")
        torch.save({"inputs": inputs, "expected": expected}, Path(folder) / "tensors.pt")
        del expected, flat
        return interleave_processes(
            {entry.name: partial(_prepare, entry, Path(folder), threads) for entry in chosen},
            reference=REFERENCE,
            rounds=rounds,
            repeats=repeats,
            seed=seed,
            threads=threads,
            progress=progress,
        )


def _prepare(entry: Contender, folder: Path, threads: int) -> Prepared:
    """Run in the contender's process: read the files, compile, compare."""
    graph = load(folder / "graph.json")
    tensors = torch.load(folder / "tensors.pt", weights_only=True)
    inputs = tensors["inputs"]
    run = partial(entry.prepare(graph, inputs, threads), *inputs)
    agreement = compare_outputs(run(), tensors["expected"], TOLERANCES[entry.precision])
    return Prepared(run, agreement, entry.versions())
