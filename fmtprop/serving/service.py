"""Models behind the Open Inference Protocol v2, for any web framework: a request's parts in, an answer's parts out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fmtprop
from fmtprop.errors import FmtpropError, InputError
from fmtprop.serving.batching import Batcher, Ran
from fmtprop.serving.engine import Source
from fmtprop.serving.protocol import (
    LENGTH_HEADER,
    RequestError,
    decode,
    encode,
    model_metadata,
    route,
    server_metadata,
)
from fmtprop.serving.rows import Rows

#: largest body of a request, in bytes: 100 images of 3x224x224 in f32
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    """An HTTP response.

    Parameters
    ----------
    status : int
        Its status.
    body : bytes
        Its body.
    headers : mapping of str to str
        Its headers.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, data: Any, status: int = 200) -> Answer:
        """Return an answer in JSON."""
        return cls(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    @classmethod
    def error(cls, status: int, message: str) -> Answer:
        """Return an error, as the protocol has it; a client may try 429 and 503 again in a second."""
        made = cls.of({"error": message}, status)
        return cls(status, made.body, {**made.headers, "Retry-After": "1"}) if status in (429, 503) else made


class Service:
    """Models that answer the requests of the Open Inference Protocol v2.

    Parameters
    ----------
    models : mapping of str to Source
        For each name a plan file, a folder of plans for several sizes, models, or a :class:`Rows`.
    queue : int
        Requests that may wait for each model; more get 429.
    seconds : float, optional
        Time for a request, which may set less (parameter ``timeout``, in microseconds); later ones get 504.
    most_bytes : int
        Largest body; larger ones get 413.
    observe : callable, optional
        Is called with a model's name and a :class:`~fmtprop.serving.batching.Ran` after each run.

    Raises
    ------
    InputError, PlanError
        A model cannot be loaded.

    Notes
    -----
    One thread runs all models, with PyTorch's number of threads (``torch.set_num_threads``, before). Requests that wait
    for the same model run together (:class:`Batcher`). The methods are for one event loop.

    Examples
    --------
    >>> import asyncio, torch, fmtprop as fp
    >>> from fmtprop.serving import Service
    >>> service = Service({"double": fp.compile(torch.nn.ReLU(), torch.ones(2, 3))})
    >>> body = b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3], "data": [-1, 2, 3]}]}'
    >>> asyncio.run(service.handle("POST", "/v2/models/double/infer", {}, body)).body[-43:]
    b'"shape": [1, 3], "data": [0.0, 2.0, 3.0]}]}'
    """

    def __init__(
        self,
        models: Mapping[str, Source | Rows],
        *,
        queue: int = 64,
        seconds: float | None = None,
        most_bytes: int = MOST_BYTES,
        observe: Callable[[str, Ran], None] | None = None,
    ) -> None:
        if not models:
            raise InputError("a service needs a model")
        self._executor = ThreadPoolExecutor(1, "fmtprop-service")
        self._seconds, self._most_bytes, self._closed = seconds, most_bytes, False
        self._rows = {name: one if isinstance(one, Rows) else Rows(one, name) for name, one in models.items()}
        self._batchers = {
            name: Batcher(rows, self._executor, queue, None if observe is None else _Named(name, observe))
            for name, rows in self._rows.items()
        }

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answer a request.

        Parameters
        ----------
        method, path : str
            Such as ``"POST"`` and ``"/v2/models/resnet50/infer"``.
        headers : mapping of str to str
            With names in any case, or in lower case.
        body : bytes
            As it came.

        Returns
        -------
        Answer
            Errors are answers, too: JSON with ``error``, the reason.
        """
        try:
            return await self._answer(method, path, headers, body)
        except RequestError as error:
            return Answer.error(error.status, str(error))
        except InputError as error:
            return Answer.error(400, str(error))
        except FmtpropError as error:
            return Answer.error(500, str(error))

    async def close(self) -> None:
        """Take no more requests, and wait for the results of those that there are."""
        self._closed = True
        for batcher in self._batchers.values():
            await batcher.close()
        self._executor.shutdown()

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        kind, name = route(method, path)
        if kind == "live":
            return Answer.of({"live": True})
        if kind == "ready":
            return Answer.of({"ready": not self._closed}, 503 if self._closed else 200)
        if kind == "server":
            return Answer.of(server_metadata(fmtprop.__version__))
        if name not in self._rows:
            raise RequestError(404, f"there is no model {name!r}; there are {', '.join(map(repr, self._rows))}")
        rows = self._rows[name]
        if kind == "model_ready":
            return Answer.of({"name": name, "ready": not self._closed}, 503 if self._closed else 200)
        if kind == "model":
            return Answer.of(model_metadata(name, rows.inputs, rows.outputs))
        if len(body) > self._most_bytes:
            raise RequestError(413, f"the request has {len(body)} bytes, at most {self._most_bytes} are taken")
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, f"the body is {headers['content-encoding']}: send it without Content-Encoding")
        length = headers.get(LENGTH_HEADER.lower())
        request = decode(body, length, rows.inputs, rows.outputs)
        limits = [limit for limit in (self._seconds, request.seconds) if limit is not None]
        results = await self._batchers[name].submit(request.tensors, min(limits, default=None))
        made = dict(zip((spec.name for spec in rows.outputs), results, strict=True))
        encoded, answer = encode(name, request, made)
        return Answer(200, answer, encoded)


@dataclass(frozen=True)
class _Named:
    name: str
    observe: Callable[[str, Ran], None]

    def __call__(self, ran: Ran) -> None:
        self.observe(self.name, ran)
