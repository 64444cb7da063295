"""Precision in reports: what each step computes in, why some stay in floats, and what a conversion saves."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ops import Binary, Eltwise, Softmax, emit
from tests.compiling.test_bytes import Network


def mixed():
    """Return a graph of convolutions with a softmax between them, all quantized."""
    net = Network((1, 32, 28, 28), signed=False)
    first = net.rounded(net.convolution(net.rounded(net.value, 120), 128, 3), 100)
    operands = {
        "src_0": emit(net.graph, "eltwise", {"src": first}, Eltwise("tanh")),
        "src_1": emit(net.graph, "softmax", {"src": first}, Softmax(1)),
    }
    last = net.rounded(emit(net.graph, "binary", operands, Binary("mul")), 128)
    net.graph.output(net.rounded(net.convolution(last, 128, 3), 100))
    return net.graph


@pytest.fixture(scope="module")
def report():
    report = fp.compile(mixed(), policy="propagate", deterministic=True).report(repeats=1)
    if not any(step.computes_in in ("u8", "s8") for step in report.steps if step.op.startswith("convolution")):
        pytest.skip("no convolution computes with bytes on this CPU")
    return report


def test_each_step_has_the_type_that_it_reads(report):
    types = {step.op.partition("+")[0]: step.computes_in for step in report.steps}
    assert types["convolution"] in ("u8", "s8") and types["softmax"] == "f32"
    told = json.loads(report.to_json())
    assert sum(row["steps"] for row in told["precisions"]) == len(report.steps)
    assert sum(row["seconds"] for row in told["precisions"]) == pytest.approx(report.seconds)
    assert {node["name"]: node["computes_in"] for node in told["nodes"]}["conv_1"] in ("u8", "s8")


def test_a_quantized_step_in_floats_says_why():
    report = fp.compile(mixed(), deterministic=True).report(repeats=1)
    told = {step.op: why for step, why in report.in_floats}
    assert "bytes" in told["softmax"]
    text = report.to_text()
    assert "quantized, but computed in floats" in text and told["softmax"] in " ".join(text.split())


def test_a_conversion_to_bytes_says_what_its_reader_costs_without_it(report):
    row = next(row for row in report.reorders if row.src.startswith("f32") and row.dst.startswith(("u8", "s8")))
    assert (row.cause, row.kind) in (("quantization", "data type"), ("quantization", "both"))
    assert row.counterfactual.verdict in ("pays", "uncertain", "avoidable")
    (reader, *_) = row.readers
    assert f"{reader.partition('.')[0]} in f32" in row.counterfactual.why


def test_a_model_in_one_type_has_one_precision():
    report = fp.compile(nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8), deterministic=True).report(repeats=1)
    assert [row["name"] for row in report.to_dict()["precisions"]] == ["f32"] and not report.in_floats
