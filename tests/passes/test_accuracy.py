"""A plan's rounding errors keep their bound."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.passes.variants.winograd import ROWS, Tile
from fmtprop.report.text import certificate_text
from tests.passes.only_filtered import only_filtered


def deep() -> nn.Sequential:
    """Return nine convolutions."""
    torch.manual_seed(0)
    channels = (16, *(32,) * 8, 16)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def test_no_tile_has_much_more_error_than_a_direct_convolution():
    assert max(Tile.make(rows, taps).growth for taps, several in ROWS.items() for rows in several) <= 1.6


@pytest.mark.parametrize("winograd", [True, False])
def test_the_error_of_a_deep_network_is_at_most_twice_the_direct_one(monkeypatch, winograd):
    model, x = deep(), torch.randn(1, 16, 36, 20)
    for _ in range(2):
        model(torch.randn(2, 16, 36, 20))
    model.eval()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    direct = fp.compile(model, x, confirm=False, winograd=False)
    if winograd:
        only_filtered(monkeypatch)
    net = fp.compile(model, x, confirm=False, winograd=winograd)
    assert sum(step.node.name.endswith(".joined") for step in net.plan.steps) == (9 if winograd else 0)
    assert (net.certificate.growth > 1.0) == winograd

    def error(net: fp.CompiledModel) -> float:
        return float((net(x).double() - exact).square().mean().sqrt())

    assert error(net) <= 2 * error(direct)
    if winograd:
        assert f"{net.certificate.growth:.1f} times that of direct convolutions" in certificate_text(net.report(1))
