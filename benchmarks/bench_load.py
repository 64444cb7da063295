"""Cold start: how long a process takes from ``fp.load_plan`` to its first answer, and where the time goes.

``python -m benchmarks.bench_load resnet50 bert_base`` compiles each built-in model to a plan file, loads it in fresh
processes, compares the bits of their answers with those of the compiling process, and prints medians. The page cache is
warm: the file was written a moment ago.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

import fmtprop as fp

#: run in a fresh process: path of the plan, threads
LOAD = """
import sys, time
start = time.perf_counter()
import torch
torch.set_num_threads(int(sys.argv[2]))
torch.ones(2, 2) @ torch.ones(2, 2)
times = {"import torch": time.perf_counter() - start}
laps = [time.perf_counter()]
def lap(name):
    laps.append(time.perf_counter())
    times[name] = laps[-1] - laps[-2]
import fmtprop as fp
from fmtprop.compiling import loading
lap("import fmtprop")
net = fp.load_plan(sys.argv[1], on_mismatch="error")
lap("load_plan")
inputs = net.random_inputs()
laps.append(time.perf_counter())
results = net.run_flat(inputs)
lap("first run")
net.run_flat(inputs)
lap("second run")
import hashlib, json
digest = hashlib.sha256(b"".join(result.contiguous().numpy().tobytes() for result in results)).hexdigest()
print(json.dumps([times, digest]))
"""

#: in one more process: the functions whose time is shown
PROFILE = """
import cProfile, json, pstats, sys, torch
torch.set_num_threads(int(sys.argv[2]))
import fmtprop as fp
from fmtprop.compiling import loading
profile = cProfile.Profile()
profile.enable()
net = fp.load_plan(sys.argv[1])
profile.disable()
wanted = {"parse_json": "read the document", "graph_of": "make the graph", "verify": "verify it",
          "rebuild": "ask for implementations", "_place_all": "place buffers", "pack": "find weights",
          "_load": "import modules", "result": "wait for the checksums"}
found = {}
for (file, line, name), (_, _, _, seconds, _) in pstats.Stats(profile).stats.items():
    if name in wanted and ("fmtprop" in file or name == "result"):
        found[wanted[name]] = max(found.get(wanted[name], 0), seconds)
print(json.dumps(found))
"""


def measured(model: str, threads: int, processes: int, folder: Path) -> None:
    """Compile or find the plan, load it in fresh processes, compare, print."""
    torch.set_num_threads(threads)
    path = folder / f"{model}-{threads}.fmtplan"
    if not path.exists():
        fp.compile(model).save(path)
    net = fp.load_plan(path, on_mismatch="error")
    results = net.run_flat(net.random_inputs())
    digest = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in results)).hexdigest()
    rows = [json.loads(_run(LOAD, path, threads)) for _ in range(processes)]
    if any(found != digest for _, found in rows):
        raise SystemExit(f"{model}: a loaded plan gives other bits")
    size = path.stat().st_size / 1e6
    print(f"{model}, {threads} threads, {size:.0f} MB, {processes} processes, equal bits")
    print("seconds, median (least to most)")
    columns = {name: [times[name] for times, _ in rows] for name in rows[0][0]}
    columns["load + first run"] = [times["load_plan"] + times["first run"] for times, _ in rows]
    for name, values in columns.items():
        print(f"  {name:16} {median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    shares = json.loads(_run(PROFILE, path, threads))
    print("  in load_plan, profiled:", ", ".join(f"{name} {value:.3f}" for name, value in shares.items()), flush=True)


def _run(script: str, path: Path, threads: int) -> str:
    command = [sys.executable, "-c", script, str(path), str(threads)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["resnet50", "bert_base"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where plan files are kept for the next time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for one in given.models:
            measured(one, given.threads, given.processes, given.folder or Path(temporary))
