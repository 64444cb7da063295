"""Profiles under common names, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.layers import (
    Layer,
    compare_layers,
    prepare_fmtprop,
    prepare_onnxruntime,
    prepare_openvino,
    read_onnxruntime,
)
from fmtprop.api import Options, random_inputs
from fmtprop.bench.contenders import export
from fmtprop.capture import GraphModule, load, save


def event(name: str, op: str, milliseconds: float, dims: list[int]) -> dict[str, object]:
    arguments = {"op_name": op, "output_type_shape": [{"float": dims}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": 1e3 * milliseconds, "args": arguments}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("convolution", "GroupConvolution", "FusedConv"), "convolution"),
        (("matmul", "inner_product", "FullyConnected", "MatMul", "FusedGemm"), "product"),
        (("reorder", "Reorder", "ReorderInput", "Transpose"), "copy"),
        (("softmax", "SoftMax", "Softmax"), "softmax"),
        (("concat", "Concatenation", "Concat"), "concat"),
        (("layer_normalization", "MVN", "LayerNormalization"), "normalization"),
        (("Tile",), "tile"),
    ],
)
def test_runtimes_agree_on_kinds(names: tuple[str, ...], kind: str) -> None:
    assert {Layer.of(name, (), "", 0.0).kind for name in names} == {kind}


def test_groups_are_ordered_by_what_we_lose_to_the_fastest() -> None:
    profiles = {
        "us": [Layer("a", (8,), "x", 3.0), Layer("a", (8,), "y", 4.0), Layer("b", (), "z", 9.0)],
        "slow": [Layer("a", (8,), "s", 20.0), Layer("b", (), "s", 8.5)],
        "fast": [Layer("a", (8,), "f", 5.0), Layer("b", (), "f", 8.6), Layer("c", (2,), "f", 1.0)],
    }
    first, second, third = compare_layers(profiles)
    assert (first.kind, first.dims, first.milliseconds["us"], first.impls["us"]) == ("a", (8,), 7.0, "y, x")
    assert first.counts == {"us": 2, "slow": 1, "fast": 1}
    assert second.kind == "b"
    assert third.milliseconds == {"us": 0, "slow": 0, "fast": 1.0} and third.impls["us"] == ""
    assert [group.dims for group in compare_layers(profiles, by_size=False)] == [(), (), ()]


def test_onnxruntimes_first_runs_do_not_count() -> None:
    events = [event("conv1", "Conv", ms, [1, 8, 4, 4]) for ms in (90.0, 50.0, 2.0, 4.0, 3.0)]
    events.append({"cat": "Session", "name": "model_run", "dur": 1})
    events.append({**event("conv1", "Conv", 1.0, []), "name": "conv1_fence_before"})
    assert read_onnxruntime(events) == [Layer("convolution", (8, 4, 4), "Conv", 3.0)]


def test_our_profile(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    save(load("chain"), tmp_path / "graph.json")
    torch.save(random_inputs(load("chain")), tmp_path / "inputs.pt")
    layers = prepare_fmtprop(tmp_path, Options(policy="plain"), threads, 2)()
    assert [layer.kind for layer in layers] == ["convolution", "pooling"]
    assert [layer.dims for layer in layers] == [(32, 32, 32), (32, 16, 16)]
    assert all(layer.milliseconds > 0 and layer.impl for layer in layers)


@pytest.mark.peers
def test_profiles_of_the_other_runtimes(tmp_path: Path) -> None:
    graph = load("residual")
    inputs = random_inputs(graph)
    torch.save(inputs, tmp_path / "inputs.pt")
    onnx = tmp_path / "onnx" / "model.onnx"
    export(partial(GraphModule, graph), tuple(inputs), onnx)
    for layers in (
        prepare_openvino(tmp_path, onnx, "f32", 1, 2)(),
        prepare_onnxruntime(tmp_path, onnx, 1, 2)(),
    ):
        convolutions = [layer for layer in layers if layer.kind == "convolution"]
        assert len(convolutions) == sum(node.op == "convolution" for node in graph)
        assert all(layer.milliseconds > 0 and layer.impl for layer in convolutions)
        assert {layer.dims for layer in convolutions} == {(32, 32, 32)}
