"""The graph on its way: which stages there are, what is kept."""

from __future__ import annotations

import pytest
import torch

from fmtprop import dnnl
from fmtprop.capture import from_torch, load
from fmtprop.compiling.options import Options
from fmtprop.compiling.snapshots import snapshots
from fmtprop.compiling.stages import normalise
from fmtprop.errors import FmtpropError, UnsupportedOpError
from fmtprop.ir.footprint import activations_nbytes
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import Binary, Conv
from fmtprop.ops.building import emit
from fmtprop.passes.pipeline import NORMALISE


def test_every_pass_in_order():
    shots = snapshots(load("residual"), passes=True)
    assert [shot.after for shot in shots] == ["", *(step.name for step in NORMALISE), "assign-formats"]
    assert [shot.stage for shot in shots] == ["imported", *["normal"] * len(NORMALISE), "formatted"]
    verify(shots[-2].graph, Stage.NORMAL)
    verify(shots[-1].graph, Stage.FORMATTED)


@pytest.mark.parametrize("stage", ["imported", "normal", "formatted"])
def test_the_last_alone(stage):
    (shot,) = snapshots(load("chain"), stage)
    assert shot.stage == stage
    assert any(node.descs for node in shot.graph) == (stage == "formatted")


def test_the_graph_given_stays_as_it_is():
    graph = load("chain")
    before = [(node, graph.inputs(node.name)) for node in graph]
    snapshots(graph, policy="naive")
    assert [(node, graph.inputs(node.name)) for node in graph] == before


def test_the_most_activations_of_a_node():
    graph = Graph("sizes")
    x = graph.input("x", TensorType((2, 8, 10, 10)))
    weights = graph.constant("w", TensorType((16, 8, 1, 1)), torch.ones(16, 8, 1, 1))
    y = emit(graph, "convolution", {"src": x, "weights": weights}, Conv.make(2))
    graph.output(emit(graph, "binary", {"src_0": y, "src_1": y}, Binary("add")), "z")
    assert activations_nbytes(graph) == 4 * max(1600 + 3200, 3200 + 3200)
    assert activations_nbytes(Graph("empty")) == 0


def test_titles():
    assert [shot.title for shot in snapshots(load("chain"), passes=True)][:2] == [
        "imported",
        "normal, after remove-identities",
    ]


@pytest.mark.usefixtures("usual_peaks")
@pytest.mark.parametrize(
    ("model", "policy", "target"),
    [
        ("residual", "naive", "onednn"),
        ("residual", "optimal", "onednn"),
        ("residual", "optimal", "mkldnn"),
        ("several", "optimal", "onednn"),
    ],
)
def test_what_is_shown_is_what_is_compiled(model, policy, target):
    from fmtprop.api import compile_graph

    # a convolution that runs as several nodes, and the built-in graphs
    wide = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()).eval()
    graph = from_torch(wide, torch.zeros(1, 64, 56, 56)) if model == "several" else load(model)
    options = Options(policy=policy, target=target, tune="model", confirm=False)
    net = compile_graph(graph, options)
    assert (net.graph.count("convolution") > 1) or model != "several"
    (shown,) = snapshots(graph, policy=policy, target=target)
    assert [(n.name, n.op, n.descs) for n in shown.graph] == [(n.name, n.op, n.descs) for n in net.graph]


def test_bf16_or_a_warning(monkeypatch):
    monkeypatch.setattr(dnnl, "supports", lambda dtype: True)
    lowered = []
    _, precision = normalise(load("chain"), "bf16", lambda name, graph: lowered.append(name))
    assert (precision, lowered[-1]) == ("bf16", "lower-precision")
    monkeypatch.setattr(dnnl, "supports", lambda dtype: False)
    with pytest.warns(RuntimeWarning, match=r"onednn has no bf16 on this CPU \(.+\): compute-intensive ops run in f32"):
        _, precision = normalise(load("chain"), "bf16")
    assert precision == "f32"


def test_f16_or_an_error(monkeypatch):
    monkeypatch.setattr(dnnl, "supports", lambda dtype: True)
    assert normalise(load("chain"), "f16")[1] == "f16"
    monkeypatch.setattr(dnnl, "supports", lambda dtype: False)
    with pytest.raises(UnsupportedOpError, match=r"onednn has no f16 on this CPU \(.+\): give dtype='bf16' or "):
        normalise(load("chain"), "f16")


@pytest.mark.parametrize(
    ("given", "name"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16"), ("float16", "f16")]
)
def test_a_data_type_may_be_pytorchs(given, name):
    assert Options(dtype=given).dtype == name


@pytest.mark.parametrize("wrong", [{"policy": "fast"}, {"dtype": torch.int8}, {"dtype": "f8"}, {"tune": "no"}])
def test_a_wrong_option_is_a_value_error(wrong):
    with pytest.raises(ValueError, match=r"parameter of compile must be one of"):
        Options(**wrong)


def test_unknown_stage_and_policy():
    with pytest.raises(FmtpropError, match="unknown stage 'last'; known: imported, normal, formatted"):
        snapshots(load("chain"), "last")
    with pytest.raises(UnsupportedOpError, match=r"'policy' parameter of compile must be one of .* Got 'fast'"):
        snapshots(load("chain"), policy="fast")
