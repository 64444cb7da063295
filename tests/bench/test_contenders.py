"""Contenders by name, and a race of a graph in processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fmtprop import dnnl
from fmtprop.api import CompiledModel, Options, compile_graph, random_inputs
from fmtprop.bench import PEERS, TorchEager, peak
from fmtprop.bench.contenders import Contender, Material, contender, race_in_processes
from fmtprop.bench.flops import count_flops
from fmtprop.bench.peak import DEPTH, PEAK, PEAK_FLOPS, kernels
from fmtprop.errors import FmtpropError
from fmtprop.frontends import from_torch, load
from fmtprop.ir.graph import Graph


def test_every_contender_has_a_precision() -> None:
    precisions = {name: contender(name).precision for name in ["fmtprop", "fmtprop-bf16", *PEERS]}
    assert precisions.pop("fmtprop-bf16") == precisions.pop("openvino-bf16") == "bf16"
    assert set(precisions.values()) == {"f32"}


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
        ("tvm", r"unknown contender 'tvm'; known: fmtprop, fmtprop-VALUE with .*, openvino-bf16"),
        ("fmtprop-quick", r"unknown contender 'fmtprop-quick': 'quick' is no value of dtype, policy or tune"),
        ("fmtprop-", r"unknown contender 'fmtprop-': '' is no value of dtype, policy or tune"),
    ],
)
def test_unknown_contender(name: str, message: str) -> None:
    with pytest.raises(FmtpropError, match=f"^{message}$"):
        contender(name)


def test_bf16_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another precision must not be timed under bf16's name."""
    monkeypatch.setattr(dnnl, "supports", lambda dtype: dtype != "bf16")
    material = Material(load("chain"), nn.Identity, (), Path("none.onnx"), torch.get_num_threads())
    with pytest.raises(FmtpropError, match=r"^fmtprop-bf16: oneDNN has no bf16 on this CPU"):
        contender("fmtprop-bf16").prepare(material)


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
    result = race_in_processes(load("chain"), contenders, reference="torch", threads=1, rounds=2, repeats=1, peak=True)
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
    result = race_in_processes(
        load("chain"), contenders, reference="torch", threads=1, rounds=1, inputs=[x], module=Twice
    )
    assert result["torch"].agreement.error == 0.0
    assert result["fmtprop"].agreement.message == "output 0: shape (1, 32, 16, 16), expected (1, 3, 32, 32)"


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
        peak.prepare_peak("f32", threads)
    finally:
        torch.set_num_threads(threads)
    for plan in plans:
        products = [step for step in plan.steps if step.node.op in ("convolution", "inner_product", "matmul")]
        assert len(products) == DEPTH, "Winograd's filtering is made of matrix products, and of transforms"
    assert len(plans) == len(kernels())
