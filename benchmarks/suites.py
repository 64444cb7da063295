"""PyTorch's three lists for CPUs: whether each network is right by both doors, and its time beside eager and Inductor.

``python -m benchmarks.suites`` (``make suites``) gives each case (a network in a mode, data type, batch and number of
threads) a process, and each way to run it a process of its own below that, in turns. Results are compared with
PyTorch's before anything is timed, by the rule of PyTorch's own runner. Records go to a file of JSON lines; started
anew, it goes on where it was stopped. ``--table`` writes them into docs/coverage.md.

The aims: all right; time over Inductor's at most 0.75 in geometric mean of each list, 0.85 in training; none slower
than eager. A missed aim does not change the exit code, which is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fmtprop as fp
from benchmarks.common import headline, tell
from benchmarks.suite_models import SUITES
from benchmarks.suites_table import write_table
from benchmarks.sweep_network import in_f64, settle
from fmtprop.bench import Environment
from fmtprop.bench.compare import Agreement, tensors_of
from fmtprop.bench.contenders import contender
from fmtprop.bench.peers import Inductor, TorchEager
from fmtprop.bench.processes import Prepared, call_in_process, interleave_processes
from fmtprop.bench.training import prepare_step, without_dropout, write_expected
from fmtprop.capture.factories import Made
from fmtprop.errors import FmtpropError
from fmtprop.runtime.process import use_threads

__all__ = ["Case", "main"]

#: both doors of ours; the first one is the reference of ratios
OURS = ("torch.compile", "fp.compile")
#: contenders of :mod:`fmtprop.bench.training` by the names that records give them
TRAINING = {"fmtprop": OURS[0], "torch": "eager", "torch-channels-last": "channels-last", "inductor": "inductor"}

#: tolerances of PyTorch's runner: of all numbers, or of the error against f64 beyond twice eager's own (three times for
#: few numbers, whose errors vary)
_TOLERANCES = {"f32": 1e-4, "bf16": 1e-2}
_FEW_NUMBERS, _TIMES, _TIMES_OF_FEW = 1000, 2.0, 3.0

#: rounds and runs of a turn; long runs have fewer, so that a case ends
_ROUNDS, _REPEATS, _LONG_SECONDS = 7, 3, 1.0

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One network in one way to use it."""

    suite: str
    name: str
    #: runs in eval mode, or steps with gradients and an optimiser
    mode: str = "inference"
    dtype: str = "f32"
    #: a single sample, or the list's batch, halved until it fits the limits
    batch: str = "one"
    threads: int = 2

    def __str__(self) -> str:
        return f"{self.suite}/{self.name} {self.mode} {self.dtype} batch {self.batch} {self.threads} threads"

    def made(self, batch: int) -> Made:
        """Return the network with a batch, ready for its mode."""
        make = SUITES[self.suite][self.name][1]
        made = make(batch)
        if self.mode == "training":
            return replace(made, module=made.module.train().requires_grad_(True))
        one = make(1)
        # fresh statistics let activations vanish, so that any result would be right
        settle(one.module, [t for t in one.inputs if isinstance(t, torch.Tensor)], {})
        return replace(made, module=one.module)


# ---------------------------------------------------------------- ways to run


def _torch_compile(made: Made, case: Case) -> Run:
    run = torch.compile(made.module, backend="fmtprop", options={"dtype": case.dtype})
    return _without_gradients(run, made)


def _fp_compile(made: Made, case: Case) -> Run:
    return _without_gradients(fp.compile(made.module, made.inputs, case.dtype), made)


def _eager(made: Made, case: Case, *, channels_last: bool = False) -> Run:
    run = TorchEager(channels_last, case.dtype).prepare(made.module, made.inputs, case.threads)
    return lambda: run(*made.inputs)


def _inductor(made: Made, case: Case) -> Run:
    run = Inductor(case.dtype).prepare(made.module, made.inputs, case.threads)
    return lambda: run(*made.inputs)


def _openvino(made: Made, case: Case) -> Run:
    if find_spec("openvino") is None:
        raise FmtpropError("it is not installed")
    import openvino.torch  # noqa: F401  (registers the backend)

    options = {"config": {"INFERENCE_PRECISION_HINT": case.dtype}}  # by default, bf16 wherever the CPU has it
    return _without_gradients(torch.compile(made.module, backend="openvino", options=options, dynamic=False), made)


def _without_gradients(run: Callable[..., Any], made: Made) -> Run:
    def call() -> Any:
        with torch.no_grad():
            return run(*made.inputs)

    return call


DOORS: Mapping[str, Callable[[Made, Case], Run]] = {
    OURS[0]: _torch_compile,
    OURS[1]: _fp_compile,
    "eager": _eager,
    "channels-last": partial(_eager, channels_last=True),
    "inductor": _inductor,
    "openvino": _openvino,
}


# ---------------------------------------------------------------- one case


