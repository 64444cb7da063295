"""Contenders by name, and a race of a graph in processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import peak
from benchmarks.flops import count_flops
from benchmarks.peak import DEPTH, PEAK, PEAK_FLOPS, kernels, prepare_peak
from fmtprop import dnnl
from fmtprop.api import CompiledModel, Options, compile_graph, random_inputs
from fmtprop.bench import PEERS, TorchEager
from fmtprop.bench.contenders import Contender, Material, against, contender, race
from fmtprop.capture import from_torch, load
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph


def test_every_contender_has_a_precision() -> None:
    precisions = {name: contender(name).precision for name in ["fmtprop", "fmtprop-bf16", *PEERS]}
    assert precisions == {
        name: suffix if (suffix := name.rpartition("-")[2]) in ("bf16", "f16") else "f32" for name in precisions
    }


def test_variants_change_the_options_that_they_name() -> None:
    base = Options(policy="naive", verify="off")
    assert contender("fmtprop", base).how == base
    assert contender("fmtprop-plain", base).how == Options(policy="plain", verify="off")
    assert contender("fmtprop-model-bf16-propagate", base).how == Options(
        "bf16", "propagate", tune="model", verify="off"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tvm", r"unknown contender 'tvm'; known: fmtprop, fmtprop-VALUE with .*, openvino-f16"),
        ("fmtprop-quick", r"unknown contender 'fmtprop-quick': 'quick' is not a value of dtype, policy or tune"),
        ("fmtprop-", r"unknown contender 'fmtprop-': '' is not a value of dtype, policy or tune"),
    ],
)
def test_unknown_contender(name: str, message: str) -> None:
    with pytest.raises(FmtpropError, match=f"^{message}$"):
        contender(name)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_type_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Another precision must not be timed under its name."""
    monkeypatch.setattr(dnnl, "supports", lambda one: one != dtype)
    material = Material(load("chain"), nn.Identity, (), Path("none.onnx"), torch.get_num_threads())
    with pytest.raises(FmtpropError, match=rf"^fmtprop-{dtype}: oneDNN has no {dtype} on this CPU"):
        contender(f"fmtprop-{dtype}").prepare(material)


class Absent(TorchEager):
    """A peer that is not there."""

    @property
    def name(self) -> str:
        return "absent"

    def prepare(self, module: nn.Module, example_inputs: object, threads: int) -> object:
        raise FmtpropError("package 'absent' is not installed")


class Twice(nn.Module):
    """Not what the graph is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_race() -> None:
    contenders = [contender("fmtprop-plain"), contender("torch"), Contender("absent", Absent())]
    result = race(
        load("chain"),
        contenders,
        reference="torch",
        threads=1,
        rounds=2,
        repeats=1,
        others={PEAK: partial(prepare_peak, "f32", 1)},
    )
    assert [entry.name for entry in result.entries] == ["fmtprop-plain", "torch", "absent", PEAK]
    ours, torch_, absent, peak = result.entries
    assert all(entry.agreement.passed and len(entry.milliseconds) == 2 for entry in (ours, torch_, peak))
    assert torch_.agreement.error == 0.0, "torch is its own oracle"
    assert result.failures == ("absent cannot run here: package 'absent' is not installed",)
    assert absent.latency is None and not json.loads(result.to_json())["entries"][2]["agreement"]["ran"]
    assert {"fmtprop", "onednn", "torch"} <= set(result.environment.versions)


def test_module_and_inputs_are_the_callers() -> None:
    """Peers take the module, fmtprop the graph, all the same inputs: a graph that computes something else is found."""
    (x,) = random_inputs(load("chain"), seed=5)
    contenders = [contender("fmtprop"), contender("torch")]
    result = race(load("chain"), contenders, reference="torch", threads=1, rounds=1, inputs=[x], module=Twice)
    assert result["torch"].agreement.error == 0.0
    assert result["fmtprop"].agreement.message == "output 0: shape (1, 32, 16, 16), expected (1, 3, 32, 32)"


class Watcher(TorchEager):
    """Says in its process what it was given."""

    def prepare(self, module, example_inputs, threads):
        weights = sum(p.numel() for p in module.parameters())
        if (weights, threads, torch.get_num_threads()) != (896, 1, 1):
            raise FmtpropError(f"was given {weights} weights and {threads} threads")
        if [tuple(x.shape) for x in example_inputs] != [(1, 3, 32, 32)]:
            raise FmtpropError("was given other inputs")
        return super().prepare(module, example_inputs, threads)


class Wrong(TorchEager):
    name = "wrong"

    def prepare(self, module, example_inputs, threads):
        return lambda *inputs: 2 * module(*inputs) + 1


def test_everyone_gets_the_same_and_the_text_says_what_came_out():
    told = []
    entrants = [contender("fmtprop"), Contender("torch", Watcher()), Contender("wrong", Wrong())]
    result = race(
        load("chain"),
        entrants,
        reference="torch",
        threads=1,
        rounds=2,
        progress=lambda what, done, total: told.append((what, done)),
    )
    assert result.environment.threads == 1
    assert [entry.name for entry in result.entries] == ["fmtprop", "torch", "wrong"]
    assert result.reference == "torch" and result["fmtprop"].speedup is not None
    assert told[0] == ("preparing fmtprop", 0) and told[-1] == ("timing", 4)
    text = result.to_text()
    assert "speed-up over torch" in text and "1 thread of" in text
    (row,) = [line for line in text.splitlines() if line.startswith("│ wrong")]
    assert row.count("not timed") == 2
    (failure,) = result.failures
    assert failure.startswith("wrong disagrees with the oracle and was not timed: output 0: largest relative error")
    assert failure[:80] in text


def test_nested_arguments_and_results_are_flattened():
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sum": x + more["y"], "relu": x.relu()}

    graph = from_torch(Net().eval(), (torch.randn(2, 3), {"y": torch.randn(2, 3)}))
    result = race(graph, against(["torch"]), rounds=1)
    assert result.failures == ()
    assert graph.structure, "the graph itself keeps its structure"


def test_peers_are_checked_before_the_work():
    with pytest.raises(FmtpropError, match="no peer to compare with; give at least one, such as torch"):
        against([])
    with pytest.raises(FmtpropError, match="peer 'torch' is given twice"):
        against(["torch", "torch"])
    with pytest.raises(FmtpropError, match="unknown contender 'tflite'; known: fmtprop,"):
        against(["tflite"])


@pytest.mark.peers
def test_the_other_runtimes():
    result = race(load("residual"), against(["torch", "onnxruntime", "openvino"]), rounds=1, repeats=1)
    assert result.failures == ()
    assert set(result.environment.versions) >= {"onnxruntime", "openvino"}


@pytest.mark.parametrize("index", range(len(kernels())))
def test_the_kernels_of_the_peak_have_the_same_operations(index: int) -> None:
    module, x = kernels()[index]
    assert count_flops(from_torch(module, x)) == PEAK_FLOPS
    assert len(list(module.children())) == DEPTH


def test_no_kernel_of_the_peak_saves_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def compile_and_keep(graph: Graph, options: Options) -> CompiledModel:
        net = compile_graph(graph, options)
        plans.append(net.plan)
        return net

    monkeypatch.setattr(peak, "compile_graph", compile_and_keep)
    threads = torch.get_num_threads()
    try:
        prepare_peak("f32", threads)
    finally:
        torch.set_num_threads(threads)
    for plan in plans:
        products = [step for step in plan.steps if step.node.op in ("convolution", "inner_product", "matmul")]
        assert len(products) == DEPTH, "Winograd's filtering is made of matrix products, and of transforms"
    assert len(plans) == len(kernels())
