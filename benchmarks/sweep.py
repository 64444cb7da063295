"""Every network: compile many architectures that nobody tuned for, compare them with f64, time them against PyTorch.

``python -m benchmarks.sweep`` (``make sweep``) gives each network a process of its own, with limits on processor time
and memory, and appends what comes of it to a file of JSON lines, one file for each commit. Started anew it goes on
where it was stopped. ``--table`` writes the results of such files into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import tell
from benchmarks.sweep_models import NETWORKS
from benchmarks.sweep_network import Record, Variant, run
from benchmarks.sweep_table import write_table

__all__ = ["main"]

_BAD = ("wrong", "crash", "timeout", "memory")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: imported once, in the process that all networks' are forked from; it computes nothing, so it has no threads
_PRELOADED = ["benchmarks.sweep_network", "fmtprop.compiling.compilation", "transformers.modeling_utils"]


class Process:
    """One network in its process: its records, read as they come."""

    def __init__(self, name: str, variants: Sequence[Variant], arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.connection, theirs = context.Pipe(duplex=False)
        what = (name, tuple(variants), arguments.threads, not arguments.untimed, arguments.limit, theirs)
        self.process = context.Process(target=_serve, args=what)
        self.process.start()
        theirs.close()
        self.limit, self.memory = arguments.limit, arguments.memory
        self.last = asdict(Record(name, str(variants[0]), stage="start"))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield complete records; the last one says how the process ended, where it ended early."""
        ended = ""
        # processor time is limited by the kernel; a process that waits for nothing uses none
        deadline = time.monotonic() + 6 * self.limit
        while not ended:
            if self.connection.poll(0.1):
                try:
                    self.last = self.connection.recv()
                except EOFError:
                    break
                if self.last["stage"] == "done":
                    yield self.last
            elif time.monotonic() > deadline:
                ended = "timeout"
            elif _resident(self.process.pid) > self.memory << 20:
                ended = "memory"
        if ended:
            self.process.kill()
        self.process.join()
        if self.last["stage"] != "done":
            yield self._obituary(ended)

    def _obituary(self, ended: str) -> dict[str, Any]:
        code = self.process.exitcode or 0
        status = ended or ("timeout" if code == -signal.SIGXCPU else "crash")
        died = f"{self.last['stage']}: " + (signal.Signals(-code).name if code < 0 else f"exit code {code}")
        return {**self.last, "status": status, "stage": "done", "reason": self.last["reason"] or died}


def _serve(
    name: str, variants: Sequence[Variant], threads: int, timed: bool, limit: int, connection: Connection
) -> None:
    """Run in the network's process."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    stage = "start"

    def say(record: dict[str, Any]) -> None:
        nonlocal stage
        stage = record["stage"]
        connection.send(record)

    try:
        run(name, variants, threads, timed, say)
    except Exception as error:  # outside of a variant: the network itself cannot be built, run or exported
        reason = f"{stage}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        say(asdict(Record(name, str(variants[0]), status="crash", stage="done", reason=reason)))


def _resident(pid: int | None) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except OSError:
        return 0


def sweep(names: Sequence[str], arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Try networks one after the other; what a process did not come to is tried in another one."""
    end = time.monotonic() + 60 * arguments.minutes
    for index, name in enumerate(names):
        if time.monotonic() > end:
            print(f"{len(names) - index} networks are left: the time is over")
            return
        left = [v for v in arguments.variants if (name, str(v)) not in arguments.known]
        while left:
            tell(f"{index + 1}/{len(names)} {name} {left[0]}")
            found = list(Process(name, left, arguments).records())
            for record in found:
                keep(record)
            done = {record["variant"] for record in found}
            left = [] if found[-1]["steps"] is None and len(done) == 1 else [v for v in left if str(v) not in done]


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def parsed_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="networks whose names match, as in a shell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no network after so many")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th network, from the I-th on")
    parser.add_argument("--dtype", nargs="+", default=["f32"], choices=["f32", "bf16"])
    policies = ["optimal", "propagate", "naive", "plain", "again"]
    parser.add_argument("--policy", nargs="+", default=["optimal"], choices=policies, help="again: with all cached")
    parser.add_argument("--isa", help="what ONEDNN_MAX_CPU_ISA is to be, such as avx2")
    parser.add_argument("--untimed", action="store_true", help="compare only: for a machine that others use")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=300, help="processor seconds of a network (default: 300)")
    parser.add_argument("--memory", type=int, default=10_000, help="MiB of a network (default: 10000)")
    parser.add_argument("--results", type=Path, help="JSON lines (default: reports/sweep-COMMIT[-ISA].jsonl)")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    parser.add_argument("--list", action="store_true", help="print the networks' names")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="write docs/coverage.md and do no more")
    return parser.parse_args(arguments)


def _known(path: Path) -> set[tuple[str, str]]:
    if not path.exists():
        return set()
    return {(r["name"], r["variant"]) for r in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def _describe(record: dict[str, Any]) -> str:
    def number(key: str, form: str) -> str:
        return "-" if record[key] is None else format(record[key], form)

    figures = " ".join(
        [
            *(number("error", ".1e"), number("eager_error", ".1e"), number("compile_seconds", ".1f") + " s"),
            *(number("reorders", "d") + " reorders", "host " + number("host", ".0%"), "ref " + number("ref", ".0%")),
            *("x" + number("ratio", ".2f"), f"[{number('total_seconds', '.0f')} s]"),
        ]
    )
    notes = "".join(f"\n    {note}" for note in (record["reason"], *record["dear"], *record["warned"]) if note)
    return f"{record['name']:32} {record['variant']:14} {record['status']:11} {figures}{notes}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep what the command line asks for; return 1 where something is not right."""
    parsed = parsed_arguments(arguments)
    if parsed.table:
        write_table(parsed.table)
        return 0
    index, count = map(int, parsed.shard.split("/"))
    names = [n for n in NETWORKS if not parsed.only or any(fnmatch.fnmatch(n, p) for p in parsed.only)]
    random.Random(0).shuffle(names)  # where the time is over before the end, some of every kind were tried
    names = names[index::count]
    if parsed.list:
        print("\n".join(names))
        return 0
    if parsed.isa:
        # read once by each library, in the networks' processes
        os.environ["ONEDNN_MAX_CPU_ISA"] = parsed.isa.upper()
        if parsed.isa.lower().startswith("avx2"):
            os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    suffix = f"-{parsed.isa.lower()}" if parsed.isa else ""
    results = parsed.results or Path("reports") / f"sweep-{_commit()}{suffix}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    parsed.known = set() if parsed.again else _known(results)
    parsed.variants = [Variant(dtype, policy) for dtype in parsed.dtype for policy in parsed.policy]
    bad = 0

    def keep(record: dict[str, Any]) -> None:
        nonlocal bad
        bad += record["status"] in _BAD
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "isa": parsed.isa or ""}) + "\n")
        tell("")
        print(_describe(record), flush=True)

    sweep(names, parsed, keep)
    print(f"{bad} not right; results in {results}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
