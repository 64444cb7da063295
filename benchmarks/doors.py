"""Try architectures of transformers by both doors: ``fp.compile`` and ``torch.compile(backend="fmtprop")``.

Several run in one process, with seeded weights. Results are compared with eager PyTorch, in f32 and bf16, and
for other numbers of tokens. ``--table`` writes docs/doors.md of the results.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fmtprop as fp
from benchmarks.sweep_models import NETWORKS
from benchmarks.sweep_network import in_f64, settle
from benchmarks.sweep_transformers import TRANSFORMERS
from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.errors import FmtpropError, ImportModelError
from fmtprop.runtime.agreement import relative_error

__all__ = ["Row", "main", "table", "tried"]

#: largest error relative to the largest number of a result
TOLERANCES = {"f32": 1e-4, "bf16": 5e-2}

#: PyTorch's own f32, and its own bf16 (the module converted; if it cannot be, autocast)
EAGER, PYTORCH = "PyTorch f32", "PyTorch bf16"

#: how many times as far as PyTorch an unstable model may be from f64
_TIMES = 2.0

#: numbers of tokens of the calls with other shapes
LENGTHS = (1, 7, 64, 512)

#: how plans are made: costs of the model, since other programs share the machine
OPTIONS = {"tune": "model", "confirm": False}

#: errors that say which rule of fmtprop or of PyTorch's capture a model breaks
_REFUSALS = ("ImportModelError: ", "InputError: ", "TorchRuntimeError: ", "UnsupportedOpError: ")

#: share of a run that is native at least, else PyTorch's operators of at least so much are named
_NATIVE, _NAMED = 0.95, 0.01

#: architectures of a process: importing takes longer than a small one
_PER_PROCESS = 8

_DOCS = Path(__file__).parent.parent / "docs" / "doors.md"
_MARK = "<!-- written by `python -m benchmarks.doors --table` -->"


@dataclass
class Row:
    """What one architecture gave: an error, or the reason why there is none, by door and data type.

    Errors are differences from eager PyTorch in f32; those in `exact` are differences from f64.
    """

    name: str
    errors: dict[str, float | str] = field(default_factory=dict)
    exact: dict[str, float] = field(default_factory=dict)
    graphs: int = 0
    breaks: int = 0
    plans: int = 0
    native: float | None = None
    reorders: int | None = None
    seconds: float = 0.0
    hosted: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """``"right"`` if all is within its tolerance, ``"refused"`` if some calls are refused, or ``"wrong"``."""
        refused = False
        for way, error in self.errors.items():
            if isinstance(error, str):
                refused = refused or way != PYTORCH
                if not any(kind in error for kind in _REFUSALS):
                    return "wrong"
            elif self.is_too_large(way) and not self.is_unstable(way):
                return "wrong"
        return "refused" if refused else "right"

    def is_too_large(self, way: str) -> bool:
        """Return whether an error of ours exceeds the tolerance of its data type."""
        error = self.errors[way]
        return isinstance(error, float) and way != PYTORCH and not error <= TOLERANCES[_dtype(way)]

    def is_unstable(self, way: str) -> bool:
        """Return whether PyTorch's own distance from f64 explains ours.

        Where f32 is too far from f64, bf16 has no meaning at all: it rounds 65 536 times as coarsely.
        """
        if way not in self.exact:
            return False
        if _dtype(way) == "bf16" and self.exact[EAGER] > TOLERANCES["f32"]:
            return True
        own = self.exact.get(PYTORCH if _dtype(way) == "bf16" else EAGER, 0.0)
        return self.exact[way] <= _TIMES * own


def tried(name: str, *, lengths: Sequence[int] = LENGTHS, dtypes: Sequence[str] = ("f32", "bf16")) -> Row:
    """Compile an architecture by both doors, and compare."""
    row, start = Row(name), time.perf_counter()
    module, args, kwargs = NETWORKS[name]()
    settle(module, args, kwargs)
    with torch.no_grad():
        expected = _tensors(module(*args, **kwargs))
        right = in_f64(module, args, kwargs)
        exact = expected if right is None else right

        def note(way: str, run: Callable[[], list[torch.Tensor]]) -> None:
            results: list[torch.Tensor] = []
            row.errors[way] = _error(lambda: results.extend(run()) or results, expected)
            if isinstance(row.errors[way], float):
                row.exact[way] = _largest(results, exact)

        row.exact[EAGER] = _largest(expected, exact)
        if "bf16" in dtypes:
            note(PYTORCH, lambda: _in_bf16(module, args, kwargs))
        for dtype in dtypes:
            net: list[fp.CompiledModel] = []

            def export(dtype: str = dtype, net: list[fp.CompiledModel] = net) -> list[torch.Tensor]:
                net.append(fp.compile(module, args, dtype, kwargs=kwargs, **OPTIONS))
                return _tensors(net[0](*args, **kwargs))

            note(f"fp.compile {dtype}", export)
            if net and row.native is None:
                row.hosted, row.reorders = _hosted(net[0]), len(net[0].plan.reorders)
                row.native = 1 - sum(row.hosted.values())
            regions: list[Any] = []
            run = _through_dynamo(module, regions, dtype=dtype)
            note(f"torch.compile {dtype}", lambda run=run: _tensors(run(*args, **kwargs)))
            if row.graphs:
                continue
            row.graphs, row.breaks = _counted()
            row.plans = sum(outcome.net is not None for one in regions for outcome in one.outcomes)
        calls = {length: _with_length(module, kwargs, length) for length in lengths if not args}
        if calls := {length: call for length, call in calls.items() if call is not None}:
            row.errors["torch.compile lengths"] = _dynamic(_through_dynamo(module, [], dynamic=True), module, calls)
            row.errors["fp.compile lengths"] = _exported(module, kwargs, calls)
    row.seconds = time.perf_counter() - start
    return row


def _in_bf16(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    def converted(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    given = {name: converted(value) for name, value in kwargs.items()}
    try:
        return _tensors(copy.deepcopy(module).bfloat16()(*map(converted, args), **given))
    except (RuntimeError, TypeError):  # an operator without bf16, or a table that stays f32
        pass
    try:
        with torch.autocast("cpu", torch.bfloat16):
            return _tensors(module(*args, **kwargs))
    except (RuntimeError, TypeError) as error:
        raise ImportModelError(f"PyTorch: {error}") from error


def _through_dynamo(module: nn.Module, regions: list[Any], *, dynamic: bool | None = None, dtype: str = "f32") -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    region.compare = lambda ours, theirs: (ours() is not None, (0.0, 1.0))  # plans are kept: they are to be compared
    backend = regions_by(options_of(None, {**OPTIONS, "dtype": dtype}), regions.append)
    return torch.compile(module, backend=backend, dynamic=dynamic)


def _counted() -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _exported(module: nn.Module, kwargs: Mapping[str, Any], calls: Mapping[int, Mapping[str, Any]]) -> float | str:
    """Compile once with a dynamic number of tokens, from 2 on: a size of 1 is always fixed by torch.export."""
    calls = {length: call for length, call in calls.items() if length > 1}
    shapes = {name: {1: torch.export.Dim.AUTO} for name in kwargs}
    try:
        net = fp.compile(module, (), kwargs=kwargs, dynamic_shapes=shapes, max_shapes=len(calls) + 1, **OPTIONS)
    except FmtpropError as error:
        return _line(error)
    return _dynamic(net, module, calls)


def _dynamic(run: Callable[..., Any], module: nn.Module, calls: Mapping[int, Mapping[str, Any]]) -> float | str:
    largest = 0.0
    for length, call in calls.items():
        error = _error(lambda call=call: _tensors(run(**call)), _tensors(module(**call)))
        if isinstance(error, str):
            return f"{length} tokens: {error}"
        largest = max(largest, error)
    return largest


def _with_length(module: nn.Module, kwargs: Mapping[str, Any], length: int) -> dict[str, torch.Tensor] | None:
    """Return a call with another number of tokens; None where the model takes none, or not so many."""
    names = {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}
    if not set(kwargs) <= names or "input_ids" not in kwargs:
        return None
    repeats = -(-length // kwargs["input_ids"].shape[1])
    call = {name: torch.cat([value] * repeats, 1)[:, :length].contiguous() for name, value in kwargs.items()}
    try:
        module(**call)
    except (IndexError, RuntimeError, ValueError):
        return None
    return call


def _hosted(net: fp.CompiledModel) -> dict[str, float]:
    """Return the share of the run of each of PyTorch's operators."""
    seconds, shares = net.profile(repeats=3), Counter[str]()
    for t, step in zip(seconds, net.plan.steps, strict=True):
        if step.target == "reference":
            shares[str(getattr(step.node.attrs, "target", step.node.op)).removeprefix("aten.")] += t / sum(seconds)
    return dict(shares.most_common())


