"""Whatever the costs are: the answer is right, the certificate is true, and the greedy policy is no better by them."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fmtprop as fp
from fmtprop.api import Options, compile_graph
from fmtprop.capture import from_torch, load
from fmtprop.layout import MemoryDesc
from fmtprop.passes.optimal import price
from tests.models.odd import RandomCosts, compile_odd, odd_planner
from tests.modules import Function
from tests.threads import torch_threads

QUICK = Options(policy="optimal", tune="model", confirm=False)
WEIGHTS = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0)) / 8


def convolution(x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(x, WEIGHTS, padding=1))


pytestmark = pytest.mark.usefixtures("cache_of_module")


def check_graph(name: str, seed: int) -> None:
    graph = load(name)
    with odd_planner(seed):
        net = compile_graph(graph, QUICK)
    certificate = net.certificate
    assert certificate.objective == pytest.approx(price(net.graph, RandomCosts(seed)), rel=1e-9)
    assert certificate.gap == 0.0 and certificate.optimal
    assert certificate.objective <= certificate.propagate * (1 + 1e-9)
    inputs = net.random_inputs()
    expected = compile_graph(load(name), Options(policy="plain")).run_flat(inputs)
    for number in (1, 2):
        with torch_threads(number):
            for got, want in zip(net.run_flat(inputs), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["chain", "residual", "concat"])
def test_built_in_graphs_by_random_costs(name, seed):
    check_graph(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "densenet121", "shufflenet_v2"])
def test_large_graphs_by_random_costs(name, seed):
    check_graph(name, seed)


# ---------------------------------------------------------------- boundaries


@pytest.mark.parametrize("sides", ["both", "src", "dst"])
def test_no_reorder_where_the_boundary_is_what_the_convolution_likes(sides):
    x = torch.randn(2, 8, 9, 9)
    graph = from_torch(Function(convolution), (x,))
    src, dst = graph.input_nodes[0].name, graph.output_nodes[0].name
    boundary = {
        src: MemoryDesc((2, 8, 9, 9), tag="acdb"),
        dst: MemoryDesc((2, 16, 9, 9), tag="acdb"),
    }
    given = {
        name: desc for name, desc in boundary.items() if sides == "both" or name == {"src": src, "dst": dst}[sides]
    }
    net = compile_graph(graph, replace(QUICK, boundary=given, pin={"conv_1.dst": "nhwc", "conv_1.src": "nhwc"}))
    assert net.graph.node(net.graph.input_nodes[0].name).descs[0].tag == ("abcd" if sides == "dst" else "acdb")
    moved = [node for node in net.graph.nodes() if node.op == "reorder" and node.name not in
             {packed.name for packed in net.plan.packed}]  # fmt: skip
    assert len(moved) == (0 if sides == "both" else 1)
    for given_x in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
        torch.testing.assert_close(net(given_x), convolution(given_x), rtol=1e-4, atol=1e-4)


BOUNDARY_CASES = {
    "bool inputs": (lambda a, b: (a & b).float() * 2, (torch.rand(3, 4) > 0.5, torch.rand(3, 4) > 0.5)),
    "int inputs": (lambda a, t: t[a] @ t.T, (torch.arange(5), torch.randn(7, 4))),
    "an empty batch": (lambda x: F.linear(convolution(x).flatten(1), torch.ones(5, 1296)), (torch.randn(0, 8, 9, 9),)),
    "a part of size zero": (lambda x: (torch.cat([x, x[:, :0]], 1).sum(1), x[:, :0] * 2), (torch.randn(3, 4),)),
    "one node": (F.relu, (torch.randn(3, 4),)),
    "a scalar": (lambda x: x * 2 + 1, (torch.tensor(3.0),)),
    "no node": (lambda x: x, (torch.randn(3, 4),)),
    "an output that is an input": (lambda x: (x, convolution(x)), (torch.randn(2, 8, 9, 9),)),
    "an output twice": (lambda x: [convolution(x)] * 2, (torch.randn(2, 8, 9, 9),)),
    "a constant output": (lambda x: (WEIGHTS * 2, F.relu(x)), (torch.randn(3, 4),)),
    "strided inputs": (
        lambda x, y: convolution(x) + convolution(y),
        (torch.randn(9, 9, 8, 2).permute(3, 2, 1, 0), torch.randn(1, 8, 9, 9).expand(2, 8, 9, 9)),
    ),
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("case", BOUNDARY_CASES)
def test_odd_boundaries(case, seed):
    function, inputs = BOUNDARY_CASES[case]
    graph = from_torch(Function(function), inputs)
    net = compile_graph(graph, QUICK) if seed is None else compile_odd(graph, seed)
    expected = function(*inputs)
    torch.testing.assert_close(net(*inputs), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------- tuning


def test_a_model_with_ops_of_the_reference_target_is_measured():
    x = torch.randn(1, 8, 9, 9)
    function = lambda x: torch.cumsum(convolution(x), 1).sort(-1)[0]  # noqa: E731
    net = fp.compile(Function(function), x, policy="optimal", tune="measure", tune_budget=5.0)
    assert net.tuning.measured and net.tuning.modelled
    torch.testing.assert_close(net(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("own_cache")
def test_a_tiny_budget_measures_nothing():
    x = torch.randn(1, 8, 9, 9)
    net = fp.compile(Function(convolution), x, policy="optimal", tune="measure", tune_budget=1e-9, confirm=False)
    assert net.tuning.measured == net.tuning.cached == 0
    torch.testing.assert_close(net(x), convolution(x), rtol=1e-4, atol=1e-4)


def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("FMTPROP_CACHE_DIR", str(blocked))
    x = torch.randn(1, 8, 9, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = fp.compile(Function(convolution), x, policy="optimal", tune="measure", tune_budget=0.3)
    told = [str(warning.message) for warning in caught if "the cache" in str(warning.message)]
    assert len(told) == 1, [str(warning.message) for warning in caught]
    torch.testing.assert_close(net(x), convolution(x), rtol=1e-4, atol=1e-4)


def test_two_threads_compile_the_same_model_at_once():
    x = torch.randn(1, 8, 9, 9)
    graph = from_torch(Function(convolution), (x,))
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = compile_graph(graph, Options(policy="optimal", tune="measure", tune_budget=0.5))(x)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 2
    for result in results.values():
        torch.testing.assert_close(result, convolution(x), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_compiles():
    x = torch.randn(1, 8, 9, 9)
    compile_graph(load("chain"), QUICK)
    expected = convolution(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net = fp.compile(Function(convolution), x, policy="optimal", tune="model")
            status = 0 if torch.allclose(net(x), expected, rtol=1e-4, atol=1e-4) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
