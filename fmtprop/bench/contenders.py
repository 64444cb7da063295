"""Who can take part in a benchmark by name: fmtprop as it is asked for, its variants, and every peer.

Owns how a graph becomes contenders that live in processes of their own: the graph, the inputs and the right outputs
go to files, from which every process makes the same weights. Timing is :mod:`fmtprop.bench.processes`' affair.
"""

from __future__ import annotations

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
from fmtprop.compiling.stages import check_memory
from fmtprop.errors import FmtpropError, UnsupportedOpError
from fmtprop.frontends import as_module, load, save
from fmtprop.ir.graph import Graph
from fmtprop.report import TOLERANCES
from fmtprop.runtime.process import use_threads

__all__ = ["REFERENCE", "Contender", "Material", "against", "contender", "export", "race"]

#: what all ratios are relative to, and the first word of our variants' names
REFERENCE = "fmtprop"


@dataclass(frozen=True)
class Material:
    """What a contender may start from; peers take the module.

    Parameters
    ----------
    graph : Graph
        Imported, with flat inputs and outputs.
    module : callable
        Makes the same in PyTorch.
    inputs : tuple of torch.Tensor
        Inputs of its shapes.
    onnx : pathlib.Path
        Where the module is as ONNX, or will be when the first who needs it has exported it.
    threads : int
        Threads, for the whole process.
    """

    graph: Graph
    module: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    onnx: Path
    threads: int


@dataclass(frozen=True)
class Contender:
    """One way to run a graph.

    Parameters
    ----------
    name : str
        For tables.
    how : Options or Peer
        How fmtprop compiles it, or the other runtime, which must be picklable.
    """

    name: str
    how: Options | Peer

    @property
    def precision(self) -> str:
        """What compute-intensive ops run in, ``"f32"`` or ``"bf16"``: decides how large an error may be."""
        return self.how.dtype if isinstance(self.how, Options) else getattr(self.how, "precision", "f32")

    def prepare(self, material: Material) -> Callable[..., Any]:
        """Compile.

        Returns
        -------
        callable
            Takes the inputs, returns the outputs.

        Raises
        ------
        FmtpropError
            If a package is missing, or this machine does not have the precision.
        """
        use_threads(material.threads)
        if isinstance(self.how, Options):
            if self.precision == "bf16" and not dnnl.supports("bf16"):
                raise FmtpropError(f"{self.name}: oneDNN has no bf16 on this CPU ({dnnl.lib().isa})")
            return compile_graph(material.graph, self.how)
        return _with_onnx(self.how, material).prepare(material.module(), material.inputs, material.threads)

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that it uses."""
        if not isinstance(self.how, Options):
            return self.how.versions()
        library = dnnl.lib()
        version = ".".join(map(str, library.version))
        return {"fmtprop": __version__, "onednn": f"{version} ({library.isa}, {library.runtime})"}


def contender(name: str, options: Options | None = None) -> Contender:
    """Make the contender of a name.

    Parameters
    ----------
    name : str
        ``"fmtprop"``, a variant of it such as ``"fmtprop-propagate"`` or ``"fmtprop-plain-bf16"``, or a key of
        ``fmtprop.bench.PEERS``. What follows the first hyphen of a variant are values of ``dtype``, ``policy`` and
        ``tune``.
    options : Options, optional
        How ``"fmtprop"`` compiles; what a variant changes.

    Returns
    -------
    Contender

    Raises
    ------
    FmtpropError
        If the name is unknown; the message lists those that are known.

    Examples
    --------
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
    """Make fmtprop and those that it is raced against, all of them installed.

    Parameters
    ----------
    names : sequence of str
        See :func:`contender`.
    options : Options, optional
        How fmtprop compiles.

    Returns
    -------
    list of Contender
        fmtprop first, then the others in their order.

    Raises
    ------
    FmtpropError
        There is no name, one is unknown or given twice, or a package is missing; the message names the extra.

    Examples
    --------
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
        one.versions()  # imports its packages: a missing one is found before minutes of compilation
    return chosen


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
    """Race contenders on one graph: same weights, same input, same threads, a process each, answers compared first.

    Parameters
    ----------
    graph : Graph
        Imported.
    contenders : sequence of Contender
        Names differ.
    reference : str, optional
        Name of the one that speed-ups are relative to.
    threads : int, optional
        Threads of every contender; torch's setting if not given.
    rounds, repeats, seed : int, optional
        See :func:`fmtprop.bench.processes.interleave_processes`; the seed is also that of the inputs.
    inputs : sequence of torch.Tensor, optional
        Random ones if not given.
    module : callable, optional
        Makes the module that the graph was imported from; picklable, called in the processes of the peers. Without it
        they get the graph's own ops one by one, which is less than the original where an op was decomposed.
    onnx : pathlib.Path, optional
        An ONNX file of the module, written if there is none yet; a temporary one if not given.
    others : mapping of str to callable, optional
        Who else takes part, whatever they run: see :func:`fmtprop.bench.processes.interleave_processes`.
    progress : callable, optional
        Called with a description, turns done and turns in all.

    Returns
    -------
    Benchmark
        In the order of the contenders. Outputs are compared with PyTorch's f32.

    Raises
    ------
    FmtpropError
        The graph is too large for this machine, or a process dies.
    """
    check_memory(graph)
    count = threads or torch.get_num_threads()
    flat = graph.copy()
    flat.structure = ""  # every runtime takes and gives flat tensors
    given = tuple(random_inputs(flat, seed) if inputs is None else inputs)
    with torch.inference_mode():
        expected = tensors_of((module() if module else as_module(flat))(*given))
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
    material = Material(graph, module or partial(as_module, graph), inputs, onnx, threads)
    run = partial(entry.prepare(material), *inputs)
    agreement = compare_outputs(run(), tensors["expected"], TOLERANCES[entry.precision])
    return Prepared(run, agreement, entry.versions())


def _with_onnx(other: Peer, material: Material) -> Peer:
    """Tell a peer where the ONNX file is, if it takes one; torch's export takes long, so they share it."""
    if not isinstance(other, OnnxRuntime | OpenVINO):
        return other
    if not material.onnx.exists():
        export(material.module, material.inputs, material.onnx)
    return replace(other, onnx=material.onnx)


def export(module: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...], onnx: Path) -> None:
    """Write an ONNX file and its weights in one step: the folder that holds them, if it is there, is complete.

    Parameters
    ----------
    module : callable
        Makes the module.
    inputs : tuple of torch.Tensor
        Inputs of its shapes.
    onnx : pathlib.Path
        The file; nothing else may be in its folder.

    Raises
    ------
    FmtpropError
        A package is missing, or torch cannot export the module.
    """
    final = onnx.parent
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onnx-", dir=final.parent) as name:
        unfinished = Path(name) / "onnx"
        unfinished.mkdir()
        export_onnx(module(), inputs, unfinished / onnx.name)
        unfinished.rename(final)


def _changed(options: Options, value: str, name: str) -> Options:
    """Set the one option that has this value."""
    changes: Sequence[dict[str, Any]] = ({"dtype": value}, {"policy": value}, {"tune": value})
    for change in changes:
        try:
            return replace(options, **change)
        except UnsupportedOpError:
            continue
    raise FmtpropError(f"unknown contender {name!r}: {value!r} is no value of dtype, policy or tune")
