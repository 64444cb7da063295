"""PyTorch's own tests of TorchDynamo with fmtprop in the place of the backends that they use.

They are a part of PyTorch's repository, not of its wheel. ``python -m tests.models.dynamo_tests FOLDER`` runs the files
of ``test/dynamo`` twice: with ``aot_eager``, PyTorch's own backend that runs functional graphs, and with fmtprop. It
lists the tests that pass with ``aot_eager`` alone. A test that fails with both is about another version of PyTorch, or
about something that a backend does not decide.

This module is also the plugin of pytest that replaces the backends of one process, and writes the outcomes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("aot_eager", "fmtprop")

#: regions and steps that the test has made
_MADE: list[Any] = []


@dataclass(frozen=True)
class Outcome:
    """One test: ``passed``, ``failed``, ``skipped`` or ``crashed``, and the number of its plans that ran."""

    test: str
    status: str
    plans: int = 0
    message: str = ""


# ---------------------------------------------------------------- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--instead", choices=BACKENDS, required=True, help="the backend in the place of all others")
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--instead")
    replace_backends(_fmtprop() if name == "fmtprop" else _aot_eager())


def replace_backends(instead: Callable[..., Any]) -> None:
    """Let PyTorch's stand-in backends count and record graphs as before, and run the graphs by another backend."""
    from torch._dynamo import testing
    from torch._dynamo.backends import registry

    registry.list_backends()  # which loads all
    for name in ("eager", "aot_eager"):
        registry._COMPILER_FNS[name] = instead
    for recorder in (testing.CompileCounter, testing.EagerAndRecordGraphs):
        recorder.__call__ = _behind(recorder.__call__, instead)


def _behind(record: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, module: Any, example_inputs: Any) -> Any:
        record(self, module, example_inputs)
        return instead(module, example_inputs)

    return call


def _aot_eager() -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend("aot_eager")


def _fmtprop() -> Callable[..., Any]:
    from importlib import import_module

    from fmtprop.dynamo.backend import options_of, regions_by

    def always(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[bool, tuple[float, float]]:
        ours()
        return True, (1.0, 2.0)

    for owner in ("region", "backend"):
        import_module(f"fmtprop.dynamo.{owner}").compare = always
    made = regions_by(options_of(None, {"tune": "model", "confirm": False}), _MADE.append)
    return lambda module, example_inputs, **others: made(module, example_inputs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _MADE.clear()
    _write(item.config, Outcome(item.nodeid, "crashed"))  # until it ends
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        message = str(call.excinfo.value) if call.excinfo is not None and report.failed else ""
        _write(item.config, Outcome(item.nodeid, report.outcome, _plans(), message[-1000:]))
    return report


def _plans() -> int:
    ours = [outcome.net for one in _MADE for outcome in getattr(one, "outcomes", [one]) if hasattr(outcome, "net")]
    return sum(net is not None for net in ours)


def _write(config: pytest.Config, outcome: Outcome) -> None:
    with config.getoption("--outcomes").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


# ---------------------------------------------------------------- the comparison


def outcomes_of(file: Path, backend: str, results: Path, seconds: int) -> dict[str, Outcome]:
    """Run the tests of a file with a backend; those behind a test that ends the process run in another one."""
    plugin = [
        "-m",
        "pytest",
        "-p",
        "tests.models.dynamo_tests",
        "-q",
        "-n0",
        "-c",
        "/dev/null",
        f"--rootdir={file.parent}",
    ]
    known = _read(results)
    while True:
        begun = len(known)
        done = [f"--deselect={test}" for test in known]
        command = [sys.executable, *plugin, f"--instead={backend}", f"--outcomes={results}", str(file), *done]
        try:
            ended = subprocess.run(command, timeout=seconds, check=False, capture_output=True).returncode
        except subprocess.TimeoutExpired:
            ended = -1
        known = _read(results)
        if ended in (0, 1, 5) or len(known) == begun:
            return known


def _read(results: Path) -> dict[str, Outcome]:
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {one.test: one for one in (Outcome(**json.loads(line)) for line in lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run files, and print what each backend passes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, help="test/dynamo of PyTorch's repository")
    parser.add_argument("names", nargs="*", help="files, by default all")
    parser.add_argument("--results", type=Path, default=Path("reports/dynamo_tests"), help="kept, so that it goes on")
    parser.add_argument("--limit", type=int, default=900, help="seconds of a file")
    given = parser.parse_args(arguments)
    given.results.mkdir(parents=True, exist_ok=True)
    names = given.names or sorted(path.name for path in given.folder.glob("test_*.py"))
    print("| file | tests | pass with aot_eager | of them with fmtprop | by plans |\n| --- | --: | --: | --: | --: |")
    total, differing = Counter[str](), list[Outcome]()
    for name in names:
        file = (given.folder / name).resolve()
        theirs, ours = (
            outcomes_of(file, backend, (given.results / f"{file.stem}-{backend}.jsonl").resolve(), given.limit)
            for backend in BACKENDS
        )
        passed = [test for test, one in theirs.items() if one.status == "passed"]
        both = [ours[test] for test in passed if test in ours and ours[test].status == "passed"]
        counts = {
            "tests": len(theirs), "theirs": len(passed), "ours": len(both), "plans": sum(one.plans > 0 for one in both)
        }  # fmt: skip
        total.update(counts)
        print(f"| `{name}` | {' | '.join(map(str, counts.values()))} |", flush=True)
        differing += [ours.get(test, Outcome(test, "not run")) for test in passed if ours.get(test) not in both]
    print(f"| all | {' | '.join(map(str, total.values()))} |\n")
    for one in differing:
        print(f"{one.status} {one.test}: {' '.join(one.message.split())[:300]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
