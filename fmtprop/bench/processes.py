"""Interleaved timing of contenders in separate processes, so that no thread pool disturbs another.

Reason for processes: after a run, a runtime's threads do not sleep but spin for a while and wait for the next run.
ONNX Runtime's threads occupy a core for about 50 ms, libgomp's (torch, oneDNN) both cores for a few ms; OpenVINO's
sleep at once. In one process, the next contender would find busy cores, and all contenders that use torch would share
one libgomp pool. Without spinning (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``, ``session.intra_op.allow_spinning``),
runtimes would be slower, since spinning is the fastest way to wait between the many short parallel regions of a run.
So every contender keeps its defaults, its own process and its own pool, and runs alone during its turn. A turn ends
when the contender's process, and the processes that it started, use no more CPU time. Turns are controlled through
pipes, in the order of :func:`fmtprop.bench.interleave.take_turns`.

Must not know the timed programs: a contender is a picklable function that is called in the worker.
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

#: a process is quiet if it used less than this share of one core in each of the last windows
_QUIET_SHARE = 0.1
_WINDOW_SECONDS = 0.01
_WINDOWS = 2
#: longest known wait: 50 ms for ONNX Runtime, several times as long on a busy machine
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """A contender, ready to run."""

    #: runs once; without arguments
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
    """A worker's answer after an error that a user can correct."""

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
    """Time contenders alternately, each in its own process, after a comparison of their outputs.

    A round before the first does not count: the end of the last preparation disturbs it. A turn is one untimed run,
    which warms the caches, then ``repeats`` timed runs, then a wait until the process is quiet. The turn's figure is
    the median of the timed runs.

    `seed`: seed of the order within the rounds. `threads`: recorded with the result (contenders set their own threads).
    Default: torch's setting. Result: entries in the order of ``contenders``. Contenders that disagree, or cannot run
    here (an `FmtpropError` during preparation), have no figures; ``agreement.message`` is the reason. Raises
    FmtpropError if the reference is not a contender, a count is out of range, or a process dies or does not become
    quiet.
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
        for worker in workers.values():
            worker.ask()
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


def converse(prepares: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int) -> dict[str, list[Any]]:
    """Run functions in random turns, each in its own process, and return their results.

    `prepares`: each is pickled, sent to its process, and called there once. It returns the function of a turn: without
    parameters, with picklable results. Raises FmtpropError if a function raises it, or a process dies or does not
    become quiet.
    """
    with ExitStack() as stack:
        workers = {}
        for name, prepare in prepares.items():
            workers[name] = stack.enter_context(_worker(name, partial(_serve, partial(_silently, prepare))))
            workers[name].success()
        return take_turns({name: worker.ask for name, worker in workers.items()}, rounds, seed=0)


def call_in_process(name: str, function: Callable[[], Any]) -> Any:
    """Call a function in a new process and return its result.

    Raises FmtpropError if the function raises it, or the process dies.
    """
    with _worker(name, partial(_answer_once, function)) as worker:
        return worker.success()


def _processor_time() -> float:
    """Return the processor seconds of this process and of the processes that it started (living or waited for).

    The kernel's figures in nanoseconds are used, since those of ``ps`` (and psutil) have steps of 10 ms, a whole
    window of :func:`settle`.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(map(_nanoseconds, _descendants(os.getpid())))
    return time.process_time() + ended.ru_utime + ended.ru_stime + 1e-9 * alive


def _descendants(ancestor: int) -> Iterator[Path]:
    """Yield the folders in ``/proc`` of all descendants of a process."""
    with suppress(OSError):  # a finished process has no descendants
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
    """Wait until this process and the processes that it started use no more CPU time.

    `used`, `sleep`, `clock`: functions of processor seconds, sleep and clock; replaced by tests.
    """
    started, quiet = clock(), 0
    while quiet < _WINDOWS:
        if clock() - started > _PATIENCE_SECONDS:
            raise FmtpropError(
                f"a process that should be idle has kept its cores busy for {_PATIENCE_SECONDS:.0f} s, which would "
                "spoil the figures of others: leave this contender out"
            )
        before, since = used(), clock()
        sleep(_WINDOW_SECONDS)
        # on a busy machine the sleep is too long, so compare the share, not the time
        quiet = quiet + 1 if used() - before < _QUIET_SHARE * (clock() - since) else 0


class _Worker:
    """The parent's end of a process."""

    def __init__(self, name: str, serve: Callable[[Connection], None]) -> None:
        self.name = name
        context = get_context("spawn")  # a fork would inherit this process's thread pools without their threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), name=f"bench {name}")
        self._process.start()
        theirs.close()  # then the worker's death is the end of the pipe

    def answer(self) -> Any:
        """Return the next answer."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise FmtpropError(
                f"the process of {self.name} ended with exit code {self._process.exitcode}; its output has the reason"
            ) from None

    def ask(self) -> Any:
        """Give the worker a turn; return its answer."""
        with suppress(BrokenPipeError):  # the worker is dead: `answer` reports it
            self._connection.send(None)
        return self.success()

    def success(self) -> Any:
        """Return the next answer."""
        answer = self.answer()
        if isinstance(answer, _Failure):
            raise FmtpropError(f"{self.name}: {answer.message}")
        return answer

    def close(self) -> None:
        """Close the pipe, which ends the process."""
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
    """Prepare, send the first answer, then take turns until the parent closes the pipe."""
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
        pass  # the parent is done, or is dead


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
