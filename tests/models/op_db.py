"""PyTorch's operator database through ``fp.compile``: every operator's own samples, as a small model each.

With ``--dynamo`` they go through ``torch.compile(backend="fmtprop")``, where nothing may be refused.

``python -m tests.models.op_db`` runs the samples in child processes and lists what is refused, and why; ``--write``
puts the list into ``refused_ops.txt`` beside this file, with which a slow test compares. None may be wrong, and none
may take its process down. All samples of all operators take hours: with ``--results`` (``make operators``), outcomes
of an operator are kept when it is done, and the next run goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fmtprop as fp
from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.errors import FmtpropError

REFUSED = Path(__file__).with_name("refused_ops.txt")

#: a result may be off by so much of the largest magnitude
TOLERANCE = {
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
    torch.float64: 1e-9,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}

#: operators per child process, and the seconds that one sample may take
_PER_CHILD, _SAMPLE_SECONDS = 12, 120


#: computes the results of a model on inputs, by options
Door = Callable[["One", Sequence[torch.Tensor], Any], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: ``right``, ``wrong``, ``refused``, ``skipped`` (PyTorch's own) or ``crashed``."""

    op: str
    sample: int
    status: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.sample} {self.status} {self.text}".rstrip()


class One(nn.Module):
    """An operator whose tensors are inputs, and everything else is fixed.

    Inputs and results of a model are real, so complex tensors are pairs of real ones there.
    """

    def __init__(self, function: Any, arguments: Any) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten(arguments)

    def tensors(self) -> list[torch.Tensor]:
        return [_real(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [_like(next(given), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return pytree.tree_map_only(torch.Tensor, _real, self.function(*args, **kwargs))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() and _is_strided(tensor) else tensor


def _like(tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(tensor) if leaf.is_complex() and _is_strided(leaf) else tensor


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def operators(dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return the database's entries that have samples of a type on a CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    # what is left in memory may be anything
    return [info for info in op_db if dtype in info.supported_dtypes("cpu") and "empty" not in info.name]


def name_of(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def check(
    info: Any, most: int | None, special: str, door: Door, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[Outcome]:
    """Yield the outcome of an operator's samples, of some where there are more than `most`."""
    name = name_of(info)
    for index, sample in enumerate(islice(info.sample_inputs("cpu", dtype, requires_grad=False), most)):
        model = One(info.op, ((sample.input, *sample.args), sample.kwargs)).eval()
        yield Outcome(name, index, *outcome_of(model, special, door, options))


def check_errors(info: Any, most: int | None, door: Door, **options: Any) -> Iterator[Outcome]:
    """Yield the outcome of an operator's inputs that PyTorch refuses: they are refused by a door, too."""
    cases = list(info.error_inputs("cpu")) if info.error_inputs_func is not None else []
    for index, case in enumerate(cases[:most]):
        sample = case.sample_input
        model = One(info.op, ((sample.input, *sample.args), sample.kwargs)).eval()
        yield Outcome(name_of(info), index, *outcome_of_error(model, door, options))


def outcome_of_error(model: One, door: Door, options: Any) -> tuple[str, str]:
    inputs = model.tensors()
    try:
        with torch.no_grad():
            model(*(tensor.clone() for tensor in inputs))
    except Exception:
        try:
            door(model, inputs, options)
        except Exception:
            return "right", ""
        return "wrong", "raised nothing"
    return "skipped", "PyTorch itself raises nothing"


def outcome_of(model: One, special: str, door: Door, options: Any) -> tuple[str, str]:
    inputs = [poisoned(tensor, special) for tensor in model.tensors()]
    try:
        with torch.no_grad():
            expected = model(*(tensor.clone() for tensor in inputs))
            again = model(*(tensor.clone() for tensor in inputs))
    except Exception as error:
        return "skipped", f"PyTorch itself: {type(error).__name__}"
    leaves = pytree.tree_leaves(expected)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or not leaves:
        return "skipped", "its result is no tensor"
    if difference(again, expected, {}) is not None:
        return "skipped", "random"
    try:
        got = door(model, inputs, options)
    except FmtpropError as error:
        return "refused", reason(str(error))
    except Exception as error:
        return "wrong", f"raised {type(error).__name__}: {reason(str(error))}"
    wrong = difference(got, expected, TOLERANCE)
    return ("wrong", wrong) if wrong else ("right", "")


def by_export(model: One, inputs: Sequence[torch.Tensor], options: Any) -> Any:
    """Return what ``fp.compile`` computes."""
    return fp.compile(model, tuple(inputs), **options)(*inputs)


def by_backend(model: One, inputs: Sequence[torch.Tensor], options: Any) -> Any:
    """Return the results of plans of the captured graphs."""
    region.compare = lambda ours, theirs: (ours() is not None, (0.0, 1.0))
    return _captured(model, inputs, regions_by(options_of(None, options), lambda region: None))


def by_dynamo(model: One, inputs: Sequence[torch.Tensor], options: Any) -> Any:
    """Return the results of plans of the captured graphs; eager PyTorch's where PyTorch cannot capture them."""
    try:
        _captured(model, inputs, "aot_eager")
    except Exception:
        return model(*inputs)
    return by_backend(model, inputs, options)


def _captured(model: One, inputs: Sequence[torch.Tensor], backend: Any) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend=backend)(*(tensor.clone() for tensor in inputs))


def reason(text: str) -> str:
    """Return the first line of a refusal, without what differs between samples."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    line = re.sub(r"^\S+( in \S+)?: ", "", line)
    line = re.sub(r"^output \S+ is", "output … is", line)
    line = re.sub(r"\(.*?\)|'[^']*'|0x\w+", "…", line)
    return re.sub(r"-?\d+(\.\d+)?", "N", line)[:160]


def poisoned(tensor: torch.Tensor, special: str) -> torch.Tensor:
    """Return the tensor with some elements NaN or infinite."""
    if not special or tensor.layout is not torch.strided or not tensor.is_floating_point() or not tensor.numel():
        return tensor
    tensor = tensor.clone()
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    if special == "all":
        flat.fill_(-torch.inf)
    else:
        for place, value in enumerate({"nan": [torch.nan], "inf": [torch.inf, -torch.inf]}[special]):
            flat[place % flat.numel()] = value
    return flat.view(tensor.shape)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def difference(got: Any, expected: Any, tolerance: dict[torch.dtype, float]) -> str | None:
    """Return how results differ: number, type, shape, numbers, or where they are not finite."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for a, b in zip(map(dense, ours), map(dense, theirs), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if not b.numel():
            continue
        if not b.dtype.is_floating_point and not b.dtype.is_complex:
            if not torch.equal(a, b):
                return f"{int((a != b).sum())} of {b.numel()} elements differ ({b.dtype})"
            continue
        x, y = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
        x, y = x.double(), y.double()
        odd = ~torch.isfinite(y)
        same = (x == y) | (x.isnan() & y.isnan())
        if not same[odd].all():
            return f"{int((~same[odd]).sum())} of {int(odd.sum())} NaN and infinities are others"
        if odd.all():
            continue
        error = ((x - y)[~odd].abs().nan_to_num(torch.inf).max() / y[~odd].abs().max().clamp(min=1e-3)).item()
        if error > tolerance.get(b.dtype, 0.0 if not tolerance else 2e-4):
            return f"off by {error:.1e}"
    return None


# ---------------------------------------------------------------- child processes


def run(names: Sequence[str], arguments: Sequence[str]) -> Iterator[Outcome]:
    """Yield the outcomes of operators, run in child processes: one that dies is told of."""
    for start in range(0, len(names), _PER_CHILD):
        waiting = list(names[start : start + _PER_CHILD])
        while waiting:
            command = [sys.executable, "-m", "tests.models.op_db", "--child", *arguments, *waiting]
            reached = waiting[0]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
                for line in _lines(child):
                    if line.startswith("@"):
                        reached = line[1:]
                    elif line.startswith("#"):
                        name, sample, status, *text = line[1:].split(" ", 3)
                        yield Outcome(name, int(sample), status, " ".join(text))
            if child.returncode == 0:
                break
            yield Outcome(reached, -1, "crashed", f"exit code {child.returncode}")
            waiting = waiting[waiting.index(reached) + 1 :]


def _lines(child: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines of a child process, which is killed after a long silence: not while it imports the database."""
    assert child.stdout is not None
    line = child.stdout.readline()
    while line:
        yield line.rstrip("\n")
        limit = threading.Timer(_SAMPLE_SECONDS, child.kill)
        limit.start()
        line = child.stdout.readline()
        limit.cancel()


def resumed(names: Sequence[str], arguments: Sequence[str], results: Path, seconds: float) -> Iterator[Outcome]:
    """Yield the outcomes that a file has, then those of the other operators, until the time is over.

    An operator's outcomes are added to the file when all its samples are done.
    """
    known: set[str] = set()
    for line in results.read_text("utf-8").splitlines() if results.exists() else ():
        op, outcomes = json.loads(line)
        known.add(op)
        yield from (Outcome(*outcome) for outcome in outcomes)
    end = time.monotonic() + seconds
    results.parent.mkdir(parents=True, exist_ok=True)
    left = [name for name in names if name not in known]
    for op, found in groupby(run(left, arguments), attrgetter("op")):
        outcomes = list(found)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps([op, [astuple(outcome) for outcome in outcomes]]) + "\n")
        yield from outcomes
        if time.monotonic() > end:
            print(f"{len(left) - left.index(op) - 1} operators are left: the time is over")
            return


def listing(refused: Sequence[Outcome]) -> str:
    """Return which operators are refused, by reason; first the version of PyTorch, whose words they are."""
    reasons: dict[str, set[str]] = {}
    for outcome in refused:
        reasons.setdefault(outcome.text, set()).add(outcome.op)
    lines = [f"{why}\n    {' '.join(sorted(ops))}\n" for why, ops in sorted(reasons.items())]
    return "".join([f"PyTorch {torch.__version__.partition('+')[0]}\n", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--most", type=int, default=None, help="samples of each operator")
    parser.add_argument("--special", default="", choices=["", "nan", "inf", "all"])
    parser.add_argument("--exact", action="store_true", help="special_values='exact'")
    parser.add_argument("--dynamo", action="store_true", help="through torch.compile")
    parser.add_argument("--dtype", default="float32", help="PyTorch's name of the samples' type, such as int64")
    parser.add_argument("--errors", action="store_true", help="inputs that PyTorch refuses, instead of samples")
    parser.add_argument("--default", action="store_true", help="compile with default settings")
    parser.add_argument("--write", action="store_true", help=f"write {REFUSED.name}")
    parser.add_argument("--results", type=Path, help="keep outcomes in this file, and go on where it ends")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no operator after so many")
    options = parser.parse_args()
    if options.child:
        _child(options)
        return
    names = options.names or sorted({name_of(info) for info in operators(getattr(torch, options.dtype))})
    counts: Counter[str] = Counter()
    refused: list[Outcome] = []
    flags = [f"--most={options.most}"] if options.most else []
    flags += [f"--special={options.special}"] if options.special else []
    flags += [f"--dtype={options.dtype}"]
    flags += [f"--{flag}" for flag in ("exact", "default", "dynamo", "errors") if getattr(options, flag)]
    seconds = 60 * options.minutes
    outcomes = resumed(names, flags, options.results, seconds) if options.results else run(names, flags)
    for outcome in outcomes:
        counts[outcome.status] += 1
        if outcome.status == "refused":
            refused.append(outcome)
        if outcome.status in ("wrong", "crashed"):
            print(outcome, flush=True)
    print(dict(counts))
    text = listing(refused)
    print(text)
    if options.write:
        REFUSED.write_text(text, encoding="utf-8")


def _child(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    dtype = getattr(torch, options.dtype)
    known = {name_of(info): info for info in operators(dtype)}
    door = by_dynamo if options.dynamo else by_export
    how: dict[str, Any] = {} if options.default else {"tune": "model", "confirm": False}
    if options.exact:
        how["special_values"] = "exact"
    for name in options.names:
        print(f"@{name}", flush=True)
        if options.errors:
            outcomes = check_errors(known[name], options.most, by_backend if options.dynamo else door, **how)
        else:
            outcomes = check(known[name], options.most, options.special, door, dtype, **how)
        for outcome in outcomes:
            print(f"#{outcome}", flush=True)


if __name__ == "__main__":
    main()
