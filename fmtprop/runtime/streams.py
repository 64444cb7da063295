"""Throughput: several single-thread runs at the same time. One run on all threads has the least latency.

Owns the worker threads, each with its own OpenMP thread, and their queue; must not know the function that they call.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.errors import InputError, PlanError
from fmtprop.system.limits import MAX_THREADS

#: calls that a stream runs or has waiting. Two: one runs, and the next is there when it ends
_CALLS_PER_STREAM = 2


class StreamPool:
    """Runs a model in several threads at once, one OpenMP thread each. Made by ``CompiledModel.throughput``.

    `streams`: number of concurrent runs. Default: the number of CPUs of this process. `name`: name of the model, for
    messages and the names of threads.

    Can be used in ``with``, like an executor of `concurrent.futures`: the end of the block waits for all calls. If an
    exception (such as KeyboardInterrupt) ends the block, calls that have not started are cancelled. Other threads of
    the process, and their numbers of OpenMP threads, are not affected. A tensor must not change between :meth:`submit`
    and the result.

    >>> import torch, fmtprop as fp
    >>> net = fp.compile(torch.nn.ReLU(), torch.ones(2))
    >>> with net.throughput(streams=2) as pool:
    ...     for y in pool.map([torch.tensor([-1.0, 1.0]), torch.tensor([2.0, -2.0])]):
    ...         print(y)
    tensor([0., 1.])
    tensor([2., 0.])
    """

    def __init__(self, function: Callable[..., Any], streams: int | None = None, name: str = "model") -> None:
        count = len(os.sched_getaffinity(0)) if streams is None else streams
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_THREADS:
            raise InputError(
                f"streams must be a positive number of threads or None, got {streams!r}; here at most {MAX_THREADS}"
            )
        self.streams = count
        self._function = function
        self._name = name
        self._process = os.getpid()
        self._depth = _CALLS_PER_STREAM * count
        self._room = threading.Semaphore(self._depth)
        self._here = threading.local()
        self._closed = False
        self._workers = ThreadPoolExecutor(count, f"fmtprop-{name}", self._enter)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the model once, as soon as a stream is free.

        Raises PlanError if the pool is closed, or was made by the parent of this process.

        Waits while each stream has a running and a waiting call, so that inputs do not pile up. A future's callback,
        which runs in a stream, never waits here.
        """
        self._check_open()
        waits = not self._is_stream
        if waits:
            self._room.acquire()
        try:
            future = self._workers.submit(self._function, *args, **kwargs)
        except RuntimeError as error:  # closed, maybe during the wait
            if waits:
                self._room.release()
            raise self._refusal() from error
        if waits:
            future.add_done_callback(lambda _: self._room.release())
        return future

    def map(self, *iterables: Iterable[Any]) -> Iterator[Any]:
        """Run the model on every item and yield the results in order.

        Raises PlanError if the pool is closed, or was made by the parent of this process.

        Items are taken a few ahead of the results, never all at once. Calls are cancelled if the iteration is
        abandoned.
        """
        self._check_open()
        return self._map(zip(*iterables, strict=False))

    def close(self, *, cancel: bool = False) -> None:
        """Accept no more calls and wait for the submitted ones."""
        self._closed = True
        if self._process == os.getpid():
            # a stream cannot wait for itself
            self._workers.shutdown(wait=not self._is_stream, cancel_futures=cancel)

    def __enter__(self) -> StreamPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    def __repr__(self) -> str:
        return f"<StreamPool of {self._name}: {self.streams} streams>"

    @property
    def is_open(self) -> bool:
        """Whether this process can submit calls."""
        return self._process == os.getpid() and not self._closed

    @property
    def _is_stream(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return getattr(self._here, "is_stream", False)

    def _enter(self) -> None:
        """Set up the new worker thread as a stream."""
        self._here.is_stream = True
        torch.get_num_threads()  # the first call in a thread adopts the process's number of threads
        dnnl.lib().set_threads(1)

    def _map(self, items: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
        ahead: deque[Future[Any]] = deque()
        try:
            for arguments in items:
                ahead.append(self.submit(*arguments))
                while ahead and (len(ahead) >= self._depth or ahead[0].done()):
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise PlanError(
                f"model {self._name}: this pool of streams belongs to process {self._process}, and its threads did not "
                "survive the fork; call throughput() in this process"
            )
        if self._closed:
            raise self._refusal()

    def _refusal(self) -> PlanError:
        return PlanError(f"model {self._name}: this pool of streams is closed; call throughput() for a new one")
