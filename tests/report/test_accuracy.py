"""Errors of layers: which steps are the same layer, and the figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import InputError
from fmtprop.report.accuracy import layers_of, matched
from tests.compiling.test_bytes import residual_network

FIXED = {"deterministic": True}


class Block(nn.Module):
    """A residual block; ``self.act`` runs twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = self.act(self.second(self.act(self.first(x))) + x)
        return self.head(y.mean((2, 3))).softmax(-1)


def block():
    torch.manual_seed(0)
    return Block().eval()


def images(count=2):
    return [torch.randn(1, 8, 12, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def test_a_plan_in_bytes_against_the_same_one_in_floats_has_every_layer():
    graph, x = residual_network(), torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(1))
    options = {"policy": "propagate", **FIXED}
    net, floats = fp.compile(graph, **options), fp.compile(graph, keep_float=["*"], **options)
    errors = net.compare(floats, [x])
    assert not errors.alone
    assert {layer.op.partition("+")[0] for layer in errors.layers} >= {"convolution"}
    (result,) = errors.results
    difference = (net(x) - floats(x)).double()
    assert result.max_error == pytest.approx(difference.abs().max().item())
    energy = floats(x).double().square().sum() / difference.square().sum()
    assert result.sqnr_db == pytest.approx(10 * math.log10(energy))
    assert all(20 < layer.sqnr_db < 60 for layer in errors.layers)
    assert [layer.sqnr_db for layer in errors.worst] == sorted(layer.sqnr_db for layer in errors.layers)


@pytest.mark.parametrize("policy", ["plain", "naive", "optimal"])
def test_a_layer_is_the_same_in_every_format(policy):
    net, x = fp.compile(block(), images()[0], policy=policy, **FIXED), images()
    errors = net.compare(fp.compile(block(), x[0], policy="propagate", winograd=False, **FIXED), x)
    assert not errors.alone and errors.runs == 2
    assert all(layer.max_error < 1e-5 and layer.largest > 0 for layer in (*errors.layers, *errors.results))


def test_an_own_step_shows_what_its_module_computes():
    model, (x, _) = block(), images()
    net, seen = fp.compile(model, x, **FIXED), {}
    results = net.watch(lambda node, read: seen.update({node.name: read()}), x)
    torch.testing.assert_close(results[0], model(x))
    last = layers_of(net)[-1]
    torch.testing.assert_close(seen[last.step.name], model(x))


def test_a_quantized_module_against_the_module_itself():
    pytest.importorskip("torchao")
    model = block()
    net = fp.compile(fp.quantize(model, images(8)), images()[0], **FIXED)
    errors = net.compare(fp.compile(model, images()[0], **FIXED), images())
    assert {"first", "head"} <= {layer.origin for layer in errors.layers}
    assert all(layer.sqnr_db > 20 for layer in errors.layers)
    alone = net.compare(model, images())
    assert not alone.layers and alone.results[0].sqnr_db == pytest.approx(errors.results[0].sqnr_db, abs=0.1)


def test_layers_of_other_networks_are_none_of_the_same():
    x = images()[0]
    one, other = fp.compile(block(), x, **FIXED), fp.compile(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), x, **FIXED)
    assert not matched(layers_of(one), layers_of(other))


def test_data_may_be_named_or_several_arguments_or_one_tensor():
    class Two(nn.Module):
        def forward(self, a, b):
            return a @ b

    a, b = torch.ones(3, 3), torch.eye(3)
    net = fp.compile(Two(), (a, b), **FIXED)
    for data in ([(a, b)], {"a": a, "b": b}, [{"a": a, "b": b}, [a, b]]):
        assert net.compare(Two(), data).results[0].max_error == 0
    assert fp.compile(nn.ReLU(), a, **FIXED).compare(torch.relu, a).results[0].sqnr_db is None


def test_numbers_that_are_none_are_told():
    net = fp.compile(nn.ReLU(), torch.ones(3), **FIXED)
    (row,) = net.compare(lambda x: x * math.nan, [torch.ones(3)]).results
    assert (row.sqnr_db, row.max_error, row.largest) == (None, None, None)


@pytest.mark.parametrize(
    ("other", "data", "message"),
    [
        (3, [torch.ones(3)], "compare needs a compiled model, or a function or module with the same results, got int"),
        (torch.relu, [], "data is empty"),
        (torch.relu, 3, "data must be inputs, each what one call of the model takes, got int"),
        (torch.relu, [torch.ones(4)], "input"),
        (torch.sum, [torch.ones(3)], r"results of ReLU have the shapes \[\(3,\)\], but those of the other model"),
    ],
)
def test_what_does_not_fit_is_one_error(other, data, message):
    with pytest.raises(InputError, match=message):
        fp.compile(nn.ReLU(), torch.ones(3), **FIXED).compare(other, data)


def test_every_form_has_the_figures(tmp_path):
    x = images()
    errors = fp.compile(block(), x[0], **FIXED).compare(fp.compile(block(), x[0], policy="plain", **FIXED), x)
    told = json.loads(errors.to_json(tmp_path / "errors.json"))
    assert json.loads((tmp_path / "errors.json").read_text()) == told
    assert [row["name"] for row in told["layers"]] == [layer.name for layer in errors.layers]
    for layer in errors.layers:
        assert layer.name in str(errors) and layer.name in errors._repr_html_()
    assert "output_1" in errors.to_text()
    assert "(policy='propagate' joins none): conv_3" in str(replace(errors, alone=("conv_3",)))


def test_its_file_is_replaced_by_the_next_one(tmp_path):
    net = fp.compile("chain", deterministic=True)
    found = net.compare(net, [torch.ones(1, 3, 32, 32)])
    for _ in range(2):
        found.to_json(tmp_path / "errors.json")
    assert (tmp_path / "errors.json").read_text() == found.to_json() + "\n"
