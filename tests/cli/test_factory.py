"""A model that is a function of the user's, as every command takes it."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import fmtprop

SOURCE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 17, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(17, 8, 3))

def with_inputs():
    return nn.Embedding(11, 4), (torch.tensor([[1, 10]]),)

def mlp():
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)), (torch.ones(2, 256),)

class Liar(nn.Module):
    def forward(self, x):
        return x * (2.0 if torch.compiler.is_compiling() else 3.0)

def liar():
    return Liar(), (torch.ones(4),)

class Alone(nn.Module):
    def forward(self):
        return torch.ones(3)

def alone():
    return Alone(), ()

number = 3
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(SOURCE)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-n", 1, "--tune", "model"),
        ("report", "-n", 1, "--tune", "model", "-p", "plain,optimal", "--pin", "conv_2.src=abcd"),
        ("bench", "--rounds", 1, "--tune", "model", "--vs", "fmtprop-plain"),
        ("check", "--max-ref", 9),
        ("whatif", "-n", 1, "--threads", 1),
        ("show", "-s", "normal"),
        ("tune", "--budget", 0.1),
        ("compile", "-o", "net.fmtplan", "--tune", "model"),
        ("doctor", "--costs"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_takes_a_factory(capsys, words):
    command, *options = words
    code, out, err = fmtprop(capsys, command, *options, "nets.py:net", "--input", "1x3x12x12")
    assert code == 0 and out + err, err


@pytest.mark.parametrize("words", [("run", "-n", 1), ("report", "-n", 1), ("bench", "--rounds", 1)])
def test_weights_are_codes_for_all(capsys, words):
    command, *options = words
    code, out, err = fmtprop(capsys, command, *options, "--weights", "int4", "--tune", "model", "nets.py:mlp", "--json")
    assert code == 0, err
    if command != "bench":
        assert "nbits" in out


def test_weights_are_for_inference(capsys):
    for command in ("run", "bench"):
        code, _, err = fmtprop(capsys, command, "--weights", "int8", "--train", "nets.py:mlp")
        assert code == 2 and "--weights is for inference: leave it out with --train" in err


def test_a_plan_with_codes(capsys, tmp_path):
    plan = tmp_path / "mlp.fmtplan"
    assert fmtprop(capsys, "compile", "--weights", "int4", "--tune", "model", "nets.py:mlp", "-o", plan).code == 0
    assert plan.stat().st_size < 256 * 256 and fmtprop(capsys, "run", plan, "-n", 1).code == 0


def test_a_package_and_inputs_of_the_factory(capsys):
    assert fmtprop(capsys, "show", "torch.nn:PReLU", "--input", "2x3", "-s", "imported").code == 0
    code, out, _ = fmtprop(capsys, "run", "nets.py:with_inputs", "-n", 1, "--json")
    assert code == 0 and json.loads(out)["policies"][0]["model"] == "with_inputs"


def test_a_pin_is_for_the_optimal_policy_of_several(capsys):
    code, out, _ = fmtprop(
        capsys, "run", "chain", "-n", 1, "--tune", "model", "-p", "plain,optimal", "--pin", "conv_1.dst=abcd", "--json"
    )
    plain, optimal = json.loads(out)["policies"]
    assert code == 0 and plain["policy"] == "plain"
    (written,) = (row["formats"] for row in optimal["steps"] if row["name"] == "conv_1")
    assert written.endswith("-> f32:abcd")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nets.py:net"), "returns a module without example inputs: give --input with a shape"),
        (("run", "nets.py:net", "--input", "1x4x12x12"), "to have 3 channels, but got 4 channels"),
        (("run", "nets.py:missing"), "nets.py:missing: nets.py has no missing"),
        (("report", "nets.py:number"), "nets.py:number is a int, not a function"),
        (("show", "no.such:thing"), "there is no module 'no'"),
        (("check", "gone.py:net", "--max-ref", 1), "gone.py is no file"),
        (
            ("show", "nets.py:net", "--shape", "x=1,3"),
            "--shape is for ONNX models; give nets.py:net its inputs' shapes",
        ),
        (("tune", "nets.py:with_inputs", "--input", "2"), "has example inputs of its own: leave out --input"),
        (("run", "chain", "--pin", "conv_1.dst"), "--pin 'conv_1.dst' must be a name, = and a tag"),
        (("run", "chain", "--pin", "a.b=ab", "--pin", "a.b=ba"), "--pin gives 'a.b' twice"),
        (("run", "chain", "--pin", "conv_1.dst=abcd", "-p", "plain"), "pin needs policy='optimal'"),
    ],
)
def test_what_cannot_be_a_model(capsys, words, message):
    code, out, err = fmtprop(capsys, *words)
    assert (code, out) == (2, ""), err
    assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("words", [("run", "-n", 1), ("bench", "--rounds", 1, "--vs", "torch")])
def test_pytorch_is_the_users_module_not_its_graph(capsys, words):
    command, *options = words
    code, out, err = fmtprop(capsys, command, *options, "--tune", "model", "nets.py:liar")
    assert code == 1, out + err
    assert "3.3e-01" in out + err or "0.333" in out + err


def test_a_module_without_inputs_runs(capsys):
    code, _, err = fmtprop(capsys, "run", "-n", 1, "--tune", "model", "nets.py:alone")
    assert code == 0, err
