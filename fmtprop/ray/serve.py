"""Plans on Ray Serve: ``serve run fmtprop.ray.serve:app model=resnet50.fmtplan`` (``pip install "fmtprop[ray]"``).

An application has a deployment for each model, with replicas, a queue and Ray's metrics of its own, and one in front of
them, which knows the names of the models and asks another replica if one dies. The protocol is that of
:mod:`fmtprop.serving`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import LoggingConfig
from ray.util.metrics import Gauge, Histogram
from starlette.requests import Request
from starlette.responses import Response

import fmtprop
from fmtprop.errors import InputError
from fmtprop.ray.threads import set_threads
from fmtprop.serving.batching import Ran
from fmtprop.serving.protocol import RequestError, route, server_metadata
from fmtprop.serving.service import MOST_BYTES, Answer, Service

#: replicas that a request is given to, if those before die
_ATTEMPTS = 3

#: time that a client waits to hear whether a model has a replica that answers
_READY_SECONDS = 2.0

#: the front waits longer than a replica, whose reason the client should get
_MORE_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """What an application takes beside its models, for each of them."""

    replicas: int = 1
    cpus: int = 1
    #: requests that a replica holds, and that wait in front of all replicas; more get 429
    queue: int = 64
    #: time for a request, in milliseconds; later ones get 504. A request may set less.
    timeout_ms: int = 30_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{field.name} must be a positive whole number, got {value!r}")


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the application for ``serve run`` and for the ``args`` of Serve's configuration file.

    `arguments`: ``model``: plan files, or folders with plans of one model for several sizes, separated by commas; a
    model's name is that of its file. Or a mapping of names to paths. Others: see :class:`Settings`.
    """
    given = dict(arguments)
    models = given.pop("model", None)
    known = [field.name for field in fields(Settings)]
    for name in given:
        if name not in known:
            raise InputError(f"there is no argument {name!r}; there are model, {', '.join(known)}")
    numbers = {name: int(one) if re.fullmatch(r"\d+", str(one)) else one for name, one in given.items()}
    return application(_models(models), Settings(**numbers))


def application(models: Mapping[str, Any], settings: Settings | None = None) -> Any:
    """Return a Serve application.

    `models`: names, and what :class:`fmtprop.serving.Rows` takes: paths that all nodes have. Or a function without
    arguments that returns that, in the replica.
    """
    settings = settings or Settings()
    deployments = {
        name: Model.options(  # type: ignore[attr-defined]
            name=name,
            num_replicas=settings.replicas,
            ray_actor_options={"num_cpus": settings.cpus},
            max_ongoing_requests=settings.queue,
            max_queued_requests=settings.queue,
        ).bind(name, source, settings)
        for name, source in models.items()
    }
    # as many at once as all replicas hold and all queues have places for, and those that get 429
    ongoing = 4 * settings.queue * (settings.replicas + 1) * len(models)
    front = Front.options(max_ongoing_requests=ongoing)  # type: ignore[attr-defined]
    return front.bind(deployments, settings)


def _models(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        models = dict(given)
    else:
        paths = str(given or "").split(",") if not isinstance(given, list) else given
        models = {}
        for path in filter(None, paths):
            name = Path(path).stem
            if name in models:
                raise InputError(
                    f"two models are called {name!r}: name them in a configuration file, model: {{A: PATH}}"
                )
            models[name] = str(path)
    if not models:
        raise InputError("no model: serve run fmtprop.ray.serve:app model=FILE.fmtplan")
    for name, path in models.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise InputError(f"a model cannot be called {name!r}: letters, digits, '.', '_' and '-' make a name")
        if not Path(path).exists():
            raise InputError(f"model {name}: there is no file {path}")
    return {name: str(Path(path).resolve()) for name, path in models.items()}


@serve.deployment(logging_config=LoggingConfig(enable_access_log=False))  # the front has a line for each request
class Model:
    """A replica of a model."""

    def __init__(self, name: str, source: Any, settings: Settings) -> None:
        set_threads(None)
        self._metrics = _Metrics(name)
        self._service = Service(
            {name: source() if callable(source) else source},
            queue=settings.queue,
            seconds=settings.timeout_ms / 1e3,
            observe=self._metrics,
        )

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answer a request for this model."""
        return await self._service.handle(method, path, headers, body)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Front:
    """Gives each request to the deployment of its model."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        try:
            if int(request.headers.get("content-length", 0)) > MOST_BYTES:  # before it is read
                raise RequestError(413, f"the request is larger than {MOST_BYTES} bytes")
            answer = await self._answer(request.method, path, dict(request.headers), await request.body())
        except RequestError as error:
            answer = Answer.error(error.status, str(error))
        return Response(answer.body, answer.status, dict(answer.headers))

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        kind, name = route(method, path)
        if kind == "live":
            return Answer.of({"live": True})
        if kind == "server":
            return Answer.of(server_metadata(fmtprop.__version__))
        if kind == "ready":
            answers = [await self._ready(one) for one in self._models]
            return next((one for one in answers if one.status != 200), Answer.of({"ready": True}))
        if name is None or name not in self._models:
            raise RequestError(404, f"there is no model {name!r}; there are {', '.join(map(repr, self._models))}")
        if kind == "model_ready":
            return await self._ready(name)
        return await self._asked(name, method, path, headers, body)

    async def _ready(self, name: str) -> Answer:
        try:
            return await asyncio.wait_for(self._asked(name, "GET", f"/v2/models/{name}/ready", {}, b""), _READY_SECONDS)
        except asyncio.TimeoutError:
            return Answer.error(503, f"model {name} has no replica that answers")

    async def _asked(self, name: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return a replica's answer; a run changes nothing, so another replica may do it again."""
        seconds = self._settings.timeout_ms / 1e3
        end = asyncio.get_running_loop().time() + seconds + _MORE_SECONDS
        for _ in range(_ATTEMPTS):
            left = end - asyncio.get_running_loop().time()
            try:
                asked = self._models[name].handle.remote(method, path, headers, body)
                made: Answer = await asyncio.wait_for(asked, left)
                return made
            except asyncio.TimeoutError as error:
                raise RequestError(504, f"no replica of model {name} answered within {seconds:g} s") from error
            except BackPressureError as error:
                why = f"{self._settings.queue} requests wait for model {name} already: try again later"
                raise RequestError(429, why) from error
            except RayActorError:
                continue
        raise RequestError(503, f"{_ATTEMPTS} replicas of model {name} died with this request: try again later")


class _Metrics:
    """Metrics beside those that Ray has of each deployment: requests, errors, latency, queue."""

    def __init__(self, model: str) -> None:
        self._tags = {"model": model}
        keys = ("model",)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128]
        times = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
        self._rows = Histogram("fmtprop_batch_rows", "rows that run together", sizes, keys)
        self._requests = Histogram("fmtprop_batch_requests", "requests that run together", sizes, keys)
        self._ms = Histogram("fmtprop_batch_ms", "time of a run in milliseconds", times, keys)
        self._waiting = Gauge("fmtprop_waiting_requests", "requests in a replica that wait for a run", keys)

    def __call__(self, _: str, ran: Ran) -> None:
        self._rows.observe(ran.rows, self._tags)
        self._requests.observe(ran.requests, self._tags)
        self._ms.observe(ran.seconds * 1e3, self._tags)
        self._waiting.set(ran.waiting, self._tags)
