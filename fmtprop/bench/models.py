"""A graph raced against other runtimes: same weights, same input, same threads, answers compared first.

Owns what ``fmtprop bench`` asks for: peers that are installed, and one of them as the reference. How they race is
:mod:`fmtprop.bench.contenders`' affair, each runtime its peer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fmtprop.api import Options
from fmtprop.bench.contenders import Contender, race_in_processes
from fmtprop.bench.interleave import Benchmark
from fmtprop.bench.peers import Peer, peer
from fmtprop.compiling.stages import check_memory
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph

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
    """Compile a graph and prepare the peers on the same weights, a process each, and time all alternately.

    Parameters
    ----------
    graph : Graph
        Imported.
    peers : sequence of Peer
        Picklable, as :func:`choose_peers` makes them; the first is what speed-ups are relative to.
    options : Options, optional
        How to compile the graph.
    threads : int, optional
        Threads of every runtime; torch's setting if not given.
    rounds, repeats, seed : int, optional
        See :func:`fmtprop.bench.processes.interleave_processes`; the seed is also that of the inputs.
    progress : callable, optional
        Called with a description, turns done and turns in all.

    Returns
    -------
    Benchmark
        fmtprop first, then the peers in their order. Who cannot run the graph on this machine has no figures.

    Raises
    ------
    FmtpropError
        There is no peer, or a process dies.
    """
    if not peers:
        raise FmtpropError("no peer to compare with; give at least one, such as torch")
    check_memory(graph)
    count = threads or torch.get_num_threads()
    contenders = [Contender(OURS, options or Options()), *(Contender(one.name, one) for one in peers)]
    return race_in_processes(
        graph,
        contenders,
        reference=peers[0].name,
        threads=count,
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        progress=progress,
    )
