"""PyTorch's lists: their networks, the rule by which a result is right, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import suites, suites_table
from benchmarks.suite_models import SUITES
from benchmarks.suites import Case, judge
from fmtprop.bench.compare import Agreement
from fmtprop.bench.processes import Prepared
from fmtprop.errors import FmtpropError


def test_the_lists_are_whole():
    assert {suite: len(networks) for suite, networks in SUITES.items()} == {
        "timm": 54, "huggingface": 28, "torchbench": 29,
    }  # fmt: skip
    assert SUITES["torchbench"]["dlrm"][0] == 2048


@pytest.mark.parametrize("name", ["phlippe_resnet", "lennard_jones", "dlrm"])
def test_a_network_is_right_by_both_doors(name: str):
    case = Case("torchbench", name, threads=torch.get_num_threads())
    made = case.made(2)
    expected = suites.DOORS["eager"](made, case)()
    for door in suites.OURS:
        agreement = judge(suites.DOORS[door](made, case)(), expected, None, "f32")
        assert agreement.passed, agreement.message
    torch._dynamo.reset()


def test_right_is_close_to_eager_or_as_far_from_f64_as_eager():
    right = torch.linspace(1, 2, 2000, dtype=torch.float64)
    eager = (right + 1e-2).float()
    assert judge(eager - 2e-2, eager, [right], "f32").passed
    assert not judge(eager + 2e-2, eager, [right], "f32").passed
    assert "from f64" in judge(eager + 2e-2, eager, [right], "f32").message
    assert judge(eager + 2e-2, eager, [right], "bf16").passed
    assert not judge(eager[1:], eager, [right], "f32").passed
    assert not judge(eager * float("nan"), eager, [right], "f32").passed


def test_without_timing_a_case_says_whether_each_door_is_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suites, "call_in_process", lambda name, function: function())
    right = Agreement(True, 1e-6, 1e-4)
    assert suites._judged("fp.compile", lambda: Prepared(list, right)) == {
        "passed": True, "error": 1e-6, "message": "", "milliseconds": None,
    }  # fmt: skip
    wrong = Agreement(False, 0.1, 1e-4, "result 0 is 1.0e-01 from f64")
    assert suites._judged("fp.compile", lambda: Prepared(list, wrong))["message"] == wrong.message

    def refuse() -> Prepared:
        raise FmtpropError("fp.compile: no such op")

    refused = suites._judged("fp.compile", refuse)
    assert (refused["passed"], refused["message"]) == (False, "fp.compile: no such op")


def row(name: str, times: dict[str, float | None], reason: str = "") -> dict:
    doors = {
        door: {
            "passed": time is not None, "error": 0.0, "message": "" if time else "off", "milliseconds": time,
            "compile_seconds": 2.0, "run_seconds": 0.1, "peak_nbytes": 100 if door == "eager" else 150,
        }
        for door, time in times.items()
    }  # fmt: skip
    case = {"suite": "timm", "name": name, "mode": "inference", "dtype": "f32", "batch": "one", "threads": 2}
    return {"case": case, "size": 1, "doors": doors, "where": "a machine", "reason": reason}


def test_table(tmp_path: Path):
    fast = row("fast", {"torch.compile": 1.0, "fp.compile": 1.0, "eager": 4.0, "channels-last": 2.0, "inductor": 2.0})
    slow = row("slow", {"torch.compile": 8.0, "fp.compile": None, "eager": 4.0, "channels-last": 5.0, "inductor": 4.0})
    text = suites_table.render([fast, slow, row("ended", {}, "not done after 5 s")])
    summary = next(line for line in text.splitlines() if line.startswith("| timm"))
    cells = [cell.strip() for cell in summary.strip("|").split("|")]
    assert cells == [
        "timm",
        "inference",
        "f32",
        "one",
        "2",
        "3",
        "2 of 3",
        "1 of 3",
        "1.00",
        "1.00",
        "1",
        "2.0",
        "1.50",
    ]
    assert "| `ended`, inference, f32, 1, 2 threads | not done after 5 s |" in text
    assert "| `slow`, inference, f32, 1, 2 threads | `fp.compile`: off |" in text
    untimed = row("untimed", {"torch.compile": None, "fp.compile": None})
    assert suites_table.render([fast, untimed]).count("`untimed`") == 2  # what fails, and no row of times
    document = tmp_path / "coverage.md"
    document.write_text(f"a\n{suites_table.BEGIN}\nold\n{suites_table.END}\nb")
    suites_table.write_table([fast], document)
    assert "old" not in document.read_text() and document.read_text().endswith("\nb")
    document.write_text("a")
    with pytest.raises(FmtpropError, match="must have the lines"):
        suites_table.write_table([fast], document)
