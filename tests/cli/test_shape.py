"""`--shape`: sizes for the dynamic axes of an ONNX model, in each command that takes a model."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import fmtprop

onnx = pytest.importorskip("onnx")

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, h, w] image) => (float[n, 3, a, b] y) { y = Relu(image) }
"""


@pytest.fixture
def path(tmp_path):
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["report", "-p", "plain"],
        pytest.param(["bench", "--rounds", 1], marks=pytest.mark.slow),
        ["tune", "--budget", 1],
        ["show"],
        ["check", "--max-ref", 1],
        pytest.param(["whatif", "--repeats", 1], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_each_command_takes_it(capsys, path, words):
    command, *options = words
    code, out, err = fmtprop(capsys, command, path, *options, "--shape", "image=2,3,4,5")
    assert code == 0, out + err


def test_the_sizes_are_those_of_the_plan(capsys, path):
    _, out, _ = fmtprop(capsys, "show", path, "--shape", "image=2,3,4,5", "--stage", "imported", "-f", "json")
    results = {node["name"]: node["results"] for node in json.loads(out)["nodes"]}
    assert results["image"] == [{"dims": [2, 3, 4, 5], "dtype": "f32"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "input image has the dynamic shape (n, 3, h, w); a plan has fixed shapes: pass them, such as "
             "shapes={'image': (1, 3, 1, 1)}, in the command line --shape image=1,3,1,1, or use"),
        (["--shape", "image=2,4,5,5"], "shapes['image'] is (2, 4, 5, 5), but the model declares (n, 3, h, w)"),
        (["--shape", "x=2,4,5,5"], "shapes names 'x'; the model's inputs are image"),
        (["--shape", "image=2x4"], "--shape 'image=2x4' is no input with its sizes; one is x=1,3,224,224"),
        (["--shape", "image=2", "--shape", "image=3"], "--shape gives input 'image' twice"),
    ],
)  # fmt: skip
def test_errors(capsys, path, words, message):
    code, out, err = fmtprop(capsys, "run", path, *words)
    assert (code, out) == (2, "") and message in " ".join(err.split())


def test_only_onnx_models_have_dynamic_axes(capsys):
    code, _, err = fmtprop(capsys, "run", "chain", "--shape", "input=1,3,32,32")
    assert code == 2 and "shapes are for ONNX models" in err
    code, _, err = fmtprop(capsys, "run", "nets.py:net", "--train", "--shape", "x=1")
    assert code == 2 and "--shape is for ONNX models, which have no --train" in err