def _tensors(result: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _error(run: Callable[[], list[torch.Tensor]], expected: Sequence[torch.Tensor]) -> float | str:
    try:
        got = run()
    except (FmtpropError, torch._dynamo.exc.TorchDynamoException) as error:
        return _line(error)
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    return _largest(got, expected)


def _largest(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True) if b.numel()]
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def _dtype(way: str) -> str:
    return "bf16" if "bf16" in way else "f32"


def _line(error: object) -> str:
    text = re.sub(r"/\S*/site-packages/", "", str(error).strip().splitlines()[0])  # no paths of a machine
    return f"{type(error).__name__}: {text[:160]}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    verdicts = Counter(row.verdict for row in rows)
    ways = ["fp.compile f32", "torch.compile f32", "fp.compile bf16", "torch.compile bf16", PYTORCH]
    ways += ["fp.compile lengths", "torch.compile lengths"]
    head = [*ways, "graphs", "breaks", "plans", "native", "reorders", "in PyTorch"]
    lines = [
        f"{verdicts['right']} of {len(rows)} architectures are right in all comparisons. {verdicts['refused']} others "
        f"are right where they are not refused; {verdicts['wrong']} exceed a tolerance.",
        "",
    ]
    lines += [f"| architecture | {' | '.join(head)} |", f"| --- |{' --: |' * len(head)}"]
    for row in sorted(rows, key=lambda row: row.name):
        cells = [_cell(row.errors.get(way)) for way in ways]
        native = "" if row.native is None else f"{row.native:.0%}"
        cells += [str(row.graphs), str(row.breaks), str(row.plans), native]
        cells.append("" if row.reorders is None else str(row.reorders))
        cells.append(_reason(row))
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    unstable = [(row, way) for row in rows for way in row.errors if row.is_too_large(way) and row.is_unstable(way)]
    if unstable:
        lines += [
            "",
            "| unstable | way | distance from f64 | PyTorch's in f32 | in bf16 |",
            "| --- | --- | --: | --: | --: |",
        ]
        lines += [f"| `{row.name}` | {way} | {_cells(row.exact, way, EAGER, PYTORCH)} |" for row, way in unstable]
    reasons = [(row.name, way, e) for row in rows for way, e in row.errors.items() if isinstance(e, str)]
    if reasons:
        lines += ["", "| not compared | way | reason |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {way} | {reason.replace('|', '/')} |" for name, way, reason in reasons]
    return "\n".join(lines) + "\n"


