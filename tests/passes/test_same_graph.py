"""The formatted graph of another process: the same nodes in the same order, or none of another meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.compiling.choices import choices_of, choices_text
from fmtprop.compiling.stages import normalise
from fmtprop.errors import PassError
from fmtprop.ir import Choice, Graph, Node, TensorType
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops.reorder import Reorder
from fmtprop.passes.assignment.same_graph import SameGraph


class Net(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.way = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 17, 1), way

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = (y, x) if self.way == "other source" else (x, y)
        x = self.b(self.a(x).relu())
        x = x.softmax(1) if self.way == "softmax" else x.sigmoid()
        return x - y.mean(1, keepdim=True)[:, :, 1:-1, 1:-1]


INPUTS = torch.randn(1, 3, 12, 12), torch.randn(1, 3, 12, 12)


def normal(way: str = "") -> Graph:
    return normalise(from_torch(Net(way).eval(), INPUTS))[0]


@pytest.fixture(scope="module")
def formatted() -> Graph:
    compilation = fp.compile(Net().eval(), INPUTS, deterministic=True).compilation
    return choices_of(choices_text(compilation))[0]


def test_the_same_graph_has_the_same_nodes_in_the_same_order(formatted):
    after = SameGraph(formatted, {}).run(normal())
    assert [node.name for node in after.nodes()] == [node.name for node in formatted.nodes()]
    assert [node.choice for node in after.nodes()] == [node.choice for node in formatted.nodes()]
    assert after.constants.keys() == {node.name for node in after.nodes() if node.op == "constant"}


@pytest.mark.parametrize("way", ["softmax", "other source"])
def test_another_graph_is_refused(formatted, way):
    with pytest.raises(PassError, match="is of another graph"):
        SameGraph(formatted, {}).run(normal(way))


def test_a_rounding_that_the_graph_lacks_is_refused(formatted):
    rounding, out = DataType.BF16, Graph(formatted.name)
    for node in formatted.nodes():
        inputs = dict(formatted.inputs(node.name))
        if node.op == "output":
            for name, dtype in (("narrow", rounding), ("wide", DataType.F32)):
                desc = formatted.desc_of(formatted.inputs(node.name)["src"]).with_dtype(dtype)
                choice = Choice("onednn", "jit:uni", {"src": out.desc_of(inputs["src"])}, handle={})
                copy = Node(name, "reorder", Reorder(dtype.value), (TensorType(desc.dims, dtype),))
                (inputs["src"],) = out.add(copy.with_(descs=(desc,), choice=choice), {"src": inputs["src"]})
        out.add(node, inputs)
    with pytest.raises(PassError, match="reads another tensor as src"):
        SameGraph(out, {}).run(normal())


def test_other_formats_of_the_caller_are_refused(formatted):
    wanted = {node.name: MemoryDesc(node.results[0].dims, tag="acdb") for node in formatted.input_nodes}
    with pytest.raises(PassError, match="is of another graph"):
        SameGraph(formatted, wanted).run(normal())


def test_bytes_that_no_grid_explains_are_refused(formatted):
    (node,) = [one for one in formatted.nodes() if one.op == "softmax" or one.op == "pooling" or one.op == "reduction"]
    changed = formatted.copy()
    desc = node.descs[0].with_dtype(DataType.U8)
    changed.replace(node.with_(descs=(desc,), results=(replace(node.results[0], dtype=DataType.U8),)))
    with pytest.raises(PassError, match=r"writes dst in another type"):
        SameGraph(changed, {}).run(normal())


def test_a_constant_that_repeats_one_number_in_memory(formatted):
    graph = normal()
    name = next(node.name for node in graph.nodes() if node.op == "constant" and node.results[0].dims == (17,))
    graph.constants[name] = torch.tensor(0.5).expand(17)
    assert len(SameGraph(formatted, {}).run(graph)) == len(formatted)
