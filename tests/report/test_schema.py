"""The published schema is what reports are."""

from __future__ import annotations

import json

import pytest

import fmtprop as fp
from fmtprop.report import Comparison
from scripts.report_schema import TARGET, json_schema


def test_the_published_file_is_current():
    assert json.loads(TARGET.read_text()) == json_schema(), "run python -m scripts.report_schema"


def test_reports_and_comparisons_are_valid():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json_schema())
    reports = [fp.compile("concat", policy=policy, tune="model").report(repeats=1) for policy in ("naive", "optimal")]
    alone = json.loads(reports[1].to_json())
    together = json.loads(Comparison.of(reports, [0.0, float("nan")]).to_json())
    for data in (alone, together):
        assert list(validator.iter_errors(data)) == []
    del alone["reorders"][0]["nbytes"]
    together["policies"][0]["error"] = "none"
    for data in (alone, together, {"schema": 1}):
        assert list(validator.iter_errors(data))


def test_each_field_is_described_and_has_its_unit_in_its_name():
    for name, definition in json_schema()["$defs"].items():
        for field, told in definition["properties"].items():
            assert "description" in told or name in ("Certificate", "Tuning") or field in ("warnings", "verdict"), field
    row = json_schema()["$defs"]["ReorderRow"]["properties"]
    assert {"seconds", "nbytes", "bytes_per_second", "padding_nbytes"} <= row.keys()
