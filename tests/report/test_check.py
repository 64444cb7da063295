"""Reports compared with each other and with limits."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fmtprop.errors import FmtpropError
from fmtprop.report import Comparison, StepRow
from fmtprop.report.check import Limits, check, junit, sarif
from fmtprop.report.diff import chosen, compare, read_reports, told
from tests.cli.command import fmtprop
from tests.report.test_comparison import report


def with_edges(*edges, step="jit:avx2"):
    """Return a report with a reorder on each edge, and one more step of an implementation."""
    base = report("optimal", reorders=len(edges))
    rows = tuple(
        replace(row, name=f"r{i}", producer=producer, readers=(reader,), seconds=1e-4)
        for i, (row, (producer, reader)) in enumerate(zip(base.reorders, edges, strict=True))
    )
    moved = tuple(StepRow(row.name, "reorder", "jit:uni", "onednn", "a -> b", row.seconds, "", "") for row in rows)
    return replace(base, reorders=rows, steps=(replace(base.steps[0], impl=step), *moved))


A, B = ("conv_1", "pool_1.src"), ("conv_2", "output.src")


def test_differences():
    difference = compare(told(with_edges(A).to_dict()), told(with_edges(B, step="ref:any").to_dict()))
    assert {(c.what, c.name, c.before, c.after) for c in difference.changes} == {
        ("reorder", "conv_1 -> pool_1.src", "f32:abcd to f32:acdb", ""),
        ("reorder", "conv_2 -> output.src", "", "f32:abcd to f32:acdb"),
        ("implementation", "conv_1", "jit:avx2", "ref:any"),
    }
    assert [c.seconds for c in difference.changes] == [1e-4, 0.0, -1e-4]
    assert "+100.0 us  reorder conv_2 -> output.src: none -> f32:abcd to f32:acdb" in difference.to_text()
    json.dumps(difference.to_dict(), allow_nan=False)
    same = told(with_edges(A).to_dict())
    assert "no reorder, implementation or format differs" in compare(same, same).to_text()


def test_limits():
    one = with_edges(A, B, step="ref:any")
    assert check(one, Limits(2, 0.9, 1)) == ()
    found = check(one, Limits(1, 0.1, 0))
    assert [violation.rule for violation in found] == ["max-reorders", "max-reorder-share", "max-ref"]
    assert str(found[0]).startswith(
        "max-reorders: net executes 2 reorders, more than 1; the costliest is r0 (f32:abcd to"
    )
    assert "28.6% of a run in reorders, more than 10.0%" in found[1].message
    worse = check(one, Limits(baseline=told(with_edges(A).to_dict())))
    assert [v.message for v in worse] == [
        "net has a new reorder on conv_2 -> output.src: f32:abcd to f32:acdb",
        "net runs conv_1 in a loop (ref:any), where it ran jit:avx2",
    ]
    assert check(one, Limits(baseline=told(one.to_dict()))) == ()


def test_outcomes_for_other_programs():
    one = replace(with_edges(A, B), model="<net> & \x1b")
    limits = Limits(1, None, 0)
    found = check(one, limits)
    suite = ElementTree.fromstring(junit(one.model, limits.rules, found))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [(case.get("name"), len(case)) for case in suite.iter("testcase")] == [("max-reorders", 1), ("max-ref", 0)]
    (run,) = json.loads(sarif(one.model, found))["runs"]
    assert [row["ruleId"] for row in run["results"]] == ["max-reorders"]
    assert {row["ruleId"] for row in run["results"]} <= {rule["id"] for rule in run["tool"]["driver"]["rules"]}


def test_a_result_names_the_file_of_its_model(tmp_path, monkeypatch):
    (tmp_path / "my model.onnx").touch()
    found = check(with_edges(A), Limits(max_reorders=0))

    def places(model):
        (result,) = json.loads(sarif(model, found))["runs"][0]["results"]
        return result["locations"]

    monkeypatch.chdir(tmp_path)
    (place,) = places("my model.onnx")
    assert place["physicalLocation"] == {"artifactLocation": {"uri": "my%20model.onnx"}}
    (place,) = places(str(tmp_path / "my model.onnx"))
    assert place["physicalLocation"]["artifactLocation"]["uri"] == (tmp_path / "my model.onnx").as_uri()
    (place,) = places("resnet50")
    assert place == {"logicalLocations": [{"name": "resnet50", "kind": "module"}]}


def test_reports_are_read(tmp_path):
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    with_edges(A).to_json(one)
    Comparison.of([report("naive"), with_edges(B)], [0.0, 0.0]).to_json(many)
    assert chosen(read_reports(one), None, one).reorders.keys() == {"conv_1 -> pool_1.src"}
    assert chosen(read_reports(many), None, many).policy == "optimal"
    assert chosen(read_reports(many), "naive", many).policy == "naive"
    with pytest.raises(FmtpropError, match=r"many.json has no policy 'plain'; it has naive, optimal"):
        chosen(read_reports(many), "plain", many)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"), ("[1]", "its schema is None, not 4"), ('{"schema": 1}', "its schema is 1, not 4"),
        ('{"schema": 4, "model": "x"}', "a field is missing"), ('{"schema": 4, "policies": 3}', "of another type"),
        ('{"schema": 4, "policies": []}', "there is no policy in it"), ("[" * 100_000, "it is not JSON"),
        ('{"schema": 4, "model": "", "policy": "", "precision": "", "machine": {}, "steps": [], "reorders": [], '
         '"seconds": 1e999}', "inf is no time in seconds"),
        ('{"schema": 4, "seconds": NaN}', "NaN is no number of JSON"),
    ],
)  # fmt: skip
def test_what_is_no_report(tmp_path, text, why):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FmtpropError, match="is no report of fmtprop: ") as refused:
        read_reports(path)
    assert why in str(refused.value) and "-o FILE.json" in str(refused.value)


def test_two_reorders_of_one_edge_are_two():
    row = {"producer": "conv_1", "readers": ["add_1.src_0"], "dst": "f32:abcd", "seconds": 1e-6, "nbytes": 8}
    data = {
        "model": "m", "policy": "naive", "precision": "f32", "seconds": 3e-6, "machine": {}, "steps": [],
        "reorders": [{**row, "name": "a", "src": "f32:acdb"}, {**row, "name": "b", "src": "f32:aBcd8b"}],
    }  # fmt: skip
    one = told(data)
    assert len(one.reorders) == 2 and one.reorder_seconds == 2e-6
    assert compare(one, one).changes == ()


def test_a_plan_and_its_report_have_the_same_edges(tmp_path, capsys):
    (tmp_path / "plan").write_text(fmtprop(capsys, "show", "unet", "-p", "naive", "-f", "json").out)
    assert fmtprop(capsys, "report", "unet", "-p", "naive", "-n", "1", "-o", tmp_path / "report.json").code == 0
    done = fmtprop(capsys, "diff", tmp_path / "plan", tmp_path / "report.json", "-p", "naive")
    assert "no reorder, implementation or format differs" in done.out and "by its costs ->" in done.out
    assert "isa:" not in done.out, "a plan is of no machine"
