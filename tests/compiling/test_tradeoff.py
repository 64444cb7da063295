"""Time against error: the order of the nodes, the bound, and the table."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling.options import Options
from fmtprop.compiling.sensitivity import QuantizedModel, noises_of
from fmtprop.compiling.stages import quantized_form
from fmtprop.errors import InputError, OptionError
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.precision.keep_float import KeepFloat, quantized_nodes
from tests.compiling.test_bytes import residual_network

FIXED = {"deterministic": True}


def images(count=3):
    return [torch.randn(1, 3, 18, 18, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def test_the_noise_of_a_node_is_that_of_the_graph_in_which_it_alone_is_quantized():
    graph, (x, *_) = quantized_form(residual_network()), images()
    names = [node.name for node in quantized_nodes(graph)]
    (exact,) = evaluate(KeepFloat(("*",)).run(graph), {"x": x})
    noises = noises_of(graph, [{"x": x}])
    assert list(noises) == names and all(noises.values())
    for name in names:
        alone = KeepFloat(tuple(other for other in names if other != name)).run(graph)
        (result,) = evaluate(alone, {"x": x})
        assert noises[name] == pytest.approx((result.double() - exact.double()).square().sum().item(), rel=1e-3)


def test_the_table_ends_with_the_model_in_floats_and_errors_shrink():
    table = fp.tradeoff(residual_network(), images(), **FIXED)
    counts = [len(row.keep_float) for row in table.rows]
    assert counts == [0, 1, 2, 4, 6]
    ratios = [math.inf if row.sqnr_db is None else row.sqnr_db for row in table.rows]
    assert ratios[0] < ratios[2] < ratios[-1] > 100
    assert all(table.rows[-1].keep_float[: len(row.keep_float)] == row.keep_float for row in table.rows)
    assert any(row.is_best for row in table.rows) and all(row.seconds > 0 for row in table.rows)
    chosen = table.fastest(ratios[1])
    assert chosen.sqnr_db is None or chosen.sqnr_db >= ratios[1]
    with pytest.raises(OptionError, match="no row of quantized has 1000 dB"):
        table.fastest(1000)
    assert json.loads(table.to_json())["rows"][1]["keep_float"] == list(table.rows[1].keep_float)
    assert table.rows[1].keep_float[0] in str(table) and "SQNR" in table._repr_html_()


@pytest.mark.parametrize("more", [-1.0, 1.0, 8.0, 60.0])
def test_a_bound_keeps_as_few_nodes_in_floats_as_it_needs(more):
    graph, data = residual_network(), images()
    model = QuantizedModel(graph, data, Options())
    bound = model.expected_db(0) + more
    net = fp.compile(graph, accuracy=fp.Accuracy(data, sqnr_db=bound), **FIXED)
    kept = net.options.keep_float
    assert list(kept) == model.order[: len(kept)]
    floats = fp.compile(graph, keep_float=["*"], **FIXED)
    (result,) = net.compare(floats, data).results
    assert result.max_error == 0 or result.sqnr_db >= bound - 0.01
    if kept:
        assert model.expected_db(len(kept) - 1) < bound + 0.5
    assert bool(kept) == (more > 0)


def test_a_module_and_a_file_take_a_bound(tmp_path):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(5, 16)
    quantized = fp.quantize(model, [torch.randn(5, 16) for _ in range(8)])
    net = fp.compile(quantized, x, accuracy=fp.Accuracy([x], sqnr_db=70.0), **FIXED)
    assert net.options.keep_float
    net.save(tmp_path / "net.fmtplan")
    assert torch.equal(fp.load_plan(tmp_path / "net.fmtplan")(x), net(x))
    assert fp.tradeoff(quantized, [{"input": x}], counts=[0, 2], **FIXED).rows[1].keep_float


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: fp.Accuracy([], sqnr_db="high"), OptionError, "sqnr_db must be a number of decibels"),
        (lambda g: fp.compile(g, accuracy=30.0), OptionError, "accuracy is an fmtprop.Accuracy"),
        (lambda g: fp.compile(g, accuracy=fp.Accuracy([], 3), keep_float=["*"]), OptionError, "chooses keep_float"),
        (lambda g: fp.compile(g, accuracy=fp.Accuracy([], 3)), InputError, "data is empty"),
        (lambda g: fp.compile(g, accuracy=fp.Accuracy(images(), 500)), OptionError, "is more than floats have"),
        (lambda g: fp.compile(g, accuracy=fp.Accuracy([torch.ones(3)], 9)), InputError, "input x has shape"),
        (lambda g: fp.tradeoff(nn.ReLU(), [torch.ones(3)]), OptionError, "ReLU is no quantized model"),
        (lambda g: fp.tradeoff(g, images(), counts=[0, 9]), OptionError, "counts must be numbers of nodes from 0 to 6"),
        (lambda g: fp.tradeoff(g, images(), keep_float=["*"]), OptionError, "other than keep_float"),
        (lambda g: fp.tradeoff(g, images(), speed=3), OptionError, "not speed"),
        (lambda g: fp.tradeoff(g, []), InputError, "data is empty"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error(call, error, message):
    with pytest.raises(error, match=message):
        call(residual_network())
