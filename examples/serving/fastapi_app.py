"""Plans behind FastAPI: ``python examples/serving/fastapi_app.py resnet50.fmtplan --port 8080``.

The Open Inference Protocol v2 in one route; your own routes may stand beside it. One process has one thread for the
models, which uses all of PyTorch's threads: start a process for each group of CPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response

from fmtprop.serving import Service


def create(models: Mapping[str, str]) -> FastAPI:
    """Return the application for plan files, by the names of their models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(models, queue=64, seconds=30)
        yield
        await app.state.service.close()  # results of requests that wait

    app = FastAPI(lifespan=lifespan)

    @app.api_route("/v2{path:path}", methods=["GET", "POST"])
    async def v2(request: Request) -> Response:
        service: Service = request.app.state.service
        answer = await service.handle(request.method, request.url.path, request.headers, await request.body())
        return Response(answer.body, answer.status, dict(answer.headers))

    return app


def main() -> None:
    """Serve plan files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+", type=Path, help="plan files, or folders with plans of one model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    uvicorn.run(create({path.stem: str(path) for path in given.plans}), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