def judge(got: Any, expected: Any, right: Any, dtype: str) -> Agreement:
    """Compare results by the rule of PyTorch's runner: all numbers close, or about as far from f64 as eager's.

    `got`, `expected`, `right`: results; PyTorch's in this data type; PyTorch's in f64, or None where it has none.
    """
    tolerance, worst = _TOLERANCES[dtype], 0.0
    ours, theirs = tensors_of(got), tensors_of(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return Agreement(False, float("inf"), tolerance, "results have other shapes")
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not b.is_floating_point() and torch.equal(a, b):
            continue
        exact = b.double() if right is None else right[index].double()
        a, b = a.double(), b.double()
        size = float(exact.square().mean().sqrt()) or 1.0
        error, own = (float((t - exact).square().mean().sqrt()) / size for t in (a, b))
        worst = max(worst, error)
        times = _TIMES if b.numel() >= _FEW_NUMBERS and dtype == "f32" else _TIMES_OF_FEW
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance) and not error <= times * own + tolerance / 10:
            message = f"result {index} is {error:.1e} from f64, eager {own:.1e}, in root mean square over the values'"
            return Agreement(False, error, tolerance, message)
    return Agreement(True, worst, tolerance)


def _expect(case: Case, batch: int, file: Path) -> None:
    """Write PyTorch's results, in the case's data type and in f64."""
    use_threads(case.threads)
    made = case.made(batch)
    expected = tensors_of(_eager(made, case)())
    try:
        right = in_f64(made.module, made.inputs, {})
    except (NotImplementedError, MemoryError):
        right = None
    torch.save({"expected": expected, "right": right}, file)


