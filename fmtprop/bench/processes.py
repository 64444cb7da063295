"""Interleaved timing of contenders that live in a process each, so that no thread pool disturbs another.

Why processes: a runtime's threads do not sleep when a run returns, they spin for a while and wait for the next one.
ONNX Runtime's burn a whole core for about 50 ms, those of libgomp (torch, oneDNN) both for a few; OpenVINO's sleep at
once. In one process, the next contender would find its cores taken, and the threads of one libgomp pool would be
shared by all that use torch. Turning the spinning off (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``,
``session.intra_op.allow_spinning``) would slow down whoever spins for good reason: between the many short parallel
regions of one run, spinning *is* the fast way to wait. So every contender keeps its own defaults, its own process and
its own pool, has its turn as if it were alone, and ends it by waiting until its process, and those that it started,
burn no more time; only then is it the next one's turn. Turns are interleaved over pipes in the order that
:func:`fmtprop.bench.interleave.take_turns` draws.

Knows nothing of what is timed: a contender is a picklable function that is called in the worker.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fmtprop.bench.compare import Agreement
from fmtprop.bench.environment import Environment
from fmtprop.bench.interleave import Benchmark, entry_of, take_turns, time_turn, uncollected
from fmtprop.errors import FmtpropError

__all__ = ["Prepared", "call_in_process", "converse", "interleave_processes", "settle"]

#: a process is quiet when it used less than this share of one core during each of the last windows
_QUIET_SHARE = 0.1
_WINDOW_SECONDS = 0.01
_WINDOWS = 2
#: longest known: ONNX Runtime's 50 ms, several times that on a machine whose cores are taken
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to run.

    Parameters
    ----------
    run : callable
        Runs once; takes nothing.
    agreement : Agreement
        Comparison of its outputs with the right ones.
    versions : mapping of str to str, optional
        Library name to version.
    """

    run: Callable[[], Any]
    agreement: Agreement
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ready:
    """A worker's first answer."""

    agreement: Agreement
    versions: Mapping[str, str]


@dataclass(frozen=True)
class _Failure:
    """A worker's answer where it met an error that a user can do something about."""

    message: str


