"""Calls of a model in the background: its streams, opened at the first call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from fmtprop.runtime.streams import StreamPool
from fmtprop.system.locks import ProcessLock


class Serving(ABC):
    """A model that several threads run at the same time."""

    def __init__(self) -> None:
        self._pool: StreamPool | None = None
        self._opening = ProcessLock()

    if not TYPE_CHECKING:  # a type checker tells of a missing attribute itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raise the error of an attribute that is missing, such as a module's."""
            kind = type(self).__name__
            raise AttributeError(
                f"{kind!r} object has no attribute {name!r}: it is a plan for inference with weights of its own, no "
                "nn.Module. Use or change the model that was compiled, and compile it again after a change",
                name=name,
                obj=self,
            )

    @abstractmethod
    def _stream(self) -> tuple[Callable[..., Any], str]:
        """Return the function that a stream runs, in one thread, and the model's name."""

    def throughput(self, streams: int | None = None) -> StreamPool:
        """Return a pool that runs the model several times at once, each run in one thread.

        A call of the model uses all threads to be done soon; a pool gets more done in all.

        Parameters
        ----------
        streams : int, optional
            Runs at once; as many as this process has CPUs if not given.

        Returns
        -------
        StreamPool
            With ``submit`` and ``map``, for use in ``with``.

        Raises
        ------
        InputError
            ``streams`` is not a positive number, or more than any machine serves.
        PlanError
            The model's primitives for one thread fail their check.
        """
        function, name = self._stream()
        return StreamPool(function, streams, name)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the model in the background, one thread a run, on the streams of :meth:`throughput`.

        Parameters
        ----------
        *args, **kwargs
            As the model takes them. A tensor must not change before the result is there.

        Returns
        -------
        concurrent.futures.Future
            ``result()`` gives the model's result or raises its error; ``asyncio.wrap_future`` makes it awaitable.

        Notes
        -----
        There are as many streams as this process has CPUs, each with one running and one waiting call. With more calls
        than that, ``submit`` waits. :meth:`close` waits for all calls.

        Examples
        --------
        >>> import torch, fmtprop as fp
        >>> net = fp.compile(torch.nn.ReLU(), torch.ones(2))
        >>> net.submit(torch.tensor([-1.0, 1.0])).result()
        tensor([0., 1.])
        >>> net.close()
        """
        with self._opening.current:
            if self._pool is None or not self._pool.is_open:
                self._pool = self.throughput()
            pool = self._pool
        return pool.submit(*args, **kwargs)

    def close(self) -> None:
        """Wait for submitted runs and release the native objects of idle contexts; the model can still be run."""
        if self._pool is not None:
            self._pool.close()
