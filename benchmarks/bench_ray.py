"""Images a second of a data set on Ray, beside as many bare processes.

``python -m benchmarks.bench_ray mobilenet_v2`` writes seeded images as bytes to files, and a plan for one thread. Ray
Data's ``map_batches`` runs it in actors of one CPU each (:class:`fmtprop.ray.Predictor`), and bare processes call the
same class on the same files, in turns. A turn is from the first batch to the last, so without the start of processes;
that is given beside it. The first four bytes of an image are its number: each must come once, with the scores that
PyTorch gives the same bytes (some of them) and equal ones in all turns. ``--kill`` ends an actor in the middle of one
more turn. Where others use the machine, the CPU time of an image, of all processes together, says more than the
images a second: Ray's includes its scheduler and the reading of files. The last line has the parts of the calculation
in docs/deploy.md: one process alone is measured on some of the images.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown, table, write_between, write_json
from fmtprop.api import compile as compile_model
from fmtprop.bench.environment import Environment
from fmtprop.ray import Predictor
from fmtprop.report import TOLERANCES
from fmtprop.runtime.agreement import relative_error
from graphs.architectures import ARCHITECTURES

#: at least this share of the images a second of bare processes
TARGET = 0.95

#: images of a file, which Ray gives an actor at once, and of a run of the plan: the last run of a file has all its
#: rows, and at the end no actor waits long for the other one
FILE, BATCH = 80, 16

#: images that PyTorch computes, too
COMPARED = 32

#: files for a process that runs alone
ALONE = 12

BEGIN = "<!-- bench_ray: python -m benchmarks.bench_ray mobilenet_v2 --kill --page docs/deploy.md writes this -->"
END = "<!-- bench_ray: end -->"

#: CPU seconds of an image, one for each turn
CPU: dict[str, list[float]] = {"Ray Data": [], "bare processes": []}

Batch = Mapping[str, np.ndarray[Any, Any]]


class Images(torch.nn.Module):
    """A network of images that takes bytes."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return the scores of n images of 3x224x224 bytes."""
        return self.network(data.float() / 64 - 2)


