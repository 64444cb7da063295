"""``fmtprop compile``, and the commands that take its plan file."""

import json

import pytest

import fmtprop as fp
from tests.cli.command import fmtprop


@pytest.fixture
def plan(capsys, tmp_path):
    """The plan file of a small graph."""
    done = fmtprop(capsys, "compile", "residual", "-o", tmp_path / "a.fmtplan", "--deterministic", "-t", 1)
    assert done.code == 0, done.err
    assert f"wrote {tmp_path / 'a.fmtplan'}" in done.err
    return tmp_path / "a.fmtplan"


def test_a_plan_file_runs_and_reports(plan, capsys, tmp_path):
    assert fp.load_plan(plan).options.deterministic
    done = fmtprop(capsys, "run", plan, "-n", 1, "-t", 1)
    assert (done.code, "check against PyTorch: passed" in done.out) == (0, True), done.err
    done = fmtprop(capsys, "report", plan, "-n", 1, "-t", 1, "-o", tmp_path / "r.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "r.json").read_text())["policies"][0]["policy"] == "optimal"


def test_a_plan_file_is_raced(plan, capsys):
    done = fmtprop(capsys, "bench", plan, "--vs", "torch", "-n", 1, "-t", 1)
    assert (done.code, "fmtprop" in done.out, "torch" in done.out) == (0, True, True), done.err


def test_plan_show_and_diff(plan, capsys, tmp_path):
    done = fmtprop(capsys, "plan", "show", plan)
    assert done.code == 0, done.err
    assert "made for threads: 1" in done.out
    assert "conv" in done.out
    shown = fmtprop(capsys, "plan", "show", plan, "--json")
    (tmp_path / "plan.json").write_text(shown.out)
    other = tmp_path / "b.fmtplan"
    assert fmtprop(capsys, "compile", "residual", "-o", other, "-p", "plain", "-t", 1).code == 0
    for first in (plan, tmp_path / "plan.json"):
        done = fmtprop(capsys, "diff", first, other, "--json")
        assert done.code == 0, done.err
        assert any(
            change["what"] == "formats" or "impl" in change["what"] for change in json.loads(done.out)["changes"]
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "PLAN", "-p", "plain"), "is a plan, compiled with its own options: leave out --policy"),
        (("report", "PLAN", "-d", "bf16"), "leave out --dtype"),
        (("bench", "PLAN", "--tune", "model"), "leave out --tune"),
        (("run", "PLAN", "--weights", "int4"), "leave out --weights"),
        (("compile", "residual", "-o", "NEW", "--weights", "int3"), "must be one of None, 'int8', 'int4'. Got 'int3'"),
        (("compile", "residual", "-o", "TEXT"), "there is another file of that name"),
        (("compile", "residual", "-o", "NEW", "--pin", "conv"), "must be a name, = and a tag"),
        (("compile", "residual", "-o", "NEW", "--boundary", "zzz=acdb"), "--boundary names 'zzz'"),
        (("plan", "show", "TEXT"), "is not a plan file"),
        (("plan", "show", "NEW"), "cannot be read: No such file"),
    ],
)
def test_errors_are_one_line(plan, capsys, tmp_path, words, said):
    (tmp_path / "text").write_text("this is a text of more than eight bytes")
    places = {"PLAN": plan, "TEXT": tmp_path / "text", "NEW": tmp_path / "new.fmtplan"}
    done = fmtprop(capsys, *(places.get(word, word) for word in words))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert said in done.err
