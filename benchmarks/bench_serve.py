"""The service under load: latencies of mixed requests, beside the same service with other engines.

``python -m benchmarks.bench_serve resnet50`` starts one Ray Serve application for each engine, with two replicas of one
thread, and asks them in turns from a few connections on loopback: one to four images of two sizes, as binary tensors;
one request of twenty is a bad one, and in the last turn of each engine a replica is killed. Every answer is compared
with PyTorch's. The table has what clients see: answers a second, p50 and p99, also of the turn with the kill, what was
refused and asked again, bad requests that got 4xx, and requests that got no answer or a wrong one, of which there must
be none. Serve's own part of a request (three processes, copies between them) is in every figure, and the client runs
on the same CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown, table, write_between, write_json
from fmtprop.api import compile as compile_model
from fmtprop.bench.environment import Environment
from fmtprop.bench.peers import OnnxRuntime, OpenVINO, export_onnx
from fmtprop.report import TOLERANCES
from fmtprop.runtime.agreement import relative_error
from fmtprop.serving import Engine, Spec
from graphs.architectures import ARCHITECTURES

ENGINES = ("fmtprop", "onnxruntime", "openvino")

#: what there are plans for
ROWS, SIZES = (1, 4), (224, 160)

#: requests that are asked in turns; every row of an image is drawn from its seed
REQUESTS = 24

#: of so many requests one is bad
BAD_OF = 20

#: times that a client asks again after 429 or 503, a tenth of a second later
ASKED_AGAIN = 50

PORT = 8471

BEGIN = "<!-- bench_serve: python -m benchmarks.bench_serve resnet50 --page docs/deploy.md writes this -->"
END = "<!-- bench_serve: end -->"


@dataclass
class Seen:
    """What clients saw of an engine in a turn."""

    latencies: list[float] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Seen) -> None:
        """Join the figures of another turn."""
        self.latencies += other.latencies
        self.rows += other.rows
        self.seconds += other.seconds
        self.counts += other.counts


@dataclass(frozen=True)
class Asked:
    """A request and its answer."""

    body: bytes
    length: int
    rows: int
    expected: torch.Tensor


def network(name: str) -> torch.nn.Module:
    """Return a network of images, as seeded."""
    return ARCHITECTURES[name].module().eval()


def engines(peer: Any, files: Sequence[tuple[str, tuple[int, ...]]], classes: int) -> list[Engine]:
    """Return the engines of another runtime, in a replica: one for each ONNX file."""
    made = []
    for path, dims in files:
        run = type(peer)(onnx=Path(path)).prepare(torch.nn.Identity(), (torch.zeros(dims),), 1)
        specs = (Spec("image", torch.float32, dims),), (Spec("scores", torch.float32, (dims[0], classes)),)
        made.append(Engine(*specs, lambda tensors, run=run: run(*(one.contiguous() for one in tensors))))
    return made


def sources(module: torch.nn.Module, folder: Path, names: Sequence[str], classes: int) -> dict[str, Any]:
    """Make the plans and the ONNX files; return the models of the applications."""
    cases = [(rows, 3, size, size) for size in SIZES for rows in ROWS]
    found: dict[str, Any] = {}
    torch.set_num_threads(1)
    if "fmtprop" in names:
        (folder / "plans").mkdir(exist_ok=True)
        for dims in cases:
            path = folder / "plans" / f"{dims[0]}x{dims[2]}.fmtplan"
            if not path.exists():
                compile_model(module, torch.zeros(dims)).save(path)
        found["fmtprop"] = str(folder / "plans")
    files = []
    for dims in cases if set(names) - {"fmtprop"} else ():
        path = folder / f"{dims[0]}x{dims[2]}.onnx"
        if not path.exists():
            export_onnx(module, (torch.zeros(dims),), path)
        files.append((str(path), dims))
    peers = {"onnxruntime": OnnxRuntime(), "openvino": OpenVINO()}
    return {name: found.get(name) or partial(engines, peers[name], files, classes) for name in names}


def requests(module: torch.nn.Module, name: str) -> list[Asked]:
    """Return requests of one to four images of two sizes, and PyTorch's results."""
    made = []
    for seed in range(REQUESTS):
        rows, size = 1 + seed % max(ROWS), SIZES[seed // 4 % len(SIZES)]
        x = torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed))
        raw = x.numpy().tobytes()
        row = {"datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": len(raw)}}
        given = {"inputs": [{"name": name, **row}], "parameters": {"binary_data_output": True}}
        text = json.dumps(given).encode()
        with torch.inference_mode():
            made.append(Asked(text + raw, len(text), rows, module(x)))
    return made


