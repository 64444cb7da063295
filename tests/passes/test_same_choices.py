"""Choices of one graph for another of other sizes: taken where the graphs differ in sizes alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.compiling.stages import normalise
from fmtprop.errors import PassError
from fmtprop.ir.tensors import materialise
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.assignment.same_choices import SameChoices, _Transfer
from fmtprop.passes.assignment.same_expansions import expand_alike
from fmtprop.passes.variants.winograd import Winograd
from fmtprop.runtime.weights import PackedForms, SharedForms
from fmtprop.targets import OneDnnTarget, ReferenceTarget
from fmtprop.targets.registry import setting_for
from fmtprop.tuning import costs_for
from tests.passes.only_filtered import only_filtered


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
def test_another_graph_keeps_its_own_meaning(way):
    module = Net(way).eval()
    _, after = transferred(module, 31)
    verify(after, Stage.FORMATTED)
    assert [node.op for node in after.nodes() if node.op == "softmax"] == ["softmax"] * (way == "softmax")
    inputs = {"x": torch.randn(1, 3, 31, 31)}
    (got,) = evaluate(after, {node.name: inputs["x"] for node in after.input_nodes})
    torch.testing.assert_close(got, module(inputs["x"]), rtol=1e-4, atol=1e-5)


def test_other_inputs_are_refused():
    class Two(nn.Module):
        def forward(self, y, z):
            return y + z

    chosen = fp.compile(Net().eval(), torch.randn(1, 3, 20, 20), tune="model", confirm=False).compilation
    normal, _ = normalise(from_torch(Two().eval(), (torch.ones(2), torch.ones(2))))
    costs = costs_for("model", weights_nbytes=1, activations_nbytes=1, target=OneDnnTarget())
    with pytest.raises(PassError, match="other inputs or outputs"):
        SameChoices(chosen.formatted, setting_for(OneDnnTarget(), {}, ReferenceTarget()), costs).run(normal)


class Wide(nn.Module):
    """Convolutions that filtering, fused pairs and concats in place may run otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 1)
        self.d, self.e = nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(128, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x).relu()).relu()
        return self.e(torch.cat([y, self.d(self.c(y).relu())], 1))


@pytest.mark.parametrize("winograd", [True, False])
def test_later_shapes_of_any_size_have_right_results(winograd):
    model, sizes = Wide().eval(), {"n": torch.export.Dim("n", max=16), "w": torch.export.Dim("w", min=5, max=64)}
    net = fp.compile(
        model,
        torch.randn(1, 3, 16, 32),
        dynamic_shapes=({0: sizes["n"], 3: sizes["w"]},),
        tune="model",
        winograd=winograd,
    )
    for batch, width in ((6, 32), (3, 48), (2, 37), (1, 9)):
        x = torch.randn(batch, 3, 16, width)
        torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-4)
        assert net.plan_for(x).compilation.is_like_another_shape, (batch, width)


class Twice(nn.Module):
    """Two convolutions that are the same but for names and numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).relu()


def test_equal_nodes_are_expanded_once(monkeypatch):
    only_filtered(monkeypatch)
    model = Twice().eval()
    formatted = fp.compile(model, torch.randn(1, 32, 24, 24), deterministic=True).compilation.formatted
    normal, _ = normalise(from_torch(model, torch.randn(1, 32, 21, 33)))
    expand, names = Winograd.replace, []
    monkeypatch.setattr(Winograd, "replace", lambda self, *given: (names.append(given[-1].name), expand(self, *given)))
    shared = expand_alike(normal, formatted, [Winograd()])
    assert set(names) == {"conv_1"}
    monkeypatch.setattr(Winograd, "is_by_types", False)
    alone = expand_alike(normal, formatted, [Winograd()])
    assert set(names) == {"conv_1", "conv_2"}
    for one, other in zip(shared.nodes(), alone.nodes(), strict=True):
        assert (one, shared.inputs(one.name)) == (other, alone.inputs(other.name))
        if one.op == "constant":
            assert torch.equal(*(materialise(graph.constants[one.name], one.results[0]) for graph in (shared, alone)))
    verify(shared, Stage.NORMAL)


def test_a_constant_that_is_packed_already_is_no_part_of_an_expansion():
    model, type_ = Net().eval(), TensorType((2, 3))
    formatted = fp.compile(model, torch.randn(1, 3, 20, 20), deterministic=True).compilation.formatted.copy()
    normal, _ = normalise(from_torch(model, torch.randn(1, 3, 31, 31)))
    formatted.constant("table.packed", type_, torch.ones(2, 3))  # as a later shape's plan names it, without `table`
    normal.constant("table", type_, torch.ones(2, 3))
    assert expand_alike(normal, formatted, [Winograd()]) is normal


class RowMajor(OneDnnTarget):
    """A target that takes the weights of the second convolution row-major only."""

    def named(self, node, request, choice):
        if node.name != "conv_2":
            yield from super().named(node, request, choice)
        elif request["weights"].kind == "any":
            for one in super().named(node, request, choice):
                yield replace(one, operands={**one.operands, "weights": MemoryDesc(request["weights"].dims)})


def test_weights_that_are_packed_otherwise_are_no_reason_for_another_implementation(monkeypatch):
    monkeypatch.setattr(_Transfer, "_local", lambda *_: pytest.fail("a node chose for itself"))
    module = Net().eval()
    chosen = fp.compile(module, torch.randn(1, 3, 20, 20), tune="model", confirm=False, winograd=False).compilation
    normal, _ = normalise(from_torch(module, torch.randn(1, 3, 31, 31)))
    costs = costs_for("model", weights_nbytes=1, activations_nbytes=1, target=OneDnnTarget())
    setting = setting_for(RowMajor(), {}, ReferenceTarget())
    forms = PackedForms(SharedForms(module.parameters()))
    after = SameChoices(chosen.formatted, setting, costs, forms=forms).run(normal)
    verify(after, Stage.FORMATTED)
    for name in ("conv_1", "conv_2"):
        assert after.node(name).choice.impl == chosen.formatted.node(name).choice.impl
    assert after.node("conv_2").choice.operands["weights"].is_plain
