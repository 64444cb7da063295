"""Graphs as ONNX models: each op by its samples, plans with their formats, and what cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import checker
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.compiling.snapshots import snapshots
from fmtprop.errors import GraphError, ImportModelError, UnsupportedOpError
from fmtprop.ir import Graph, TensorType
from fmtprop.ir.node import Value
from fmtprop.ir.op import OpDef, Sample
from fmtprop.ir.tensors import torch_dtype
from fmtprop.onnx.model import export, from_onnx
from fmtprop.onnx.model.elements import array_of, from_array
from fmtprop.ops import OPS, Eltwise, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.ops.host_call import host_call
from tests import processes

#: f32, whose sums are added in another order
TOLERANCE = 2e-6

SAMPLES = [pytest.param(d, s, id=f"{d.name}-{s.name}") for d in OPS if d.onnx is not None for s in d.samples()]


def graph_of(declaration: OpDef, sample: Sample) -> Graph:
    graph = Graph("sample")
    value = emit(graph, declaration.name, {k: graph.input(k, t) for k, t in sample.types.items()}, sample.attrs)
    for index in range(len(graph.node(value.node).results)):
        graph.output(Value(value.node, index))
    return graph


def inputs_of(graph: Graph, low: float = -1.0, high: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    types = {node.name: node.results[0] for node in graph.input_nodes}
    drawn = {name: torch.rand(t.dims) * (high - low) + low for name, t in types.items()}
    return {name: x.to(torch_dtype(types[name].dtype)) for name, x in drawn.items()}


def check(graph: Graph, inputs: dict[str, torch.Tensor], results: list[Any], tolerance: float = TOLERANCE) -> None:
    for expected, result in zip(evaluate(graph, inputs), results, strict=True):
        got = from_array(np.asarray(result))
        assert got.dtype == expected.dtype
        bound = tolerance * max(1.0, float(expected.double().abs().max())) if expected.numel() else 0
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=bound, equal_nan=True)


def exported(graph: Graph) -> onnx.ModelProto:
    model = export.model_of(graph)
    checker.check_model(model, full_check=True)
    return model


def run_reference(graph: Graph, inputs: dict[str, torch.Tensor]) -> list[Any]:
    model = exported(graph)
    return list(ReferenceEvaluator(model).run(None, {name: array_of(x) for name, x in inputs.items()}))


def run_onnxruntime(graph: Graph, inputs: dict[str, torch.Tensor]) -> list[Any]:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(exported(graph).SerializeToString(), options)
    return list(session.run(None, {name: x.numpy() for name, x in inputs.items()}))


@pytest.mark.parametrize("declaration, sample", SAMPLES)
def test_an_op_means_the_same_when_it_is_read_again(declaration: OpDef, sample: Sample) -> None:
    graph = graph_of(declaration, sample)
    inputs = inputs_of(graph, sample.low, sample.high)
    again = from_onnx(exported(graph))
    assert [(n.name, n.results) for n in again.input_nodes] == [(n.name, n.results) for n in graph.input_nodes]
    check(graph, inputs, [array_of(x) for x in evaluate(again, inputs)])


@pytest.mark.peers
@pytest.mark.parametrize("declaration, sample", SAMPLES)
def test_an_op_means_the_same_in_onnx_runtime(declaration: OpDef, sample: Sample) -> None:
    graph = graph_of(declaration, sample)
    if any(node.results and node.results[0].dtype.value == "bf16" for node in graph.nodes()):
        pytest.skip("numpy has no bf16, so ONNX Runtime takes none")
    inputs = inputs_of(graph, sample.low, sample.high)
    check(graph, inputs, run_onnxruntime(graph, inputs))


def test_16_bit_floats_are_computed_in_f32_and_rounded_once() -> None:
    graph = Graph("narrow")
    x = graph.input("x", TensorType((2, 9), "bf16"))
    graph.output(emit(graph, "softmax", {"src": x}, fp.ops.Softmax(1)))
    assert [node.op_type for node in exported(graph).graph.node] == ["Cast", "Softmax", "Cast"]
    inputs = inputs_of(graph)
    check(graph, inputs, run_reference(graph, inputs), 0)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(32, 8, 4, 2, 1, groups=2),
        torch.nn.SiLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 16 * 16, 10),
    ).eval()


def test_a_plan_has_its_formats_as_metadata(tmp_path: Path) -> None:
    model, x = network(), torch.rand(2, 3, 8, 8)
    net = fp.compile(model, x, tune="model", confirm=False)
    path = tmp_path / "plan.onnx"
    fp.save(net.compilation.with_constants(), path)
    read = onnx.load(path)
    facts = {node.name: {p.key: p.value for p in node.metadata_props} for node in read.graph.node}
    # a view may be a part of the next node's own
    steps = [node for node in net.graph.nodes() if not node.is_boundary and node.choice.target != "view"]
    assert {found["fmtprop.node"] for found in facts.values()} == {node.name for node in steps}
    for node in steps:
        found = next(f for f in facts.values() if f["fmtprop.node"] == node.name)
        assert found["fmtprop.implementation"] == node.choice.impl
        assert found["fmtprop.format.dst"] == (node.descs[0].tag or str(node.descs[0]))
    reorders = [node for node in read.graph.node if node.op_type == "Identity"]
    assert len(reorders) == net.graph.count("reorder") > 0
    again = from_onnx(path)
    got = evaluate(again, {again.input_nodes[0].name: x})
    torch.testing.assert_close(got[0], model(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("stage", ["imported", "normal", "formatted"])
@pytest.mark.parametrize("name", ["chain", "concat", "residual", "shufflenet_v2", "unet", "mobilenet_v2"])
def test_a_network_gives_the_same_in_onnx_runtime(name: str, stage: str, dtype: str) -> None:
    graph = fp.load(name)
    shown = snapshots(graph, stage, policy="optimal", dtype=dtype)[-1].graph
    inputs = inputs_of(graph)
    check(shown, inputs, run_onnxruntime(shown, inputs), 1e-5 if dtype == "f32" else 2e-2)


def test_what_was_read_is_written_as_it_was(tmp_path: Path) -> None:
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    fp.save(fp.load("shufflenet_v2"), first)
    graph = fp.load(first)
    fp.save(graph, second)
    again = fp.load(second)
    for ours, theirs in zip(graph.nodes(), again.nodes(), strict=True):
        assert (ours.op, ours.attrs, ours.results) == (theirs.op, theirs.attrs, theirs.results)
    assert [(n.name, n.op) for n in graph.output_nodes] == [(n.name, n.op) for n in again.output_nodes]
    for name, constant in graph.constants.items():
        assert torch.equal(constant, again.constants[name])


def calls() -> Graph:
    """Two calls of one kind and one of another, which PyTorch's exporter writes."""
    graph = Graph("calls")
    x = graph.input("x", TensorType((3, 5)))
    roll, _ = host_call("aten.roll.default", {"self": Value("x"), "shifts": [1], "dims": [1]})
    top, _ = host_call("aten.topk.default", {"self": Value("x"), "k": 2})
    once = emit(graph, "aten", {"src_0": x}, roll)
    twice = emit(graph, "aten", {"src_0": once}, roll)
    values = emit(graph, "aten", {"src_0": twice}, top)
    graph.output(values)
    graph.output(Value(values.node, 1))
    graph.output(once)
    graph.output(x)
    return graph


