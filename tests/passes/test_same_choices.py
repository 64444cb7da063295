"""Choices of one graph for another of other sizes: taken where the graphs differ in sizes alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling.stages import normalise
from fmtprop.errors import PassError
from fmtprop.frontends import from_torch
from fmtprop.ir.verify import Stage, verify
from fmtprop.passes.same_choices import SameChoices
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.registry import setting_for
from fmtprop.tuning import costs_for


class Net(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 17, 3), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).softmax(1) if self.way == "softmax" else self.a(x).relu()
        y = self.b(y)
        return (x.mean((2, 3), keepdim=True)[:, :1] if self.way == "other source" else y.mean(1, keepdim=True)) + y


def transferred(module: nn.Module, size: int):
    chosen = fp.compile(
        Net().eval(), torch.randn(1, 3, 20, 20), tune="model", confirm=False, winograd=False
    ).compilation
    normal, _ = normalise(from_torch(module.eval(), torch.randn(1, 3, size, size)))
    setting = setting_for(OneDnnTarget(), {}, ReferenceTarget())
    costs = costs_for("model", weights_nbytes=1, activations_nbytes=1, target=OneDnnTarget())
    return chosen.formatted, SameChoices(chosen.formatted, setting, costs).run(normal)


def test_another_size_has_the_same_nodes_in_the_same_formats():
    before, after = transferred(Net(), 31)
    verify(after, Stage.FORMATTED)
    assert [node.name for node in before.nodes()] == [node.name for node in after.nodes()]
    for one, other in zip(before.nodes(), after.nodes(), strict=True):
        assert [desc.tag for desc in one.descs] == [desc.tag for desc in other.descs]
        assert one.op == "reorder" or (one.choice.target, one.choice.impl) == (other.choice.target, other.choice.impl)


@pytest.mark.parametrize("way", ["softmax", "other source"])
def test_another_graph_is_refused(way):
    with pytest.raises(PassError):
        transferred(Net(way), 31)
