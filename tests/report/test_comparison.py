from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fmtprop.report import Comparison, ReorderRow, Report, StepRow

MACHINE = {"cpu": "a CPU", "isa": "avx2", "threads": "2", "onednn": "3.2.0", "torch": "2.13", "python": "3.11"}


def report(policy: str, reorders: int = 0, precision: str = "f32", seconds: float = 1e-3) -> Report:
    rows = tuple(
        ReorderRow(f"reorder_{i}", "f32:abcd", "f32:acdb", (1, 8, 4, 4), 1024, 1e-6 * (i + 1), 0.0, "a reason", "")
        for i in range(reorders)
    )
    steps = (StepRow("conv_1", "convolution", "jit:avx2", "onednn", "f32:abcd -> f32:acdb", 5e-4, "asked", "stem"),)
    memory = {"constants": 2048, "arena": 4096, "peak": 4096}
    return Report("net", policy, precision, MACHINE, seconds, {"plan": 0.5}, steps, rows, (), memory)


def test_failures_say_policy_error_and_tolerance():
    comparison = Comparison.of(
        [report("plain"), report("naive"), report("propagate", precision="bf16")], [1e-4, 2e-4, 1e-2]
    )
    assert comparison.failures == (
        "policy naive: outputs are off by 2.0e-04 relative to PyTorch (tolerance 1e-04 in f32)",
    )


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_what_cannot_be_compared_has_failed(error):
    comparison = Comparison.of([report("plain")], [error])
    assert len(comparison.failures) == 1
    assert json.loads(comparison.to_json())["policies"][0]["error"] is None


def test_verdict_is_in_both_texts():
    good = Comparison.of([report("plain")], [1e-6])
    bad = Comparison.of([report("plain")], [1.0])
    for text in (good.summary(), good.to_text()):
        assert "check against PyTorch: passed under each policy" in text
    for text in (bad.summary(), bad.to_text()):
        assert "check against PyTorch FAILED: policy plain: outputs are off by 1.0e+00" in text


def test_summary_has_the_costliest_reorders_and_the_report_all():
    comparison = Comparison.of([report("plain"), report("naive", reorders=7)], [0.0, 0.0])
    summary, whole = comparison.summary(), comparison.to_text()
    assert "policy naive: the 5 costliest of 7 reorders of every run" in summary
    assert [f"reorder_{i} " in summary for i in range(7)] == [False, False, True, True, True, True, True]
    assert all(f"reorder_{i} " in whole for i in range(7))
    assert "policy plain: reorders" not in summary, "there are none"


def test_ratios_are_to_the_first():
    text = Comparison.of([report("plain", seconds=2e-3), report("propagate", seconds=1e-3)], [0.0, 0.0]).summary()
    rows = [line.split("│") for line in text.splitlines() if line.startswith(("│ plain", "│ propagate"))]
    assert [row[3].strip() for row in rows] == ["1.00", "0.50"]


def test_names_neither_break_tables_nor_reach_the_terminal_raw():
    hostile = "\x1b[31m\na\u202e\ud800"
    plain = report("plain", reorders=1)
    steps = (replace(plain.steps[0], name=hostile, origin=hostile, target="reference", reason=hostile),)
    reorders = (replace(plain.reorders[0], name=hostile, reason=hostile),)
    one = replace(plain, model=hostile, steps=steps, reorders=reorders)
    shown = r"\x1b[31m\na\u202e\ud800"
    comparison = Comparison.of([one], [0.0])
    for text in (one.to_text(), comparison.to_text(), comparison.summary()):
        assert shown in text
        assert text.replace("\n", "").isprintable()
    rows = [line.split("│") for line in one.to_text().splitlines() if line.startswith(f"│ {shown}")]
    assert [row[-2].strip() for row in rows][1:] == [shown] * 2, "slowest steps, fallbacks"
    assert rows[0][-2].strip().startswith("cheaper kernel"), "reorders"
    assert json.loads(comparison.to_json())["policies"][0]["model"] == hostile, "JSON has escapes of its own"


def test_json_has_reports_and_errors(tmp_path):
    comparison = Comparison.of([report("plain"), report("naive", reorders=1)], [0.0, 1e-6])
    text = comparison.to_json(tmp_path / "net.json")
    data = json.loads(text)
    assert json.loads((tmp_path / "net.json").read_text()) == data
    assert [(row["policy"], row["error"], len(row["reorders"])) for row in data["policies"]] == [
        ("plain", 0.0, 0),
        ("naive", 1e-6, 1),
    ]
