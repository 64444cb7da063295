"""`fmtprop run --train`, `report --train` and `bench --train`."""

from __future__ import annotations

import json

import pytest

from fmtprop.bench import training
from tests.cli.command import fmtprop

SOURCE = """
import torch
from torch import nn

def net():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Sigmoid(), nn.Dropout(0.2)
    return nn.Sequential(*layers), torch.randn(2, 3, 9, 9)
"""


@pytest.fixture(autouse=True)
def factory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(SOURCE)


def test_policies_of_a_step_side_by_side(capsys, tmp_path):
    path = tmp_path / "step.json"
    code, out, err = fmtprop(
        capsys, "run", "nets.py:net", "--train", "-n", 1, "--tune", "model", "-p", "naive,optimal", "-r", path
    )
    assert (code, err) == (0, f"wrote {path}\n")
    assert "Sequential: policies of format assignment" in out
    head = out.split("check against PyTorch: passed under each policy; the unit of errors")[0]
    words = " ".join(head.split())
    assert all(word in words for word in ("│ naive ", "│ optimal ", "┃ forward ┃ backward ┃ parameters ┃"))
    naive, optimal = json.loads(path.read_text())["policies"]
    assert {row["part"] for row in naive["reorders"]} == {"forward", "backward", "parameters and gradients"}
    assert naive["error"] < 1 > optimal["error"]
    modules = {row["op"]: row["origin"] for row in optimal["steps"]}
    assert modules["convolution_backward_weights"] in ("0", "3") and modules["convolution_backward_data"] == "3"


def test_report_of_a_step(capsys):
    code, out, _ = fmtprop(
        capsys, "report", "torch.nn:ReLU", "--train", "--input", "2x3", "--tune", "model", "-p", "optimal"
    )
    assert code == 2 and out == "", "it has no parameters"
    code, out, _ = fmtprop(capsys, "report", "nets.py:net", "--train", "-n", 1, "--tune", "model", "-p", "optimal")
    assert code == 0
    assert "convolution_backward_weights" in out


def test_a_wrong_gradient_fails_the_run(capsys, monkeypatch):
    honest = training.figures_of

    def wrong(step, call, precision="f32"):
        found = honest(step, call, precision)
        if call is not step.module:
            found["the gradient of 0.weight"] *= 1.1
        return found

    monkeypatch.setattr(training, "figures_of", wrong)
    code, out, err = fmtprop(capsys, "run", "nets.py:net", "--train", "-n", 1, "--tune", "model", "-p", "optimal")
    assert code == 1
    assert "check against PyTorch FAILED" in out
    assert err.startswith("error: policy optimal: loss, gradients or buffers are off by ")


def test_bench_of_a_step(capsys):
    code, out, err = fmtprop(
        capsys, "bench", "nets.py:net", "--train", "--rounds", 1, "--vs", "torch-channels-last", "--json",
        "--tune", "model",
    )  # fmt: skip
    assert (code, err) == (0, "")
    entries = json.loads(out)["entries"]
    assert [entry["name"] for entry in entries] == ["fmtprop", "torch-channels-last"]
    assert all(entry["agreement"]["passed"] and entry["latency"]["median"] > 0 for entry in entries)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "resnet50", "--train"], "error: resnet50 cannot train: a built-in graph is the graph of inference"),
        (["run", "nets.py:net", "--train", "--input", "2x0"], "--input '2x0' is no shape; one is 8x3x224x224"),
        (["run", "chain", "--input", "2x3"], "chain has inputs of its own shapes: leave out --input"),
        (["bench", "nets.py:net", "--train", "--vs", "onnxruntime"], "error: contender onnxruntime cannot train"),
    ],
)
def test_bad_arguments(capsys, words, message):
    pytest.importorskip("onnxruntime") if "onnxruntime" in words else None
    code, out, err = fmtprop(capsys, *words)
    assert code == 2 and out == ""
    assert message in " ".join(err.replace("│", " ").split())
