"""Compare ONNX files with ONNX Runtime: the models of :mod:`benchmarks.onnx_sources`, or any folder of files.

Each file is loaded and run in a process of its own, by ``fmtprop.onnx.InferenceSession`` and by ONNX Runtime. Inputs
are in ``NAME.npz``; without that file they are drawn at random, with 2 for each dynamic axis. ``--table`` writes
docs/onnx_models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch  # noqa: F401 (imported once, before processes are forked)

import fmtprop as fp
from fmtprop.errors import FmtpropError

__all__ = ["Row", "compared", "main", "table"]

#: largest error relative to the largest number of a result, by the type that the model computes in
TOLERANCES = {"float": 1e-4, "quantised": 2e-2, "float16": 1e-2, "bfloat16": 5e-2}

#: how plans are made: costs of the model, since other programs share the machine
OPTIONS = {"tune": "model", "confirm": False}

_DOCS = Path(__file__).parent.parent / "docs" / "onnx_models.md"
_MARK = "<!-- written by `python -m benchmarks.onnx_files --table` -->"


@dataclass
class Row:
    """What one file gave."""

    name: str
    producer: str = ""
    opset: int = 0
    nodes: int = 0
    dtype: str = "float"
    calls: int = 0
    error: float | None = None
    #: why it has no plan, or was not compared
    reason: str | None = None
    failure: str | None = None
    native: float | None = None
    reference: int = 0

    @property
    def is_right(self) -> bool:
        """Whether it was compared and is within its tolerance."""
        return self.failure is None and self.error is not None and self.error <= TOLERANCES[self.dtype]


def compared(path: Path) -> Row:
    """Run a file by fmtprop and by ONNX Runtime.

    `path`: the model; the inputs of its calls are in the ``.npz`` file of the same name, if there is one.
    """
    row = Row(path.stem)
    try:
        session = fp.onnx.InferenceSession(path, **OPTIONS)
        calls = _calls(path, session)
        results = [session.run(None, feed) for feed in calls]
    except FmtpropError as error:
        row.failure = _line(error)
        return row
    model = onnx.load(path, load_external_data=False)
    row.producer = f"{model.producer_name} {model.producer_version}".strip()
    row.opset, row.nodes, row.dtype = _opset(model), _count(model.graph), _dtype(model)
    row.calls, row.reason = len(calls), session.reason and _line(session.reason)
    row.reference = len(set(session.reference_nodes))
    if session.plans:
        row.native = _native_share(next(iter(session.plans.values())))
    try:
        wanted = expected_of(path, calls, row.dtype)
    except Exception as error:
        row.failure = f"the other runtime: {_line(error)}"
        return row
    row.error = max(
        (error_of(a, b) for got, want in zip(results, wanted, strict=True) for a, b in zip(got, want, strict=True))
    )
    return row


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _count(graph: onnx.GraphProto) -> int:
    inner = [
        graph_ for node in graph.node for attribute in node.attribute for graph_ in (attribute.g, *attribute.graphs)
    ]
    return len(graph.node) + sum(map(_count, inner))


def _dtype(model: onnx.ModelProto) -> str:
    used = {tensor.data_type for tensor in model.graph.initializer}
    named = ((onnx.TensorProto.BFLOAT16, "bfloat16"), (onnx.TensorProto.FLOAT16, "float16"))
    floats = next((name for number, name in named if number in used), "float")
    return "quantised" if any("Quantize" in n.op_type or "QLinear" in n.op_type for n in model.graph.node) else floats


def _calls(path: Path, session: Any) -> list[dict[str, Any]]:
    """Return the inputs of each call."""
    stored = path.with_suffix(".npz")
    if stored.exists():
        archive = np.load(stored, allow_pickle=True)  # texts; the file is our own
        calls: dict[str, dict[str, Any]] = {}
        for key in archive.files:
            index, _, name = key.partition("/")
            calls.setdefault(index, {})[name] = archive[key]
        return list(calls.values())
    draw = np.random.default_rng(0)
    return [{arg.name: _drawn(arg, draw) for arg in session.get_inputs()}]


def _drawn(arg: Any, draw: np.random.Generator) -> Any:
    dims = [dim if isinstance(dim, int) else 2 for dim in arg.shape]
    kind = arg.type.removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))
    numbers = draw.standard_normal(dims) if dtype.kind == "f" else draw.integers(0, 2, dims)
    return np.asarray(numbers).astype(dtype)


def expected_of(path: Path, calls: Sequence[Mapping[str, Any]], dtype: str) -> list[list[Any]]:
    """Return ONNX Runtime's results; of bf16 models, for which it has no kernels, those of ONNX's reference."""
    if dtype == "bfloat16":
        evaluator = onnx.reference.ReferenceEvaluator(onnx.load(path))
        return [evaluator.run(None, dict(feed)) for feed in calls]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # its optimiser rounds quantised numbers elsewhere
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    theirs = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [theirs.run(None, dict(feed)) for feed in calls]


def _native_share(net: fp.CompiledModel) -> float:
    seconds = net.profile(repeats=3)
    hosted = sum(t for t, step in zip(seconds, net.plan.steps, strict=True) if step.target == "reference")
    return 1 - hosted / max(sum(seconds), 1e-12)


def error_of(got: Any, want: Any) -> float:
    """Return the largest difference, relative to the largest number; infinite if the results cannot be compared."""
    if isinstance(want, list | dict):
        if type(got) is not type(want) or len(got) != len(want):
            return float("inf")
        pairs = zip(got, want, strict=True) if isinstance(want, list) else ((got.get(key), want[key]) for key in want)
        return max((error_of(a, b) for a, b in pairs), default=0.0)
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape:
        return float("inf")
    if b.dtype.kind in "OUSb":
        return 0.0 if (a == b).all() else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities too
    if same.all():
        return 0.0
    finite = np.isfinite(b)
    largest = max(float(np.abs(b[finite]).max(initial=0)), 1e-30)
    error = float(np.abs(a - b)[~same].max()) / largest
    return error if error == error else float("inf")  # NaN would be no maximum


def _line(error: object) -> str:
    text = str(error).strip().splitlines()[0]
    return re.sub(r"/\S*/(?=[^/\s]+\.onnx)", "", text)[:200]  # no paths of a machine


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    right = sum(row.is_right for row in rows)
    plans = sum(row.is_right and row.reason is None for row in rows)
    lines = [f"{right} of {len(rows)} files are right, {plans} of them as plans.", ""]
    lines += [
        "| file | producer | opset | nodes | calls | error | runs as | native |",
        "| --- | --- | --: | --: | --: | --: | --- | --: |",
    ]
    for row in sorted(rows, key=lambda row: row.name):
        error = "—" if row.error is None else f"{row.error:.0e}"
        planned = "plan" if row.reason is None else "plan, then nodes" if row.native is not None else "nodes"
        way = "—" if row.failure else planned
        way += f", {row.reference} by ONNX's reference" if row.reference else ""
        native = "" if row.native is None else f"{row.native:.0%}"
        cells = [f"`{row.name}`", row.producer, str(row.opset), str(row.nodes), str(row.calls), error, way, native]
        lines.append(f"| {' | '.join(cells)} |")
    for title, reasons in (
        ("no plan, or not for all nodes", [(row.name, row.reason) for row in rows if row.reason and not row.failure]),
        ("not compared", [(row.name, row.failure) for row in rows if row.failure]),
    ):
        if reasons:
            lines += ["", f"| {title} | reason |", "| --- | --- |"]
            lines += [f"| `{name}` | {str(reason).replace('|', '/')} |" for name, reason in sorted(reasons)]
    return "\n".join(lines) + "\n"


def _in_process(path: Path, limit: float) -> Row:
    """Compare a file in a forked process: what is imported stays, and a crash ends that process only."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(compared(path)))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit) else Row(path.stem, failure=f"more than {limit} s")
    except EOFError:
        child.join()
        return Row(path.stem, failure=f"the process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare files, one process each, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_files", description=str(__doc__).splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="models, or folders of models")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--results", type=Path, default=Path("reports/onnx_files.jsonl"))
    parser.add_argument("--limit", type=int, default=600, help="seconds of a file")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help=f"write docs/{_DOCS.name} and do no more")
    given = parser.parse_args(arguments)
    if given.table:
        found = {
            row.name: row
            for path in given.table
            for row in (Row(**json.loads(t)) for t in path.read_text().splitlines())
        }
        head = _DOCS.read_text(encoding="utf-8").partition(_MARK)[0]
        _DOCS.write_text(f"{head}{_MARK}\n\n{table(list(found.values()))}", encoding="utf-8")
        return 0
    given.results.parent.mkdir(parents=True, exist_ok=True)
    paths = [path for file in given.files for path in (sorted(file.glob("*.onnx")) if file.is_dir() else [file])]
    for path in (path for path in paths if any(fnmatch(path.stem, pattern) for pattern in given.only)):
        line = json.dumps(asdict(_in_process(path, given.limit)))
        with given.results.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line[:400], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
