"""A graph raced against other runtimes: same weights, same input, same threads, answers compared first.

Owns how a graph becomes the callables of a race. Timing is :mod:`fmtprop.bench.interleave`'s affair, each runtime its
peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fmtprop.api import Options, compile_graph, random_inputs
from fmtprop.bench.environment import Environment
from fmtprop.bench.interleave import Benchmark, interleave
from fmtprop.bench.peers import Peer, peer
from fmtprop.bench.policies import use_threads
from fmtprop.errors import FmtpropError
from fmtprop.frontends import as_module
from fmtprop.ir.graph import Graph
from fmtprop.report import TOLERANCES

__all__ = ["choose_peers", "race"]

#: our own name among the callables
OURS = "fmtprop"


def choose_peers(names: Sequence[str]) -> list[Peer]:
    """Make the peers of these names, all of them installed.

    Parameters
    ----------
    names : sequence of str
        Keys of ``fmtprop.bench.PEERS``; the first is what speed-ups are relative to.

    Returns
    -------
    list of Peer

    Raises
    ------
    FmtpropError
        A name is unknown or given twice, there is none, or a peer's package is missing; the message names the extra to
        install.

    Examples
    --------
    >>> [chosen.name for chosen in choose_peers(["torch"])]
    ['torch']
    """
    if not names:
        raise FmtpropError("no peer to compare with; give at least one, such as torch")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise FmtpropError(f"peer {twice[0]!r} is given twice")
    peers = [peer(name) for name in names]
    for chosen in peers:
        chosen.versions()  # imports its packages: a missing one is found before minutes of compilation
    return peers


def race(
    graph: Graph,
    peers: Sequence[Peer],
    options: Options | None = None,
    *,
    threads: int | None = None,
    rounds: int = 20,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Compile a graph, prepare the peers on the same weights, and time all alternately.

    Parameters
    ----------
    graph : Graph
        Imported.
    peers : sequence of Peer
        From :func:`choose_peers`; the first is what speed-ups are relative to.
    options : Options, optional
        How to compile the graph.
    threads : int, optional
        Threads of every runtime; torch's setting if not given.
    rounds, repeats, seed : int, optional
        See :func:`fmtprop.bench.interleave.interleave`; the seed is also that of the inputs.
    progress : callable, optional
        Called with a description, turns done and turns in all.

    Returns
    -------
    Benchmark
        fmtprop first, then the peers in their order.

    Raises
    ------
    FmtpropError
        The graph cannot be compiled, or a peer cannot run it on this machine.
    """
    if not peers:
        raise FmtpropError("no peer to compare with; give at least one, such as torch")
    use_threads(threads)
    count = threads or torch.get_num_threads()
    say = progress or (lambda what, done, total: None)
    turns = rounds * (1 + len(peers))
    flat = graph.copy()
    flat.structure = ""  # every runtime takes and gives flat tensors
    module, inputs = as_module(flat), random_inputs(flat, seed)
    say("compiling", 0, turns)
    net = compile_graph(flat, options or Options())
    callables: dict[str, Callable[..., object]] = {OURS: net}
    for chosen in peers:
        say(f"preparing {chosen.name}", 0, turns)
        callables[chosen.name] = chosen.prepare(module, inputs, count)
    use_threads(count)  # a peer may have set them
    versions = {key: text for chosen in peers for key, text in chosen.versions().items()}
    return interleave(
        callables,
        inputs,
        oracle=_oracle(module),
        reference=peers[0].name,
        tolerance={OURS: TOLERANCES[net.precision], **{chosen.name: _tolerance(chosen) for chosen in peers}},
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        environment=Environment.capture(threads=count, versions=versions),
        progress=lambda done, total: say("timing", done, total),
    )


def _oracle(module: torch.nn.Module) -> Callable[..., object]:
    def run(*inputs: torch.Tensor) -> object:
        with torch.inference_mode():
            return module(*inputs)

    return run


def _tolerance(chosen: Peer) -> float:
    precision: str = getattr(chosen, "precision", "f32")
    return TOLERANCES[precision]