def test_calls_are_written_by_pytorchs_exporter() -> None:
    pytest.importorskip("onnxscript")
    graph = calls()
    inputs = inputs_of(graph)
    check(graph, inputs, run_reference(graph, inputs))


def test_a_call_that_onnx_cannot_express_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    graph = Graph("eigen")
    attrs, _ = host_call("aten.linalg_eigvalsh.default", {"self": Value("x")})
    graph.output(emit(graph, "aten", {"src_0": graph.input("x", TensorType((3, 3)))}, attrs, name="eigenvalues"))
    with pytest.raises(UnsupportedOpError, match=r"node eigenvalues \(aten\): PyTorch's exporter cannot write"):
        fp.save(graph, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_missing_onnxscript_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UnsupportedOpError, match=r"node aten_1 \(aten\).*needs the package onnxscript"):
        fp.save(calls(), tmp_path / "m.onnx")


def test_released_weights_are_one_error(tmp_path: Path) -> None:
    net = fp.compile(network(), torch.rand(1, 3, 8, 8), tune="model", confirm=False)
    with pytest.raises(GraphError, match=r"has no data any more.*net\.compilation\.with_constants\(\)"):
        fp.save(net.graph, tmp_path / "m.onnx")


def test_another_programs_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    graph = Graph("tiny")
    graph.output(emit(graph, "eltwise", {"src": graph.input("x", TensorType((2,)))}, Eltwise("relu")))
    with pytest.raises(ImportModelError, match="did not come from here and is not replaced"):
        fp.save(graph, path)
    path.unlink()
    fp.save(graph, path)
    fp.save(graph, path)  # its own is


def test_large_weights_are_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_INLINE_NBYTES", 4096)
    graph = fp.from_torch(network(), torch.rand(1, 3, 8, 8))
    path = tmp_path / "m.onnx"
    for _ in range(2):
        fp.save(graph, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    checker.check_model(str(path), full_check=True)
    again = fp.load(path)
    inputs = inputs_of(graph)
    check(graph, inputs, [array_of(x) for x in evaluate(again, inputs)])


def test_the_command_saves_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.onnx"
    done = processes.run("-m", "fmtprop", "show", "chain", "-o", path)
    assert (done.returncode, done.stdout) == (0, "")
    assert any(p.key == "fmtprop.implementation" for node in onnx.load(path).graph.node for p in node.metadata_props)