def bad_bodies(name: str) -> list[bytes]:
    """Return bodies that a service must refuse."""
    row = {"name": name, "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.0] * 192}
    changes: list[dict[str, Any]] = [
        {},
        {"name": "other"},
        {"datatype": "INT8"},
        {"data": [0.0]},
        {"data": ["a"] * 192},
    ]
    return [b"", b"{", b"\xff" * 100, b"{}", *(json.dumps({"inputs": [{**row, **one}]}).encode() for one in changes)]


async def load(url: str, asked: Sequence[Asked], bad: Sequence[bytes], seconds: float, connections: int) -> Seen:
    """Ask for some seconds from some connections, each with one request at a time."""
    import aiohttp

    seen, numbers = Seen(), iter(range(10**9))
    start = time.perf_counter()

    async def client(session: Any) -> None:
        while time.perf_counter() - start < seconds:
            number = next(numbers)
            if number % BAD_OF == BAD_OF - 1:
                async with session.post(url, data=bad[number // BAD_OF % len(bad)]) as answer:
                    reason = (await answer.json()).get("error")
                    seen.counts["bad, 4xx" if 400 <= answer.status < 500 and reason else "bad, accepted"] += 1
                continue
            await one(session, asked[number % len(asked)])

    async def one(session: Any, given: Asked) -> None:
        began = time.perf_counter()
        headers = {"Inference-Header-Content-Length": str(given.length)}
        for _ in range(ASKED_AGAIN):
            async with session.post(url, data=given.body, headers=headers) as answer:
                body = await answer.read()
                if answer.status not in (429, 503):
                    break
                seen.counts["again"] += 1
            await asyncio.sleep(0.1)
        if answer.status != 200:
            seen.counts["lost"] += 1
            print(f"lost: {answer.status} {body[:300]!r}", file=sys.stderr)
            return
        seen.latencies.append(time.perf_counter() - began)
        seen.rows += given.rows
        length = int(answer.headers["Inference-Header-Content-Length"])
        got = torch.from_numpy(np.frombuffer(body[length:], np.float32).copy()).reshape(given.expected.shape)
        seen.counts["right" if relative_error(got, given.expected) <= TOLERANCES["f32"] else "wrong"] += 1

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        await asyncio.gather(*(client(session) for _ in range(connections)))
    seen.seconds = time.perf_counter() - start
    return seen


async def with_kill(name: str, seconds: float, loading: Any) -> Seen:
    """Kill a replica in the middle of a load."""
    import ray

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if f"{name}#{name}#" in one["name"]]
        ray.kill(ray.get_actor(actors[0]["name"], actors[0]["namespace"]))

    seen, _ = await asyncio.gather(loading, kill())
    seen.counts["killed"] += 1
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if an answer was lost or wrong, or a bad request accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="resnet50", choices=sorted(ARCHITECTURES), metavar="MODEL")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seconds", type=float, default=60, help="of load for each engine (default: 60)")
    parser.add_argument("--turns", type=int, default=3, help="in which an engine has them (default: 3)")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="keep plans and ONNX files for the next time")
    parser.add_argument("--prepare", action="store_true", help="only make these files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the table into docs/deploy.md")
    given = parser.parse_args(arguments)
    import ray
    from ray import serve

    from fmtprop.ray.serve import Settings, application

    module = network(given.model)
    with torch.inference_mode():
        classes = module(torch.zeros(1, 3, 224, 224)).shape[1]
    steady = {name: Seen() for name in given.engines}
    killed = {name: Seen() for name in given.engines}
    asked: dict[str, list[Asked]] = {}
    with tempfile.TemporaryDirectory() as own:
        folder = given.files or Path(own)
        folder.mkdir(exist_ok=True)
        models = sources(module, folder.resolve(), given.engines, classes)
        if given.prepare:
            return 0
        ray.init(num_cpus=2 * len(models), include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"port": PORT})
            for name, source in models.items():
                serve.run(application({name: source}, Settings(replicas=2)), name=name, route_prefix=f"/{name}")
            for turn in range(given.turns):
                for name in given.engines:
                    url = f"http://127.0.0.1:{PORT}/{name}/v2/models/{name}"
                    described = _described(url)
                    if described not in asked:
                        asked[described] = requests(module, described)
                    bad, seconds = bad_bodies(described), given.seconds / given.turns
                    loading = partial(load, f"{url}/infer", asked[described], bad, connections=given.connections)
                    if turn == 0:
                        asyncio.run(loading(seconds=2))  # warm
                    if turn + 1 < given.turns:
                        steady[name].add(asyncio.run(loading(seconds=seconds)))
                    else:
                        killed[name].add(asyncio.run(with_kill(name, seconds, loading(seconds=seconds))))
        finally:
            serve.shutdown()
            ray.shutdown()
    rows = [_row(name, steady[name], killed[name]) for name in given.engines]
    columns = [
        "engine",
        "images/s",
        "p50 ms",
        "p99 ms",
        "p99 ms, killed",
        "again",
        "bad, 4xx",
        "right",
        "lost or wrong",
    ]
    environment = Environment.capture(1)
    title = f"{given.model}, 2 replicas of 1 thread, {given.connections} connections; {environment.cpu}"
    print(table(title, columns, rows))
    if given.page is not None:
        write_between(given.page, BEGIN, END, f"{title}, {given.seconds:.0f} s an engine:\n\n{markdown(columns, rows)}")
    write_json(given.json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows], "cpu": environment.cpu})
    return int(any(int(row[-1]) for row in rows))


def _described(url: str) -> str:
    """Return the name of the input, by the model's metadata."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(json.load(answer)["inputs"][0]["name"])


def _row(name: str, steady: Seen, killed: Seen) -> list[str]:
    """Return the figures of an engine."""
    counts = steady.counts + killed.counts
    wrong = counts["lost"] + counts["wrong"] + counts["bad, accepted"]
    p50, p99 = np.quantile(steady.latencies or killed.latencies, [0.5, 0.99]) * 1e3
    late = np.quantile(killed.latencies, 0.99) * 1e3 if killed.latencies else float("nan")
    per_second = (steady.rows or killed.rows) / (steady.seconds or killed.seconds)
    figures = [f"{per_second:.1f}", f"{p50:.0f}", f"{p99:.0f}", f"{late:.0f}"]
    return [name, *figures, *(str(counts[key]) for key in ("again", "bad, 4xx", "right")), str(wrong)]


if __name__ == "__main__":
    sys.exit(main())
