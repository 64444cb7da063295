"""A model for another batch computes of each image what the model computes of it."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.builtin import builtin_names
from fmtprop.errors import ShapeError
from fmtprop.passes.change_batch import ChangeBatch


class Net(torch.nn.Module):
    """Convolutions, a reshape of constants, an attention over positions and a flat head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.Linear(8 * 49, 5)
        self.scale = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.conv(x) * self.scale.view(8, 1, 1)).flatten(2).transpose(1, 2)
        y = torch.softmax(y @ y.transpose(1, 2), -1) @ y
        return self.head(y.flatten(1))


def test_each_image_is_computed_as_before():
    torch.manual_seed(0)
    net = Net().eval()
    graph = ChangeBatch(3).run(fp.from_torch(net, (torch.zeros(1, 3, 16, 16),)))
    x = torch.randn(3, 3, 16, 16)
    assert torch.allclose(fp.compile(graph, tune="model")(x), net(x), atol=1e-5)


def test_built_in_models():
    refused = []
    for name in builtin_names():
        graph = fp.load(name)
        try:
            changed = ChangeBatch(5).run(graph)
        except ShapeError as error:
            refused.append((name, str(error)))
            continue
        assert [node.name for node in changed.nodes()] == [node.name for node in graph.nodes()]
        assert {changed.type_of(*changed.inputs(node.name).values()).dims[0] for node in changed.output_nodes} == {5}
    (one,) = refused
    assert one[0] == "vit_b16" and "concat_1 (concat): the batch cannot be changed: src_1 axis 0" in one[1]


def test_what_mixes_images():
    class Mixing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, 0)

    with pytest.raises(ShapeError, match="an image depends on others"):
        ChangeBatch(3).run(fp.from_torch(Mixing(), (torch.zeros(2, 4),)))


def test_inputs_of_several_batches():
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    with pytest.raises(ShapeError, match="the inputs have no common size of axis 0"):
        ChangeBatch(3).run(fp.from_torch(Two(), (torch.zeros(1, 4), torch.zeros(2, 4))))
