"""Checks of large primitives run on fewer rows or images, by the same implementation in the same formats."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.export import Dim

import fmtprop as fp
from fmtprop.ir.node import Node
from fmtprop.runtime import cut_down as module
from fmtprop.runtime import selfcheck
from fmtprop.runtime.cut_down import cut_down
from fmtprop.targets import OneDnnTarget
from tests.runtime.checks import give_wrong_results


class Rows(nn.Module):
    """A stem, a residual block, a pooling: rows are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.depthwise = nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return self.pool(self.depthwise(self.conv(x).tanh() + x))


def compiled(net: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **options: object) -> fp.CompiledModel:
    torch.manual_seed(0)
    monkeypatch.setattr(module, "LARGE_NBYTES", 1 << 16)
    return fp.compile(net.eval(), x, confirm=False, winograd=False, **options)


@pytest.mark.parametrize("size", [(1, 3, 259, 70), (2, 3, 256, 64)])
@pytest.mark.usefixtures("own_cache")
def test_what_is_cut_down_is_run_by_the_same_implementation_in_the_same_formats(size, monkeypatch) -> None:
    net, target = compiled(Rows(), torch.randn(size), monkeypatch, verify="off"), OneDnnTarget()
    cut = {step.node.name: cut_down(step.node, target) for step in net.plan.steps if step.node.op != "reorder"}
    assert len(cut) >= 4
    for step in net.plan.steps:
        small = cut.get(step.node.name)
        if step.node.op == "reorder":
            continue
        assert small is not None and small.choice is not None and step.node.choice is not None
        assert (small.op, small.attrs, small.post_ops) == (step.node.op, step.node.attrs, step.node.post_ops)
        assert small.choice.impl == step.node.choice.impl
        assert {k: d.tag for k, d in small.choice.operands.items()} == {
            k: d.tag for k, d in step.node.choice.operands.items()
        }
        (before,), (after,) = step.node.results, small.results
        assert after.size * 2 < before.size
        assert [a for i, a in enumerate(before.dims) if i != 2] == [a for i, a in enumerate(after.dims) if i != 2]


@pytest.mark.usefixtures("own_cache")
def test_images_of_a_matrix_product_are_cut(monkeypatch) -> None:

    class Products(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    monkeypatch.setattr(module, "LARGE_NBYTES", 1 << 16)
    net = fp.compile(Products(), (torch.randn(200, 8, 16), torch.randn(200, 16, 24)), verify="off")
    (product,) = [step.node for step in net.plan.steps if step.node.op == "matmul"]
    small = cut_down(product, OneDnnTarget())
    assert small is not None and small.results[0].dims == (24, 8, 24)


@pytest.mark.usefixtures("own_cache")
def test_rows_of_a_linear_layer_are_cut_and_sizes_with_the_same_rest_are_checked_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGE_NBYTES", 1 << 14)
    torch.manual_seed(0)
    tokens, layer = Dim("tokens", min=2, max=400), nn.Linear(64, 48).eval()
    net = fp.compile(layer, torch.randn(1, 101, 64), dynamic_shapes=({1: tokens},), tune="model", confirm=False)
    (step,) = [step for step in net.plan_for(torch.randn(1, 101, 64)).plan.steps if step.node.op != "reorder"]
    small = cut_down(step.node, OneDnnTarget())
    assert small is not None and small.results[0].dims == (1, 16 + 101 % 16, 48)
    checked = []
    honest = selfcheck.check_node
    monkeypatch.setattr(
        selfcheck, "check_node", lambda node, *a: checked.append(node.results[0].dims[1]) or honest(node, *a)
    )
    for count in (117, 118, 134, 133):
        net.plan_for(torch.randn(1, count, 64))
    assert checked == [118]


@pytest.mark.usefixtures("own_cache")
def test_what_sees_all_rows_stays_as_it_is(monkeypatch) -> None:
    net = compiled(nn.AvgPool2d((256, 64)), torch.randn(1, 16, 256, 64), monkeypatch, verify="off", policy="plain")
    assert [cut_down(step.node, OneDnnTarget()) for step in net.plan.steps] == [None]


@pytest.mark.usefixtures("own_cache")
def test_vectors_of_channels_are_not_cut_like_images(monkeypatch, caplog) -> None:
    # PyTorch normalizes in f64, and would print a traceback for vectors of another size
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler])
    compiled(nn.BatchNorm2d(64).double(), torch.randn(1, 64, 16, 16).double(), monkeypatch)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.usefixtures("own_cache")
def test_a_wrong_kernel_is_found_on_fewer_rows(monkeypatch) -> None:
    seen = []

    def is_wrong(node: Node) -> bool:
        seen.append(node)
        first = next((one for one in seen if one.op == "pooling"), None)
        return first is not None and _kernel(node) == _kernel(first)

    def _kernel(node: Node) -> tuple[object, ...]:
        return node.op, node.descs, node.choice and node.choice.impl

    give_wrong_results(monkeypatch, is_wrong)
    x, rows = torch.randn(1, 3, 259, 70), Rows()
    with pytest.warns(RuntimeWarning, match=r"pool.*planning around it"):
        compiled(rows, x, monkeypatch)
    assert all(node.results[0].dims[2] < 60 for node in seen if node.op == "pooling")