def _reason(row: Row) -> str:
    """Return PyTorch's operators that take most of a run of which more than 5 % is theirs."""
    if row.native is None or row.native >= _NATIVE:
        return ""
    return ", ".join(f"{name} {share:.0%}" for name, share in list(row.hosted.items())[:3] if share >= _NAMED)


def _cells(errors: Mapping[str, float], *ways: str) -> str:
    return " | ".join(_cell(errors.get(way)) for way in ways)


def _cell(error: float | str | None) -> str:
    return "" if error is None else f"{error:.0e}" if isinstance(error, float) else "—"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try architectures, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doors", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--results", type=Path, default=Path("reports/doors.jsonl"), help="goes on where it ends")
    parser.add_argument("--limit", type=int, default=600, help="seconds of an architecture")
    parser.add_argument("--here", nargs="+", metavar="NAME", help="try these in this process")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help=f"write docs/{_DOCS.name} and do no more")
    given = parser.parse_args(arguments)
    if given.table:
        head = _DOCS.read_text(encoding="utf-8").partition(_MARK)[0]
        rows = [row for path in given.table for row in _read(path)]
        _DOCS.write_text(f"{head}{_MARK}\n\n{table(rows)}", encoding="utf-8")
        return 0
    given.results.parent.mkdir(parents=True, exist_ok=True)
    if given.here:
        for name in given.here:
            _write(tried(name), given.results)
        return 0
    names = [name for name in TRANSFORMERS if any(fnmatch(name, pattern) for pattern in given.only)]
    while left := _left(names, given.results):
        group = left[:_PER_PROCESS]
        command = [sys.executable, "-m", "benchmarks.doors", "--results", str(given.results), "--here", *group]
        try:
            ended = subprocess.run(
                command, stderr=subprocess.PIPE, text=True, timeout=given.limit * len(group), check=False
            )
            failure = {"crash": ended.stderr[-200:]}
        except subprocess.TimeoutExpired:
            failure = {"time": f"more than {given.limit} s"}
        for name in _left(group, given.results)[:1]:  # the process ended in this one
            _write(Row(name, failure), given.results)
    return 0


def _left(names: Sequence[str], results: Path) -> list[str]:
    done = {row.name for row in _read(results)}
    return [name for name in names if name not in done]


def _read(results: Path) -> list[Row]:
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def _write(row: Row, results: Path) -> None:
    line = json.dumps(asdict(row))
    with results.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    print(line[:300], flush=True)


if __name__ == "__main__":
    sys.exit(main())
