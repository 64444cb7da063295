"""`fmtprop show` and `fmtprop models`."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import fmtprop as fp
from fmtprop.builtin import builtin_names
from fmtprop.report.graph_text import op_counts
from tests.cli.command import ROOT, fmtprop


def test_show_is_the_formatted_graph(capsys):
    code, out, err = fmtprop(capsys, "show", "chain", "--policy", "plain")
    assert (code, err) == (0, "")
    heading, *lines = out.splitlines()
    assert heading == "chain, formatted, after assign-formats: 6 nodes; 1 convolution+relu, 1 pooling"
    (conv,) = [line for line in lines if line.startswith("conv_1 ")]
    assert "f32[1,32,32,32]" in conv and "f32:abcd" in conv


@pytest.mark.parametrize(
    ("stage", "heading"),
    [
        ("imported", "chain, imported: 7 nodes; 1 convolution, 1 relu, 1 pooling"),
        ("normal", "chain, normal, after release-sums: 6 nodes; 1 convolution+relu, 1 pooling"),
    ],
)
def test_show_a_stage(capsys, stage, heading):
    code, out, _ = fmtprop(capsys, "show", "chain", "--stage", stage)
    assert code == 0
    assert out.splitlines()[0] == heading
    assert "f32:abcd" not in out, "no formats before they are chosen"


def test_show_every_pass(capsys):
    code, out, _ = fmtprop(capsys, "show", "chain", "--stage", "normal", "--passes")
    headings = [block.splitlines()[0] for block in out.split("\n\n")]
    assert code == 0
    assert headings[0].startswith("chain, imported:") and headings[-1].startswith("chain, normal, after release-sums:")
    assert headings[1].endswith("(unchanged)"), "there is no identity to remove"
    assert len(out.split("\n\n")[1].splitlines()) == 1, "what did not change is not printed again"


def test_show_dot(capsys):
    code, out, _ = fmtprop(capsys, "show", "chain", "--stage", "imported", "--format", "dot", "--passes")
    assert code == 0
    assert out.startswith('digraph "chain" {') and out.endswith("}\n")
    assert '"conv_1" -> "relu_1"' in out


def test_show_json(capsys):
    _, out, _ = fmtprop(capsys, "show", "chain", "--policy", "plain", "--format", "json")
    data = json.loads(out)
    assert (data["name"], data["stage"], data["after"]) == ("chain", "formatted", "assign-formats")
    (conv,) = [node for node in data["nodes"] if node["name"] == "conv_1"]
    assert conv["target"] == "onednn" and conv["formats"] == ["f32:abcd"] and conv["reads"]["src"] == "f32:abcd"
    _, out, _ = fmtprop(capsys, "show", "chain", "--stage", "normal", "--passes", "--format", "json")
    assert [shot["stage"] for shot in json.loads(out)] == ["imported"] + ["normal"] * (len(json.loads(out)) - 1)


def test_models(capsys):
    code, out, err = fmtprop(capsys, "models")
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["name", "inputs", "parameters", "ops"]
    assert [line.split()[0] for line in lines] == builtin_names()
    (chain,) = [line for line in lines if line.startswith("chain ")]
    assert chain.split(maxsplit=4)[1:] == ["f32[1,3,32,32]", "0.00", "M", "1 convolution, 1 relu, 1 pooling"]


def test_models_json(capsys):
    _, out, _ = fmtprop(capsys, "models", "--json")
    for row in json.loads(out):
        graph = fp.load(row["name"])
        inputs = {node.name: repr(node.results[0]) for node in graph.input_nodes}
        parameters = sum(node.results[0].size for node in graph if node.op == "constant")
        assert row == {"name": graph.name, "inputs": inputs, "parameters": parameters, "ops": dict(op_counts(graph))}


def test_models_need_no_pytorch():
    code = "import sys, fmtprop.cli as c\ntry: c.main(['models'])\nfinally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).returncode == 0


def test_show_as_a_picture(capsys, tmp_path):
    file = tmp_path / "chain.svg"
    assert fmtprop(capsys, "show", "chain", "-o", file).code == 0
    assert {one.tag.rpartition("}")[2] for one in ElementTree.parse(file).iter()} >= {"svg", "rect", "path", "title"}
    assert fmtprop(capsys, "show", "chain", "-o", file).code == 0  # its own file
    file.write_text("<svg/>")
    assert fmtprop(capsys, "show", "chain", "-o", file).code != 0
