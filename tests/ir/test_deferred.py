"""Constants that are read when they are asked for: as the same numbers, in the same places, or with an error."""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import fmtprop
from fmtprop import dnnl
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.stages import normalise
from fmtprop.errors import GraphError
from fmtprop.ir.deferred import Deferred
from fmtprop.ir.file import load, save
from fmtprop.ir.graph import Graph
from fmtprop.ir.initialiser import Initialiser
from fmtprop.ir.tensors import defer, materialise, tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.passes.rewrites.fold_batch_norm import FoldBatchNorm

#: more than is read at once
LARGE = (96, 16, 4, 4)


def graph_of(**constants: torch.Tensor) -> Graph:
    graph = Graph("constants")
    for name, data in constants.items():
        graph.output(graph.constant(name, tensor_type(data), data))
    return graph


class Net(torch.nn.Module):
    """Weights that are scaled, permuted, reshaped, sliced, shared, and read by steps as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 96, 4)
        self.norm = torch.nn.BatchNorm2d(96)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.fc = torch.nn.Linear(96 * 9, 64)
        self.product = torch.nn.Parameter(torch.randn(64, 512))
        self.table = torch.nn.Parameter(torch.randn(300, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(self.norm(self.conv(x)).relu().flatten(1))
        y = (y @ self.product) @ self.product.t()
        return y @ self.table.t() + (y * self.table[7]).sum(1, keepdim=True) + self.table[:, 3]


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1, 16, 6, 6)
    path = tmp_path / "net.json"
    save(fmtprop.from_torch(Net().eval(), x), path)
    return path, x


def test_large_tensors_are_read_when_they_are_asked_for(tmp_path):
    large, small = torch.randn(LARGE), torch.randn(5, 5)
    save(graph_of(large=large, small=small, one=torch.ones(1)), tmp_path / "g.json")
    graph = load(tmp_path / "g.json", deferred=True)
    assert isinstance(graph.constants["small"], torch.Tensor)
    later = graph.constants["large"]
    assert isinstance(later, Deferred)
    assert (later.type_, later.stride()) == (tensor_type(large), large.stride())
    assert torch.equal(later.make(), large)
    later.make().zero_()  # of a mapping that is nobody else's
    assert torch.equal(later.make(), large)
    assert isinstance(load(tmp_path / "g.json").constants["large"], torch.Tensor)


def test_what_follows_is_made_as_late():
    made = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.ones(2, 3)

    data = Deferred(tensor_type(torch.ones(2, 3)), (3, 1), make, largest=1.0)
    turned = data.viewed(lambda t: t.t(), tensor_type(torch.ones(3, 2)), (1, 3))
    doubled = turned.then(lambda t: 2 * t, identity="doubled", fresh=True, largest=2.0)
    assert not made
    assert torch.equal(materialise(doubled, doubled.type_), torch.full((3, 2), 2.0))
    assert (doubled.shape, doubled.stride(), len(made)) == ((3, 2), (1, 3), 1)
    assert [(one.fresh, one.largest) for one in (turned, doubled)] == [(False, 1.0), (True, 2.0)]


@pytest.mark.parametrize("data", [
    Initialiser.normal(1, 0.5, 2.0), Initialiser.uniform(1, -3.0, 1.0), Initialiser.constant(-2.0)
], ids=str)  # fmt: skip
def test_what_is_drawn_has_a_bound_and_its_own_memory(data):
    graph = Graph("drawn")
    graph.output(graph.constant("w", TensorType(LARGE), data))
    late = defer(graph).constants["w"]
    tensor = late.make()
    assert late.fresh and tensor.abs().max() <= late.largest < 100
    tensor.zero_()
    assert torch.equal(late.make(), materialise(data, TensorType(LARGE)))
    assert late.make().stride() == late.stride()


def test_another_file_in_its_place_is_an_error(tmp_path):
    path = tmp_path / "g.json"
    save(graph_of(w=torch.zeros(LARGE)), path)
    later = load(path, deferred=True).constants["w"]
    save(graph_of(w=torch.ones(LARGE)), path)
    with pytest.raises(GraphError, match=r"g\.safetensors have changed since they were found; load it again"):
        later.make()
    os.remove(tmp_path / "g.safetensors")
    with pytest.raises(GraphError, match=r"its weights are missing: there is no .*g\.safetensors"):
        later.make()


def test_passes_make_of_it_what_they_make_of_tensors(saved):
    path, _ = saved
    late, now = (normalise(load(path, deferred=deferred))[0] for deferred in (True, False))
    assert [node.op for node in late.nodes()] == [node.op for node in now.nodes()]
    assert sum(isinstance(data, Deferred) for data in late.constants.values()) >= 4
    for name, data in late.constants.items():
        type_ = late.node(name).results[0]
        made, known = materialise(data, type_), now.constants[name]
        assert torch.equal(made, known)
        assert data.stride() == made.stride() == known.stride()


def lowered_to_f32():
    """Expect the warning of a CPU without bf16, where this is one."""
    if dnnl.supports("bf16"):
        return nullcontext()
    return pytest.warns(RuntimeWarning, match="target onednn has no bf16 on this CPU")


@pytest.mark.parametrize("options", [{}, {"verify": "full"}, {"dtype": "bf16"}, {"target": "mkldnn"}], ids=str)
def test_a_file_is_compiled_to_what_its_graph_is(saved, options):
    path, x = saved
    with lowered_to_f32() if options.get("dtype") == "bf16" else nullcontext():
        # equal bits come from equal plans
        late, now = (fmtprop.compile(one, deterministic=True, **options) for one in (path, load(path)))
    assert torch.equal(late(x), now(x))
    path.with_suffix(".safetensors").write_bytes(b"")  # what a plan reads is its own
    assert torch.equal(late(x), now(x))


def after_normalising(monkeypatch, do):
    """Let each compilation do something with its normal graph."""
    usual = Compilation.normalise

    def normalise(self, *args):
        do(usual(self, *args))
        return self.normal

    monkeypatch.setattr(Compilation, "normalise", normalise)


def test_planning_holds_no_large_weights(saved, monkeypatch):
    path, x = saved
    held = []

    after_normalising(
        monkeypatch,
        lambda normal: held.extend(data for data in normal.constants.values() if isinstance(data, torch.Tensor)),
    )
    fmtprop.compile(path)(x)
    assert held
    assert all(tensor.numel() * tensor.element_size() <= 1 << 16 for tensor in held)


def test_a_file_that_changes_while_it_is_compiled_is_an_error(saved, monkeypatch):
    path, _ = saved
    side = path.with_suffix(".safetensors")

    after_normalising(monkeypatch, lambda normal: side.write_bytes(side.read_bytes()[:-4]))
    with pytest.raises(GraphError, match=r"have changed since they were found|cannot be read"):
        fmtprop.compile(path)


@pytest.mark.parametrize("largest", [1e38, 3e38, float("nan")])
def test_weights_that_would_overflow_are_not_folded(saved, largest):
    path, _ = saved
    graph = load(path)
    weights = next(graph.inputs(node.name)["weights"].node for node in graph.nodes() if node.op == "convolution")
    graph.constants[weights][3, 2, 1, 0] = largest
    save(graph, path)
    folded = FoldBatchNorm().run(load(path, deferred=True))
    fits = largest < 2e38  # factors are less than 1 / sqrt(0.5)
    assert any(node.op == "batch_normalization" for node in folded.nodes()) is not fits


def test_what_breaks_a_rule_is_told_as_ever():
    for name, data, told in [
        ("w", torch.zeros(3, 96, 96), r"data is f32\[3,96,96\], but the node declares f32\[96,16,4,4\]"),
        ("w", np.zeros(LARGE, np.float32), "constant data must be a torch.Tensor"),
        ("w", [0.0], "data must be a torch tensor"),
        ("output_1", torch.zeros(LARGE), "which is not a constant"),
        ("nobody", torch.zeros(LARGE), "which is not a constant"),
    ]:
        graph = graph_of(w=torch.zeros(LARGE))
        graph.constants[name] = data
        with pytest.raises(GraphError, match=told):
            fmtprop.compile(graph)
