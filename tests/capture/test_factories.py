"""Modules for training by name: factories in packages and files, exported programs, and what cannot train."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from fmtprop.capture.factories import graph_named, mean_square, original_of, trainable
from fmtprop.errors import ImportModelError

SOURCE = """
import torch
from torch import nn

def alone():
    return nn.Linear(4, 2)

def with_inputs():
    return nn.Linear(4, 2), torch.ones(3, 4)

def with_loss():
    return nn.Linear(4, 2), (torch.ones(3, 4),), lambda results: results.sum()

def frozen():
    return nn.Linear(4, 2).requires_grad_(False), torch.ones(3, 4)

def half():
    return nn.Linear(4, 2, dtype=torch.bfloat16)

def sized(width):
    return nn.Linear(width, 2)

def nothing():
    return 7

made = nn.Linear(4, 2)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a package and a file of factories, the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine" / "models.py").write_text(SOURCE)
    (tmp_path / "file.py").write_text(SOURCE)
    yield tmp_path
    for name in ("of_mine", "of_mine.models", "file_file"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["of_mine.models", "file.py", "./file.py"])
def test_factories(models, place):
    alone = trainable(f"{place}:alone", [(3, 4)])
    assert alone.inputs[0].shape == (3, 4) and alone.loss is mean_square
    assert trainable(f"{place}:with_inputs").inputs[0].shape == (3, 4)
    made = trainable(f"{place}:with_loss")
    assert made.loss(torch.full((2,), 3.0)) == 6
    again = trainable(f"{place}:with_loss")
    assert torch.equal(made.module.weight, again.module.weight), "seeded"


def test_inputs_have_the_data_type_of_the_module(models):
    assert trainable("file.py:half", [(3, 4)]).inputs[0].dtype is torch.bfloat16


def test_a_program_that_was_exported_in_train_mode(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    torch.export.save(torch.export.export(module, (torch.randn(2, 3, 5, 5),)), tmp_path / "net.pt2")
    made = trainable(str(tmp_path / "net.pt2"))
    made.loss(made.module(*made.inputs)).backward()
    assert all(parameter.grad is not None for parameter in made.module.parameters())
    assert any(float(buffer.abs().sum()) > 0 for name, buffer in made.module.named_buffers() if "mean" in name)


@pytest.mark.parametrize(
    ("model", "shapes", "message"),
    [
        (
            "resnet50",
            [],
            r"resnet50 cannot train: a built-in graph is the graph of inference.* Give package.module:fact",
        ),
        ("net.onnx", [], r"net.onnx cannot train: the file has a graph of inference"),
        ("a/b/c", [], "it names no factory and no exported program"),
        ("net.pt2", [], "net.pt2 does not exist"),
        ("of_mine.other:alone", [], "there is no module 'of_mine.other'"),
        ("missing.py:alone", [], "missing.py is no file"),
        ("file.py:other", [], "file.py:other: file.py has no other$"),
        ("file.py:froze", [], r"file.py has no froze; did you mean frozen\?"),
        ("torch.nn:Linaer", [], r"torch.nn has no Linaer; did you mean Linear or "),
        ("file.py:alone", [], r"without example inputs: give --input with a shape such as 8x3x224x224"),
        ("file.py:with_inputs", [(3, 4)], "has example inputs of its own: leave out --input"),
        ("file.py:frozen", [], "Linear has no parameter that requires gradients"),
        ("file.py:sized", [(3, 4)], r"needs arguments \(width\): write a function without arguments"),
        ("file.py:nothing", [], "file.py:nothing returns a int"),
        ("file.py:made", [], "file.py:made is a module: name a function that makes it"),
        ("file.py:SOURCE", [], "file.py has no SOURCE"),
        ("torch:float32", [], "torch:float32 is a dtype, not a function"),
    ],
)
def test_what_cannot_train(models, model, shapes, message):
    with pytest.raises(ImportModelError, match=message):
        trainable(model, shapes)


def test_a_file_with_an_error_of_syntax(models):
    (models / "file.py").write_text("x = 1\ndef broken(:\n")
    with pytest.raises(ImportModelError, match=r"file\.py, line 2: invalid syntax"):
        trainable("file.py:broken")


def test_an_exported_program_with_keyword_arguments(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    torch.export.save(torch.export.export(Net(), (), {"x": torch.ones(2, 3)}), tmp_path / "net.pt2")
    with pytest.raises(ImportModelError, match=r"has keyword arguments \(x\): export the module with positional ones"):
        trainable(str(tmp_path / "net.pt2"))


def test_errors_of_the_users_code_are_told_with_their_line(models):
    (models / "broken.py").write_text("import a_package_that_is_not_there")
    with pytest.raises(ImportModelError, match=r"broken cannot be imported: .*a_package_that_.*broken.py, line 1\)"):
        trainable("broken:alone")
    (models / "fails.py").write_text("def alone():\n    raise RuntimeError('boom')")
    with pytest.raises(ImportModelError, match=r"fails:alone failed: RuntimeError: boom \(.*fails.py, line 2\)"):
        trainable("fails:alone")


def test_a_module_by_the_flat_tensors_of_its_graph(models):
    (models / "nested.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, pair, scale):\n"
        "        return {'sum': pair['a'] + pair['b'][0], 'more': (pair['a'] * scale, None, 3)}\n"
        "def net():\n"
        "    return Net(), ({'a': torch.ones(2), 'b': [torch.full((2,), 3.0)]}, 5.0)\n"
    )
    graph = graph_named("nested.py:net")
    make = original_of(graph, "nested.py:net")
    assert make is not None
    module = make()
    assert [result.tolist() for result in module(*module.examples)] == [[4, 4], [5, 5]]
    assert copy.deepcopy(pickle.loads(pickle.dumps(make))()).examples[1].tolist() == [3, 3]
    assert original_of(graph, "resnet50") is None


def test_the_loss_of_results_without_one():
    results = {"a": torch.full((2, 2), 2.0), "b": (torch.tensor([3.0]), torch.tensor([1]))}
    assert mean_square(results) == 13
    with pytest.raises(ImportModelError, match="no floating-point result"):
        mean_square(torch.tensor([1]))
