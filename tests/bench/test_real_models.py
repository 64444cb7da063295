"""The benchmark of trained models: its inputs, and its table."""

from __future__ import annotations

import numpy as np

from benchmarks import real_models


def test_inputs_fill_dynamic_axes_in_three_ways():
    declared = [
        ("image", "tensor(float)", ["batch", 3, -1, None]),
        ("rows", "tensor(float)", [None, "h", "w", 3]),
        ("sound", "tensor(float)", [None, "samples"]),
        ("tokens", "tensor(int64)", ["n", "length"]),
        ("rate", "tensor(int64)", []),
        ("state", "tensor(float)", [2, None, 128]),
    ]
    shapes = [{name: array.shape for name, array in feed.items()} for feed in real_models.feeds(declared)]
    assert shapes[0] == {
        "image": (1, 3, 320, 320), "rows": (1, 320, 320, 3), "sound": (1, 576), "tokens": (1, 64), "rate": (),
        "state": (2, 1, 128),
    }  # fmt: skip
    assert shapes[1]["image"] == (1, 3, 480, 640) and shapes[2]["sound"] == (2, 8000)
    assert all(np.isfinite(array).all() for feed in real_models.feeds(declared) for array in feed.values())


def test_the_table_has_ratios_and_what_failed():
    ours = {"seconds": [1e-3, 2e-3, 3e-3], "first": 2.0, "later": 0.5, "nbytes": 5e6}
    theirs = {"seconds": [2e-3, 4e-3, 3e-3], "first": 0.1, "later": 0.01, "nbytes": 3e6}
    rows = [
        {"name": "good.onnx", "nbytes": 1e6, "error": 2e-6, "own_change": 1e-6, "fmtprop": ours, "onnxruntime": theirs},
        {"name": "bad.onnx", "nbytes": 1e6, "failure": "no inputs: because"},
    ]
    text = real_models.table(rows)
    assert "Time over onnxruntime's, 3 shapes of 1 files: geometric mean 0.63, largest 1.00" in text
    assert (
        "| `good.onnx` | 1.0 | 2e-06 | — | 1e-06 | 1.00 / 2.00 / 3.00 | 0.50 / 0.50 / 1.00 | — | 2.00 | 0.10 |" in text
    )
    assert "| `bad.onnx` | 1.0 | no inputs: because |" in text


def test_inputs_keep_what_an_axis_and_a_name_say():
    declared = [
        ("atoms", "tensor(int64)", [1, "seq_len"]),
        ("distances", "tensor(int64)", [1, "seq_len", "seq_len"]),
        ("frames", "tensor(float)", ["seq_len", 576]),
        ("attention_mask", "tensor(int64)", [1, "seq_len"]),
        ("token_type_ids", "tensor(int64)", [1, "seq_len"]),
        ("line", "tensor(float)", ["n", 3, "?", "w"]),
        ("lowest", "tensor(float)", []),
    ]
    feed = real_models.feeds(declared, height=48, most=3)[0]
    assert {name: array.shape for name, array in feed.items()} == {
        "atoms": (1, 64), "distances": (1, 64, 64), "frames": (64, 576), "attention_mask": (1, 64),
        "token_type_ids": (1, 64), "line": (1, 3, 48, 320), "lowest": (),
    }  # fmt: skip
    assert set(feed["atoms"].ravel()) == {0, 1, 2} and set(feed["attention_mask"].ravel()) == {1}
    assert isinstance(feed["lowest"], np.ndarray) and feed["lowest"].dtype == np.float32


def test_numbers_that_are_none_are_a_difference():
    want = np.float32([1.0, np.nan, np.inf, -4.0])
    assert real_models.difference(want, want) == 0
    assert real_models.difference(want, np.float32([1.0, np.nan, np.inf, -3.0])) == 0.25
    for place, other in ((1, 0.0), (0, np.nan), (2, -np.inf)):
        changed = want.copy()
        changed[place] = other
        assert real_models.difference(want, changed) == np.inf
