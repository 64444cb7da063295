"""ONNX files against ONNX Runtime: what is compared, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime")

from benchmarks import onnx_files
from benchmarks.onnx_files import Row, compared, table

pytestmark = pytest.mark.peers

TEXT = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) { y = Softmax(x) }'


@pytest.fixture
def path(tmp_path):
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_all_calls_are_compared(path):
    np.savez(path.with_suffix(".npz"), **{"0/x": np.ones((3, 4), np.float32), "1/x": np.eye(4, dtype=np.float32)})
    row = compared(path)
    assert (row.calls, row.opset, row.nodes, row.reason) == (2, 17, 1, None) and row.is_right


def test_a_wrong_result_is_found(path, monkeypatch):
    expected = onnx_files.expected_of
    monkeypatch.setattr(onnx_files, "expected_of", lambda *at: [[y * 1.001 for y in call] for call in expected(*at)])
    row = compared(path)
    assert 5e-4 < row.error < 2e-3 and not row.is_right


@pytest.mark.parametrize(
    "got, want, error",
    [
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([1.0], [1.0, 1.0], np.inf),
        ([np.inf, np.nan], [np.inf, np.nan], 0),
        ([np.nan], [1.0], np.inf),
        (["a"], ["b"], np.inf),
        ([{"a": 1.0}], [{"a": 2.0}], 0.5),
    ],
)
def test_errors(got, want, error):
    np.testing.assert_equal(onnx_files.error_of(got, want) if isinstance(want[0], dict) else _of(got, want), error)


def _of(got, want):
    return onnx_files.error_of(np.array(got), np.array(want))


def test_the_table_has_the_reasons(path):
    path.write_bytes(path.read_bytes()[:-9])
    rows = [compared(path), Row("b", calls=1, error=1e-6), Row("c", calls=1, error=0.1)]
    text = table([Row(**json.loads(json.dumps(asdict(row)))) for row in rows])
    assert text.startswith("1 of 3 files are right, 1 of them as plans.")
    assert "| `model` | model.onnx is no" in text
