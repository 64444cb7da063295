from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fmtprop.builtin import builtin_names
from fmtprop.capture import load
from fmtprop.errors import GraphError
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ops.evaluate import evaluate
from graphs.architectures import ARCHITECTURES
from graphs.make import FOLDER, write

SMALL = ("chain", "residual", "concat", "conv3d")
LARGE = tuple(name for name in ARCHITECTURES if name not in SMALL)
#: overloads without a oneDNN op; an embedding looks rows up by number
HOST_CALLS = {"bert_base": ["aten.embedding.default"]}
ALL = [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]


def test_every_architecture_has_its_file():
    assert builtin_names() == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_are_small_and_hold_no_weights(name):
    path = FOLDER / f"{name}.json"
    assert path.stat().st_size < 300 * 1024
    assert "weights" not in json.loads(path.read_text())
    graph = load(name)
    assert graph.name == name
    assert [node.attrs.target for node in graph if node.op == "aten"] == HOST_CALLS.get(name, [])
    assert [node.results[0].dims for node in graph.input_nodes] == [ARCHITECTURES[name].input_shape]
    with torch.device("meta"):
        module = ARCHITECTURES[name].build()
    for constant, data in graph.constants.items():
        assert isinstance(data, Initialiser) == (constant in module.state_dict()), constant


@pytest.mark.parametrize("name", ALL)
def test_making_a_file_again_gives_the_same_bytes(name, tmp_path):
    assert write(name, tmp_path).read_bytes() == (FOLDER / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", ALL)
def test_graphs_compute_what_their_modules_compute(name):
    architecture = ARCHITECTURES[name]
    x = architecture.example_input()
    graph = load(name)
    (found,) = evaluate(graph, {graph.input_nodes[0].name: x})
    expected = architecture.module()(x)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.isfinite(expected).all()


def test_unknown_architectures_are_named(tmp_path: Path):
    with pytest.raises(GraphError, match="there is no architecture 'lenet'; there are resnet50"):
        write("lenet", tmp_path)


def test_readme_lists_every_graph_as_it_is():
    rows = [line.split("|") for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): (row[2].strip(), int(row[3])) for row in rows}
    shapes = {name: "×".join(map(str, a.input_shape)) for name, a in ARCHITECTURES.items()}
    assert listed == {name: (shapes[name], len(load(name))) for name in ARCHITECTURES}