class Worker:
    """What a process does with a batch: scores, numbers of the images, and when it ran."""

    def __init__(self, plan: str, mark: str = "", end_at: int = 0) -> None:
        self.predict, self.mark, self.end_at = Predictor(plan, outputs=["scores"], drop=["data"]), mark, end_at

    def __call__(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        """Return the results without the images."""
        start, data = time.time(), batch["data"]
        number = np.ascontiguousarray(data[:, 0, 0, :4]).view(np.int32)[:, 0]
        if self.mark and number.max() >= self.end_at and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(1)
        made = self.predict(batch)
        times = np.full((len(data), 2), (start, time.time()))
        return {**made, "number": number, "times": times}


def write_images(folder: Path, count: int) -> None:
    """Write seeded images, whose first four bytes are their number."""
    for first in range(0, count, FILE):
        size = min(FILE, count - first)
        images = np.random.default_rng(first).integers(0, 256, (size, 3, 224, 224), np.uint8)
        images[:, 0, 0, :4] = np.arange(first, first + size, dtype=np.int32)[:, None].view(np.uint8)
        np.save(folder / f"{first:06}.npy", images)


def on_ray(folder: Path, plan: str, workers: int, mark: str = "", end_at: int = 0) -> Iterator[Batch]:
    """Run Ray Data over the files; with a `mark`, an actor ends at image `end_at`."""
    import ray

    files = sorted(str(path) for path in (folder / "images").iterdir())
    # a block is a file: otherwise Ray cuts files, and puts the batches together again
    data = ray.data.read_numpy(files, override_num_blocks=len(files))
    results = data.map_batches(
        Worker,
        fn_constructor_args=(plan, mark, end_at),
        concurrency=workers,
        num_cpus=1,
        batch_size=FILE,
        batch_format="numpy",
    )
    before, count = None, 0
    for batch in results.iter_batches(batch_size=2 * FILE, batch_format="numpy"):
        if before is None:  # all processes have started
            before = cpu_seconds()
        else:
            count += len(batch["number"])
        yield batch
    if before is not None and count:
        CPU["Ray Data"].append((cpu_seconds() - before) / count)


def cpu_seconds() -> float:
    """Return the CPU time of this process and those that it started, and so on."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        parents[process], seconds[process] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def is_mine(process: int) -> bool:
        while process not in (0, os.getpid()):
            process = parents.get(process, 0)
        return process != 0

    return sum(one for process, one in seconds.items() if is_mine(process))


def bare(folder: Path, plan: str, workers: int, most: int | None = None) -> Iterator[Batch]:
    """Run bare processes over the files, or the first of them."""
    context = get_context("spawn")
    ready, results = context.Barrier(workers), context.Queue()
    files = sorted(str(path) for path in (folder / "images").iterdir())[:most]
    processes = [
        context.Process(target=_work, args=(plan, files[worker::workers], ready, results)) for worker in range(workers)
    ]
    for process in processes:
        process.start()
    seconds = 0.0
    count = 0
    for _ in processes:
        batch, took = results.get()
        seconds, count = seconds + took, count + len(batch["number"])
        yield batch
    for process in processes:
        process.join()
    if most is None:
        CPU["bare processes"].append(seconds / count)


def _work(plan: str, files: Sequence[str], ready: Any, results: Any) -> None:
    torch.set_num_threads(1)
    worker, made = Worker(plan), []
    ready.wait()
    before = time.process_time()
    for file in files:
        images = np.load(file)
        made += [worker({"data": images[first : first + BATCH]}) for first in range(0, len(images), BATCH)]
    took = time.process_time() - before
    results.put(({name: np.concatenate([one[name] for one in made]) for name in made[0]}, took))


def turn(batches: Iterator[Batch], count: int, expected: torch.Tensor) -> tuple[float, float, np.ndarray[Any, Any]]:
    """Return the seconds from the first batch to the last, those in all, and the scores by number."""
    start = time.time()
    made = list(batches)
    whole = time.time() - start
    joined = {name: np.concatenate([np.asarray(list(one[name])) for one in made]) for name in made[0]}
    if not np.array_equal(np.sort(joined["number"]), np.arange(count)):
        raise SystemExit(f"not every image came once: {len(joined['number'])} rows of {count}")
    scores = joined["scores"][np.argsort(joined["number"])]
    error = relative_error(torch.from_numpy(scores[: len(expected)].copy()), expected)
    if error > TOLERANCES["f32"]:
        raise SystemExit(f"the scores are not PyTorch's: they differ by {error:.1e}")
    return float(joined["times"].max() - joined["times"].min()), whole, scores


def page(given: argparse.Namespace, environment: Environment, rows: Sequence[Sequence[str]], parts: Any) -> str:
    """Return what docs/deploy.md shows: the figures, and the calculation with them."""
    title = (
        f"{given.model}, f32, {given.images} images, {given.workers} workers of one thread, {environment.cpu}, "
        f"{environment.cpus} CPUs; Ray Data has {parts['ray']:.3f} of the bare processes' images a second:"
    )
    return f"""{title}

{markdown(["", "images/s", "CPU ms an image", "s in all"], rows)}

```python
parts = {json.dumps(parts)}
for nodes in (1, 2, 4, 8):
    print(nodes, images_per_second(nodes, {given.workers}, network=125e6, **parts))
```"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="mobilenet_v2", choices=sorted(ARCHITECTURES), metavar="MODEL")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--kill", action="store_true", help="one more turn, in which an actor dies")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write them into docs/deploy.md")
    given = parser.parse_args(arguments)
    import ray

    module = Images(ARCHITECTURES[given.model].module().eval())
    seconds: dict[str, list[tuple[float, float]]] = {"Ray Data": [], "bare processes": []}
    with tempfile.TemporaryDirectory() as name:
        folder, plan = Path(name), str(Path(name) / "model.fmtplan")
        (folder / "images").mkdir()
        write_images(folder / "images", given.images)
        torch.set_num_threads(1)
        compile_model(module, torch.zeros(BATCH, 3, 224, 224, dtype=torch.uint8)).save(plan)
        first = torch.from_numpy(np.load(folder / "images/000000.npy")[:COMPARED])
        with torch.inference_mode():
            expected = module(first)
        # one CPU more than the actors have: Ray's tasks that read files
        ray.init(num_cpus=given.workers + 1, include_dashboard=False, log_to_driver=False)
        try:
            before = None
            for _ in range(given.turns):
                for kind in seconds:
                    batches = on_ray if kind == "Ray Data" else bare
                    took, whole, scores = turn(batches(folder, plan, given.workers), given.images, expected)
                    if before is not None and not np.array_equal(scores, before):
                        raise SystemExit("two turns have different scores")
                    before = scores
                    seconds[kind].append((took, whole))
            few = min(given.images, ALONE * FILE)
            alone, _, _ = turn(bare(folder, plan, 1, ALONE), few, expected)
            if given.kill:
                dying = on_ray(folder, plan, given.workers, str(folder / "died"), given.images // 2)
                _, whole, scores = turn(dying, given.images, expected)
                if not (folder / "died").exists() or not np.array_equal(scores, before):
                    raise SystemExit("no actor died, or its rows came out different")
                seconds["Ray Data, an actor killed"] = [(whole, whole)]
        finally:
            ray.shutdown()
    rates = {kind: given.images / median(took for took, _ in turns) for kind, turns in seconds.items()}
    rows = [
        [
            kind,
            f"{rates[kind]:.1f}",
            f"{median(CPU[kind]) * 1e3:.2f}" if CPU.get(kind) else "",
            f"{median(whole for _, whole in turns):.1f}",
        ]
        for kind, turns in seconds.items()
    ]
    pairs = zip(seconds["Ray Data"], seconds["bare processes"], strict=True)
    ratio = median(theirs[0] / ours[0] for ours, theirs in pairs)
    environment = Environment.capture(1)
    print(
        table(
            f"{given.model}, {given.images} images, {given.workers} workers of 1 CPU; {environment.cpu}",
            ["", "images/s", "CPU ms an image", "s in all"],
            rows,
        )
    )
    print(f"Ray Data over bare processes: {ratio:.3f}, target {TARGET}: {'met' if ratio >= TARGET else 'missed'}")
    cpu = median(CPU["bare processes"]) / median(CPU["Ray Data"]) if CPU["Ray Data"] else float("nan")
    print(f"by CPU time of an image: {cpu:.3f}")
    one = alone / few
    together = given.workers / rates["bare processes"] / one
    parts = {
        "alone": round(one, 5),
        "together": round(together, 3),
        "ray": round(ratio, 3),
        "image_bytes": 3 * 224 * 224,
    }
    print(", ".join(f"{name}={value}" for name, value in parts.items()))
    figures = {"ratio": ratio, "seconds": seconds, "cpu_seconds": CPU, "parts": parts, "cpu": environment.cpu}
    write_json(given.json, figures)
    if given.page is not None:
        write_between(given.page, BEGIN, END, page(given, environment, rows, parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
