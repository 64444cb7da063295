"""``fmtprop diff``, ``check`` and ``whatif`` as a user runs them."""

from __future__ import annotations

import json

import pytest

from fmtprop.bench.whatif import Case, CaseResult, cases, side_by_side, table
from fmtprop.errors import FmtpropError
from tests.cli.command import fmtprop


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """A report of the plan without any reorder."""
    from fmtprop.api import Options, compile_graph
    from fmtprop.capture import load

    path = tmp_path_factory.mktemp("reports") / "base.json"
    compile_graph(load("concat"), Options(policy="plain", tune="model")).report(repeats=1).to_json(path)
    return path


def test_check(capsys, tmp_path, baseline):
    words = ["check", "concat", "-p", "naive", "-n", "1"]
    assert fmtprop(capsys, *words, "--max-reorders", 99, "--max-ref", 0, "--max-reorder-share", "100%") == (
        0, "concat: within its limits (max-reorders, max-reorder-share, max-ref)\n", "",
    )  # fmt: skip
    outcome = fmtprop(
        capsys, *words, "--max-reorders", 2, "--max-reorder-share", "0.0", "--junit", tmp_path / "j.xml", "--sarif",
        tmp_path / "s.sarif",
    )  # fmt: skip
    assert outcome.code == 1
    assert [line.partition(":")[0] for line in outcome.out.splitlines()] == ["max-reorders", "max-reorder-share"]
    assert 'failures="2"' in (tmp_path / "j.xml").read_text()
    assert len(json.loads((tmp_path / "s.sarif").read_text())["runs"][0]["results"]) == 2
    (tmp_path / "mine.xml").write_text("mine")
    code, _, err = fmtprop(capsys, *words, "--max-ref", 0, "--junit", tmp_path / "mine.xml")
    assert code == 2 and (tmp_path / "mine.xml").read_text() == "mine"
    code, out, _ = fmtprop(capsys, *words[:-2], "-n", 1, "--max-reorders", 0, "--json")
    assert code == 1 and json.loads(out)["violations"][0]["rule"] == "max-reorders"
    code, _, err = fmtprop(capsys, *words, "--baseline", baseline)
    assert code == 2 and "has no policy 'naive'; it has plain" in err


def test_a_plan_that_is_worse_than_its_baseline(capsys, tmp_path, baseline):
    better = json.loads(baseline.read_text()) | {"policy": "naive"}
    (tmp_path / "b.json").write_text(json.dumps(better))
    code, out, _ = fmtprop(capsys, "check", "concat", "-p", "naive", "-n", 1, "--baseline", tmp_path / "b.json")
    assert code == 1 and out.count("baseline: concat has a new reorder on ") > 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to check: give --max-reorders"),
        (["--max-reorder-share", "7"], "--max-reorder-share is a part of a run, such as 0.05 or 5%; got '7'"),
        (["--max-reorder-share", "x%"], "got 'x%'"),
        (["--baseline", "/no/such"], "/no/such cannot be read: No such file"),
    ],
)
def test_check_refuses(capsys, words, message):
    code, out, err = fmtprop(capsys, "check", "chain", *words)
    assert (code, out) == (2, "") and message in err


def test_diff(capsys, tmp_path, baseline):
    code, out, _ = fmtprop(capsys, "diff", baseline, baseline)
    assert code == 0 and "no reorder, implementation or format differs" in out
    code, out, _ = fmtprop(capsys, "diff", baseline, baseline, "--json")
    assert json.loads(out)["changes"] == []
    assert fmtprop(capsys, "diff", baseline, tmp_path / "gone").code == 2


def test_diff_of_plans(capsys, tmp_path):
    for policy in ("naive", "plain"):
        (tmp_path / policy).write_text(fmtprop(capsys, "show", "concat", "-p", policy, "-f", "json").out)
    code, out, _ = fmtprop(capsys, "diff", tmp_path / "naive", tmp_path / "plain", "--json")
    data = json.loads(out)
    assert code == 0 and data["before"]["reorders"] > 3 and data["after"]["reorders"] == 0
    removed = [change for change in data["changes"] if change["what"] == "reorder"]
    assert len(removed) == data["before"]["reorders"] and all(change["seconds"] < 0 for change in removed)
    lost = sum(change["seconds"] for change in data["changes"])
    assert lost == pytest.approx(data["after"]["seconds"] - data["before"]["seconds"])
    assert fmtprop(capsys, "diff", tmp_path / "naive", tmp_path / "naive").out.endswith("format differs\n")
    (tmp_path / "imported").write_text(fmtprop(capsys, "show", "concat", "-s", "imported", "-f", "json").out)
    code, _, err = fmtprop(capsys, "diff", tmp_path / "imported", tmp_path / "plain")
    assert code == 2 and "is no report of fmtprop" in err and err.count("\n") == 1


def test_whatif(capsys):
    code, out, err = fmtprop(
        capsys, "whatif", "concat", "-p", "naive", "-n", 1, "--isa", "SSE41", "--batch", 2, "--json"
    )
    assert (code, err) == (0, "")
    (naive,) = json.loads(out)
    assert naive["case"] == {
        "policy": "naive",
        "dtype": "f32",
        "batch": 2,
        "threads": None,
        "isa": "SSE41",
        "library": "",
        "pin": {},
    }
    assert naive["report"]["machine"]["isa"] == "sse41"
    assert {row["dims"][0] for row in naive["report"]["reorders"]} == {2}


def test_what_fails_is_told_beside_the_rest():
    (outcome,) = side_by_side({"model": "no_such_model"}, [Case()], tune="model", repeats=1, progress=lambda *_: None)
    assert "no_such_model" in outcome.error and not outcome.report
    lost = [Case(library="/nowhere/libdnnl.so")]
    (other,) = side_by_side({"model": "chain"}, lost, tune="model", repeats=1, progress=lambda *_: None)
    assert "/nowhere/libdnnl.so" in other.error and not other.report, "no other library ran instead"
    assert "failed" in table([outcome, CaseResult(Case(threads=3), {}, "\x1b")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": ["0"]}, "threads are whole numbers"), ({"batches": ["x"]}, "batches are whole numbers"),
        ({"pins": ["conv_1"]}, "a pin is NODE.OPERAND=TAG"),
        ({"isas": ["AVX2"] * 8, "dtypes": ["f32"] * 9}, "these are 72 combinations, more than 64"),
        ({"isas": ["avx2", "AVX9"]}, "unknown instruction set 'AVX9'; known: DEFAULT, SSE41, AVX, AVX2"),
    ],
)  # fmt: skip
def test_cases_refuse(given, message):
    usual = {
        "policies": ["plain"],
        "dtypes": ["f32"],
        "batches": [""],
        "threads": [""],
        "isas": [""],
        "libraries": [""],
        "pins": [],
    }
    with pytest.raises(FmtpropError, match=message):
        cases(**(usual | given))
