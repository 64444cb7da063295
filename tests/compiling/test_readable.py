"""A plan's graph gets its constants back, from what packing left of them."""

from __future__ import annotations

import gc

import pytest
import torch

import fmtprop as fp
from fmtprop.builtin import builtin_names
from fmtprop.capture import load
from fmtprop.ops.evaluate import evaluate
from tests.threads import torch_threads

#: seconds rather than minutes; unet is the one in which packing consumes constants
SMALL = ("chain", "concat", "unet")


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in builtin_names()]
)
def test_plans_of_built_in_networks_are_saved(name, tmp_path):
    net = fp.compile(name, tune="model", confirm=False)
    fp.save(net.compilation.with_constants(), tmp_path / "plan.json")
    fp.save(net.compilation.with_constants(), tmp_path / "plan.onnx")
    assert len(load(str(tmp_path / "plan.json"))) > 0


def test_a_plans_graph_outlives_its_model(tmp_path):
    graph = fp.compile("chain", tune="model", confirm=False).compilation.with_constants()
    gc.collect()
    fp.save(graph, tmp_path / "plan.onnx")


def test_a_graph_without_consumed_constants_computes_the_same():
    net = fp.compile("unet", tune="model", confirm=False)
    graph = net.compilation.with_constants()
    consumed = {node.name for node in net.graph.nodes()} - {node.name for node in graph.nodes()}
    if not any(net.graph.node(name).op == "constant" for name in consumed):
        pytest.skip("on this instruction set the plan consumes no constant")
    assert all(node.choice is not None for node in graph.nodes())  # plans for other numbers of threads are made of it
    inputs = net.random_inputs()
    names = [node.name for node in graph.input_nodes]
    for got, expected in zip(evaluate(graph, dict(zip(names, inputs, strict=True))), net.run_flat(inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_slices_of_weights_are_packed_anew_for_other_threads():
    module = torch.nn.Conv3d(16, 16, 3, groups=16, padding=1).eval()
    x = torch.randn(1, 16, 6, 4, 4)
    with torch_threads(1):
        net = fp.compile(module, (x,), tune="model", confirm=False)
    for threads in (1, 2, 3):
        with torch_threads(threads), torch.no_grad():
            torch.testing.assert_close(net(x), module(x), rtol=0, atol=1e-5)