def _prepare(case: Case, batch: int, door: str, folder: Path) -> Prepared:
    """Make a case ready in this process; leave a note of what that took."""
    use_threads(case.threads)
    made, start = case.made(batch), time.perf_counter()
    try:
        run = DOORS[door](made, case)
        results = run()
    except Exception as error:  # each way may fail in its own manner, and the others go on
        raise FmtpropError(f"{door}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    _note(folder, door, start, run)
    saved = torch.load(folder / "expected.pt", weights_only=True)
    return Prepared(run, judge(results, saved["expected"], saved["right"], case.dtype))


def _prepare_step(case: Case, batch: int, name: str, folder: Path) -> Prepared:
    start = time.perf_counter()
    make = partial(without_dropout, partial(case.made, batch))
    how = contender(name, fp.api.Options(dtype=case.dtype))
    try:
        prepared = prepare_step(make, how, folder / "expected.pt", case.threads)
    except Exception as error:
        raise FmtpropError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    _note(folder, TRAINING[name], start, prepared.run)
    return prepared


def _note(folder: Path, door: str, start: float, run: Run) -> None:
    """Write the seconds from the module to the first result, those of a run, and the highest memory of the process."""
    seconds, start = time.perf_counter() - start, time.perf_counter()
    run()
    again = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    text = json.dumps({"compile_seconds": seconds - again, "run_seconds": again, "peak_nbytes": peak})
    (folder / f"{door}.json").write_text(text, encoding="utf-8")


def _probe(case: Case, batch: int) -> tuple[float, int]:
    """Return the seconds and the highest memory of a run in PyTorch."""
    use_threads(case.threads)
    made = case.made(batch)
    with torch.set_grad_enabled(case.mode == "training"):
        for _ in range(2):
            start = time.perf_counter()
            loss = made.loss(made.module(*made.inputs))
            if loss.requires_grad:
                loss.backward()
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _fitting(case: Case, arguments: argparse.Namespace) -> int:
    """Return the case's batch, halved until a run takes as long, and as much memory, as is allowed."""
    batch = SUITES[case.suite][case.name][0] if case.batch == "list" else 1
    least = 2 if case.mode == "training" else 1  # batch normalization learns nothing from one number
    if batch <= least:
        return least
    one, two = (call_in_process("eager", partial(_probe, case, count)) for count in (least, 2 * least))
    seconds, nbytes = ((two[i] - one[i]) / least for i in (0, 1))
    while batch > least and (
        one[0] + (batch - least) * max(seconds, one[0] / (2 * least)) > arguments.run_seconds
        or one[1] + (batch - least) * nbytes > arguments.memory << 20
    ):
        batch //= 2
    return max(batch, least)


def measured(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare and time a case; return its record."""
    with tempfile.TemporaryDirectory(prefix="suites-") as name:
        folder = Path(name)
        os.environ["FMTPROP_CACHE_DIR"] = str(folder / "cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        batch = _fitting(case, arguments)
        if case.mode == "training":
            make = partial(without_dropout, partial(case.made, batch))
            call_in_process("torch", partial(write_expected, make, case.dtype, folder / "expected.pt"))
            ways = {TRAINING[n]: partial(_prepare_step, case, batch, n, folder) for n in TRAINING}
        else:
            call_in_process("torch", partial(_expect, case, batch, folder / "expected.pt"))
            ways = {door: partial(_prepare, case, batch, door, folder) for door in DOORS}
        ways = {door: way for door, way in ways.items() if door in (OURS[0], *arguments.ways)}
        if arguments.untimed:
            found = {door: _judged(door, way) for door, way in ways.items() if door in OURS}
            where = headline(Environment.capture(threads=case.threads))
            return {"size": batch, "doors": found, "where": where, "reason": ""}
        is_long = call_in_process("torch", partial(_probe, case, batch))[0] > _LONG_SECONDS
        rounds, repeats = (arguments.rounds or (3 if is_long else _ROUNDS)), (1 if is_long else _REPEATS)
        result = interleave_processes(
            ways, reference=OURS[0], rounds=rounds, repeats=repeats, warmup=1, threads=case.threads
        )
        found = {}
        for entry in result.entries:
            note = folder / f"{entry.name}.json"
            found[entry.name] = {
                "passed": entry.agreement.passed,
                "error": entry.agreement.error if entry.agreement.passed else None,
                "message": entry.agreement.message,
                "milliseconds": entry.latency.median if entry.latency is not None else None,
                **(json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}),
            }
    return {"size": batch, "doors": found, "where": headline(result.environment), "reason": ""}


def _agreement(prepare: Callable[[], Prepared]) -> Agreement:
    return prepare().agreement


def _judged(door: str, prepare: Callable[[], Prepared]) -> dict[str, Any]:
    """Return what is known of a door without timing it: whether its results are right."""
    try:
        agreement = call_in_process(door, partial(_agreement, prepare))
    except FmtpropError as error:
        return {"passed": False, "error": None, "message": str(error), "milliseconds": None}
    error = agreement.error if agreement.passed else None
    return {"passed": agreement.passed, "error": error, "message": agreement.message, "milliseconds": None}


# ---------------------------------------------------------------- all cases


def _apart(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a case that runs in a process of its own, which is ended after the limit."""
    command = [sys.executable, "-m", "benchmarks.suites", "--one", json.dumps(asdict(case))]
    command += ["--memory", str(arguments.memory), "--run-seconds", str(arguments.run_seconds)]
    command += ["--rounds", str(arguments.rounds), *["--untimed"] * arguments.untimed, "--ways", *arguments.ways]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=arguments.limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return {"size": 0, "doors": {}, "where": "", "reason": f"not done after {arguments.limit} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        last = err.strip().splitlines()[-1:] or ["nothing"]
        return {"size": 0, "doors": {}, "where": "", "reason": f"exit code {child.returncode}: {last[0][:300]}"}
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield what the command line asks for."""
    for suite in arguments.suite:
        for name in SUITES[suite]:
            if arguments.only and not any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only):
                continue
            for mode in arguments.mode:
                for dtype in arguments.dtype:
                    for threads in arguments.threads:
                        batches = ["list"] if mode == "training" else arguments.batch
                        yield from (Case(suite, name, mode, dtype, batch, threads) for batch in batches)


def _describe(case: Case, record: Mapping[str, Any]) -> str:
    def shown(door: str, found: Mapping[str, Any]) -> str:
        if not found["passed"]:
            return f"{door} FAILS ({found['message']})"
        return f"{door} right" if found["milliseconds"] is None else f"{door} {found['milliseconds']:.1f} ms"

    return f"{case} x{record['size']}: " + (
        record["reason"] or ", ".join(shown(*pair) for pair in record["doors"].items())
    )


def parsed_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="networks whose names match, as in a shell")
    parser.add_argument("--mode", nargs="+", default=["inference"], choices=["inference", "training"])
    parser.add_argument("--dtype", nargs="+", default=["f32"], choices=list(_TOLERANCES))
    parser.add_argument("--batch", nargs="+", default=["one"], choices=["one", "list"], help="of inference")
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=0, help="default: 7, or 3 where a run takes over a second")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(DOORS),
        choices=list(DOORS),
        help="to run each network (Inductor compiles for minutes)",
    )
    parser.add_argument("--untimed", action="store_true", help="only compare: for a machine that others use")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--limit", type=int, default=1800, help="seconds of a case (default: 1800)")
    parser.add_argument("--run-seconds", type=float, default=10.0, help="of a run; larger batches are halved")
    parser.add_argument("--memory", type=int, default=8000, help="MiB of a run in PyTorch; larger batches are halved")
    parser.add_argument("--results", type=Path, default=Path("reports") / "suites.jsonl", help="JSON lines")
    parser.add_argument("--table", action="store_true", help="write docs/coverage.md from the results, and do no more")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; return 1 where something of ours is wrong."""
    parsed = parsed_arguments(arguments)
    if parsed.one:
        print(json.dumps(measured(Case(**json.loads(parsed.one)), parsed)))
        return 0
    known = parsed.results.read_text(encoding="utf-8").splitlines() if parsed.results.exists() else []
    records = {Case(**record["case"]): record for record in map(json.loads, known)}
    if parsed.table:
        write_table(list(records.values()))
        return 0
    parsed.results.parent.mkdir(parents=True, exist_ok=True)
    end, bad = time.monotonic() + 60 * parsed.minutes, 0
    for case in cases(parsed):
        if case in records:
            continue
        if time.monotonic() > end:
            print("the time is over: start it again for the rest")
            break
        tell(str(case))
        record = {"case": asdict(case), **_apart(case, parsed)}
        with parsed.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        ours = [record["doors"][door] for door in OURS if door in record["doors"]]
        bad += not ours or not all(found["passed"] for found in ours)
        tell("")
        print(_describe(case, record), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