def interleave_processes(
    contenders: Mapping[str, Callable[[], Prepared]],
    *,
    reference: str,
    rounds: int = 20,
    repeats: int = 3,
    warmup: int = 3,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Benchmark:
    """Time contenders alternately, each in a process of its own, after their outputs have been compared.

    Each turn is one untimed run that warms the caches again, then ``repeats`` timed runs whose median is the turn's
    figure, then a wait until the process is quiet.

    Parameters
    ----------
    contenders : mapping of str to callable
        Each is pickled, sent to its process, and called there once: it compiles and compares.
    reference : str
        Key of the contender that speed-ups are relative to.
    rounds : int, optional
        Turns of every contender.
    repeats : int, optional
        Timed runs in a turn.
    warmup : int, optional
        Untimed runs of every contender before the first round.
    seed : int, optional
        Seed of the order within the rounds.
    threads : int, optional
        Recorded with the result; the contenders set their own. torch's setting if not given.
    progress : callable, optional
        Called with a description, turns done and turns in all.

    Returns
    -------
    Benchmark
        Entries in the order of ``contenders``. Those that disagree, or cannot run here (an `FmtpropError` while they
        were prepared), have no figures; ``agreement.message`` says why.

    Raises
    ------
    FmtpropError
        If the reference is no contender, a count is out of range, a process dies or does not become quiet.
    """
    _check_arguments(contenders, reference, rounds, repeats, warmup)
    say = progress or (lambda what, done, total: None)
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        agreements: dict[str, Agreement] = {}
        versions: dict[str, str] = {}
        for name, prepare in contenders.items():
            say(f"preparing {name}", 0, rounds * len(contenders))
            worker = stack.enter_context(_worker(name, partial(_serve, partial(_ready, prepare, warmup, repeats))))
            ready = worker.answer()
            if isinstance(ready, _Failure):
                agreements[name] = Agreement(False, float("inf"), 0.0, f"cannot run here: {ready.message}", ran=False)
                continue
            agreements[name] = ready.agreement
            versions.update(ready.versions)
            if ready.agreement.passed:
                workers[name] = worker
            else:
                worker.close()
        times = take_turns(
            {name: worker.ask for name, worker in workers.items()},
            rounds,
            seed,
            lambda done, total: say("timing", done, total),
        )
    return Benchmark(
        reference=reference,
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        entries=tuple(entry_of(name, agreements[name], times, reference) for name in contenders),
        environment=Environment.capture(threads=threads, versions=versions),
    )


def converse(
    prepares: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int, seed: int = 0
) -> dict[str, list[Any]]:
    """Let others take turns in a process each, whatever a turn is, and return what they answer.

    Parameters
    ----------
    prepares : mapping of str to callable
        Each is pickled, sent to its process, and called there once; it returns what takes a turn: a callable without
        parameters, whose results can be pickled.
    rounds : int
        Turns of everyone.
    seed : int, optional
        Seed of the order within the rounds.

    Returns
    -------
    dict of str to list
        Answers by name, one for each round.

    Raises
    ------
    FmtpropError
        If one of them raises it, a process dies or does not become quiet.
    """
    with ExitStack() as stack:
        workers = {}
        for name, prepare in prepares.items():
            workers[name] = stack.enter_context(_worker(name, partial(_serve, partial(_silently, prepare))))
            workers[name].success()
        return take_turns({name: worker.ask for name, worker in workers.items()}, rounds, seed)


def call_in_process(name: str, function: Callable[[], Any]) -> Any:
    """Call a function in a fresh process and return what it returns.

    Parameters
    ----------
    name : str
        For messages.
    function : callable
        Picklable, as is its result; torch tensors go through files, since their memory ends with the process.

    Returns
    -------
    object

    Raises
    ------
    FmtpropError
        If the function raises one, or the process dies.
    """
    with _worker(name, partial(_answer_once, function)) as worker:
        return worker.success()


def _processor_time() -> float:
    """Return the processor seconds of this process and of all that it started and that live, or that it waited for.

    Returns
    -------
    float
        Of this process alone where there is no ``/proc``.

    Notes
    -----
    The kernel's figures in nanoseconds: those of ``ps`` (and psutil) come in steps of 10 ms, a whole window of
    :func:`settle`.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(map(_nanoseconds, _descendants(os.getpid())))
    return time.process_time() + ended.ru_utime + ended.ru_stime + 1e-9 * alive


def _descendants(ancestor: int) -> Iterator[Path]:
    """Yield the folders in ``/proc`` of the processes that another one started, and that these started."""
    with suppress(OSError):  # an ancestor that is gone has none
        for thread in Path(f"/proc/{ancestor}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                yield Path("/proc") / child
                yield from _descendants(int(child))


def _nanoseconds(process: Path) -> int:
    with suppress(OSError):
        return sum(int((thread / "schedstat").read_bytes().split()[0]) for thread in (process / "task").iterdir())
    return 0


def settle(
    used: Callable[[], float] = _processor_time,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Wait until this process burns no more time: until its thread pools, and processes it started, have stopped.

    Parameters
    ----------
    used, sleep, clock : callable, optional
        Processor seconds, the sleep, and the clock; replaced by tests.

    Raises
    ------
    FmtpropError
        If the process is not quiet within 10 s.
    """
    started, quiet = clock(), 0
    while quiet < _WINDOWS:
        if clock() - started > _PATIENCE_SECONDS:
            raise FmtpropError(
                f"a process that should be idle keeps its cores busy for {_PATIENCE_SECONDS:.0f} s; the figures of "
                "others would be worthless: leave this contender out"
            )
        before, since = used(), clock()
        sleep(_WINDOW_SECONDS)
        # a busy machine oversleeps: the share counts, not the time
        quiet = quiet + 1 if used() - before < _QUIET_SHARE * (clock() - since) else 0


class _Worker:
    """The parent's end of a process."""

    def __init__(self, name: str, serve: Callable[[Connection], None]) -> None:
        self.name = name
        context = get_context("spawn")  # a fork would inherit the thread pools of this process, dead
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), name=f"bench {name}")
        self._process.start()
        theirs.close()  # so that the worker's death is seen as the end of the pipe

    def answer(self) -> Any:
        """Return the next answer."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise FmtpropError(
                f"the process of {self.name} ended with exit code {self._process.exitcode}; what it printed says why"
            ) from None

    def ask(self) -> Any:
        """Give it a turn; return its answer."""
        with suppress(BrokenPipeError):  # it is dead: the answer will say so
            self._connection.send(None)
        return self.success()

    def success(self) -> Any:
        """Return the next answer.

        Raises
        ------
        FmtpropError
            It is an error.
        """
        answer = self.answer()
        if isinstance(answer, _Failure):
            raise FmtpropError(f"{self.name}: {answer.message}")
        return answer

    def close(self) -> None:
        """Let the process end; it does when its pipe is closed."""
        self._connection.close()
        self._process.join()


@contextmanager
def _worker(name: str, serve: Callable[[Connection], None]) -> Iterator[_Worker]:
    worker = _Worker(name, serve)
    try:
        yield worker
    finally:
        worker.close()


def _serve(prepare: Callable[[], tuple[Any, Callable[[], Any]]], connection: Connection) -> None:
    """Prepare, answer with what there is to say first, then take turns until the parent closes the pipe."""
    try:
        first, turn = prepare()
        settle()
        connection.send(first)
        with uncollected():
            while True:
                connection.recv()
                answer = turn()
                settle()
                connection.send(answer)
    except FmtpropError as error:
        connection.send(_Failure(str(error)))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass  # the parent has what it wanted, or is gone


def _ready(prepare: Callable[[], Prepared], warmup: int, repeats: int) -> tuple[_Ready, Callable[[], float]]:
    prepared = prepare()
    for _ in range(warmup):
        prepared.run()
    return _Ready(prepared.agreement, dict(prepared.versions)), partial(time_turn, prepared.run, (), repeats)


def _silently(prepare: Callable[[], Callable[[], Any]]) -> tuple[None, Callable[[], Any]]:
    return None, prepare()


def _answer_once(function: Callable[[], Any], connection: Connection) -> None:
    try:
        connection.send(function())
    except FmtpropError as error:
        connection.send(_Failure(str(error)))


def _check_arguments(
    contenders: Mapping[str, Callable[[], Prepared]], reference: str, rounds: int, repeats: int, warmup: int
) -> None:
    if reference not in contenders:
        raise FmtpropError(f"reference {reference!r} is not one of the contenders: {', '.join(contenders)}")
    for name, value, least in (("rounds", rounds, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise FmtpropError(f"interleave_processes: {name} is {value}, must be at least {least}")
