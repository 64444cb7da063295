"""Requests that wait run together: a queue with a bound, and a thread that runs what is in it.

Owns the queue, the deadlines and the end of a service; knows nothing of the protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from fmtprop.serving.protocol import RequestError
from fmtprop.serving.rows import Rows, Shapes


@dataclass(frozen=True)
class Ran:
    """What an observer is told about a run."""

    requests: int
    rows: int
    seconds: float
    #: requests in the queue when it began
    waiting: int


@dataclass(frozen=True)
class _Item:
    tensors: Sequence[torch.Tensor]
    shapes: Shapes
    rows: int
    answer: asyncio.Future[list[torch.Tensor]]


class Batcher:
    """Runs the requests for a model, those that wait at the same time together.

    Parameters
    ----------
    rows : Rows
        The model.
    executor : concurrent.futures.Executor
        Has the one thread that runs it. Models of a process may share it: their runs take turns.
    queue : int
        Requests that may wait.
    observe : callable, optional
        Is called with a :class:`Ran` after each run.

    Notes
    -----
    A batch is what waits when the thread becomes free: equal sizes of rows, in their order, up to the rows of the plan
    that is best for many. No request waits for others to come, so there is no time to tune. If a batch fails, its
    requests run one by one, and each gets its own result or error.
    """

    def __init__(
        self, rows: Rows, executor: Executor, queue: int, observe: Callable[[Ran], None] | None = None
    ) -> None:
        self._rows, self._executor, self._most, self._observe = rows, executor, queue, observe
        self._waiting: deque[_Item] = deque()
        self._work: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, tensors: Sequence[torch.Tensor], seconds: float | None = None) -> list[torch.Tensor]:
        """Return the model's results.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            One for each input.
        seconds : float, optional
            Time to wait for the results.

        Raises
        ------
        InputError
            The tensors do not fit, or the model refuses their values.
        RequestError
            429 if the queue is full, 503 after :meth:`close`, 504 if the time is over.
        """
        shapes, count = self._rows.check(tensors)
        if self._closed:
            raise RequestError(503, f"model {self._rows.name} is shutting down: ask another server")
        if len(self._waiting) >= self._most:
            raise RequestError(429, f"{self._most} requests wait for model {self._rows.name} already: try again later")
        loop = asyncio.get_running_loop()
        item = _Item(tensors, shapes, count, loop.create_future())
        self._waiting.append(item)
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._run_all())
        if seconds is None:
            return await item.answer
        timer = loop.call_later(seconds, self._expire, item, seconds)
        try:
            return await item.answer
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Take no more requests, and wait for the results of those that there are."""
        self._closed = True
        if self._work is not None:
            await self._work

    def _expire(self, item: _Item, seconds: float) -> None:
        if not item.answer.done():
            why = f"no result of model {self._rows.name} within {seconds:g} s: give it more time, or try again later"
            item.answer.set_exception(RequestError(504, why))

    async def _run_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            waiting, batch = len(self._waiting), self._next()
            if not batch:
                continue
            start = time.perf_counter()
            run = loop.run_in_executor(self._executor, self._rows.run_each, [item.tensors for item in batch])
            await asyncio.wait([run])
            error = run.exception()
            answers = [error] * len(batch) if error is not None else run.result()
            for item, answer in zip(batch, answers, strict=True):
                if item.answer.done():  # the time was over, or the client has gone
                    continue
                if isinstance(answer, BaseException):
                    item.answer.set_exception(answer)
                else:
                    item.answer.set_result(answer)
            if self._observe is not None:
                seconds = time.perf_counter() - start
                self._observe(Ran(len(batch), sum(item.rows for item in batch), seconds, waiting))

    def _next(self) -> list[_Item]:
        """Take requests that run together; those of other sizes keep their order."""
        batch: list[_Item] = []
        others: list[_Item] = []
        count = 0
        while self._waiting:
            item = self._waiting.popleft()
            if item.answer.done():
                continue
            if not batch or (
                self._rows.batched
                and item.shapes == batch[0].shapes
                and count + item.rows <= self._rows.most(item.shapes)
            ):
                batch.append(item)
                count += item.rows
            else:
                others.append(item)
        self._waiting.extend(others)
        return batch
