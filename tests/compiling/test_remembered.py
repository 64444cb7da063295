"""Choices that an earlier compilation of the same graph made: the same plan by every door, without its enumeration."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling import selection
from fmtprop.store import Store, keep_text, text_of, texts
from fmtprop.tuning.paces import Paces

pytestmark = pytest.mark.usefixtures("own_cache")

X = torch.randn(1, 16, 28, 28)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 17, 1), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers).eval()


@pytest.fixture
def solved(monkeypatch):
    """Return a list that grows with each choice among all ways."""
    made = []
    usual = selection.Selection.rivals
    monkeypatch.setattr(selection.Selection, "rivals", lambda self: made.append(self) or usual(self))
    return made


def compiled(module: nn.Module, **options):
    return fp.compile(module, X, **({"deterministic": True} | options))


def test_a_module_has_the_plan_of_an_earlier_one_with_its_own_weights(solved):
    first, module = compiled(net()), net(seed=1)
    assert len(solved) == 1
    second = compiled(module)
    assert len(solved) == 1
    torch.testing.assert_close(second(X), module(X), rtol=1e-4, atol=1e-5)
    assert second.certificate == first.certificate is not None
    nodes = [[(node.name, node.choice.impl, node.descs) for node in one.graph.nodes()] for one in (first, second)]
    assert nodes[0] == nodes[1]


def test_the_certificate_comes_with_the_paces_of_its_costs(solved):
    """Other models teach other paces in between: by these, the plan may not be the cheapest."""
    how = {"deterministic": False, "tune": "model", "confirm": False}
    first = compiled(net(), **how)
    family = "modelled", "f32", "convolution", "other"
    Paces(Store()).learn([(family, 1e-4, 3e-4)])
    second = compiled(net(), **how)
    assert len(solved) == 1 and second.certificate == first.certificate is not None
    assert second.basis.paces.of(family, 1e-4) == first.basis.paces.of(family, 1e-4) == 1.0
    assert Paces(Store()).of(family, 1e-4) == pytest.approx(3.0)


@pytest.mark.parametrize("damage", [None, [["f32", 2.0]], [[["f32", 1], 2.0]]])
def test_damaged_paces_are_left_out(damage, own_cache, solved):
    compiled(net())
    (file,) = (own_cache / texts.FOLDER).iterdir()
    document = json.loads(text_of(file.stem))
    document["findings"]["paces"] = damage
    keep_text(file.stem, json.dumps(document))
    assert compiled(net()).basis is None and len(solved) == 1


def test_other_options_and_figures_have_choices_of_their_own(solved):
    compiled(net())
    compiled(net(), special_values="exact")
    assert len(solved) == 2
    Store().add_figures({"a problem": 1e-3})  # as tuning does, maybe of the same layers
    compiled(net())
    assert len(solved) == 3
    compiled(net())
    assert len(solved) == 3


def test_the_backend_of_torch_compile_remembers(solved, always):
    for seed in range(2):
        torch._dynamo.reset()
        module = net(seed)
        with torch.no_grad():
            run = torch.compile(module, backend="fmtprop", options={"deterministic": True})
            torch.testing.assert_close(run(X), module(X), rtol=1e-4, atol=1e-5)
    assert len(solved) == 1


def test_a_model_of_changing_shapes_remembers_its_first_shape(solved):
    for seed in range(2):
        module = net(seed)
        made = fp.compile(module, X, dynamic_shapes=({2: torch.export.Dim.DYNAMIC},), deterministic=True)
        for size in (28, 20):
            x = torch.randn(1, 16, size, 28)
            torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
        assert made.plan_for(X).compilation.idle
    assert len(solved) == 1


@pytest.mark.parametrize("field", ["descs", "choice", "runs"])
def test_a_change_of_format_that_says_too_little_is_made_anew(field, own_cache, solved):
    first = compiled(net())
    (file,) = (own_cache / texts.FOLDER).iterdir()
    document = json.loads(text_of(file.stem))
    choices = json.loads(document["choices"])
    for row in choices["nodes"]:
        if row["op"] == "reorder":
            del (row["choice"] if field == "runs" else row)[field]
    keep_text(file.stem, json.dumps(document | {"choices": json.dumps(choices)}))
    torch.testing.assert_close(compiled(net())(X), first(X))
    assert len(solved) == 2


@pytest.mark.parametrize(
    ("work", "is_measured", "is_kept"),
    [("race of plans", False, True), ("race of plans", True, False), (selection.CORRECTION, False, False)],
)
def test_choices_without_some_work_are_kept_where_another_process_would_leave_it_out(
    work, is_measured, is_kept, monkeypatch, solved
):
    usual = selection.Selection.decide

    def decide(self):
        self._budget.left_out[work] = "takes long"
        if is_measured:
            Store().add_figures({f"a figure {len(solved)}": 1.0})
        return usual(self)

    monkeypatch.setattr(selection.Selection, "decide", decide)
    compiled(net())
    assert compiled(net()).left_out == {work: "takes long"}
    assert len(solved) == (1 if is_kept else 2)


class Broadcast(nn.Module):
    """A model with constants that repeat one number in memory: one of a single element is contiguous for PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)
        self.register_buffer("one", torch.tensor(0.5).expand(1))
        self.register_buffer("all", torch.tensor(2.0).expand(16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) * self.all).softmax(1) + self.one


def test_constants_without_strides(solved):
    module = Broadcast().eval()
    for _ in range(2):
        torch.testing.assert_close(compiled(module)(X), module(X), rtol=1e-4, atol=1e-5)
    assert len(solved) == 1


def test_what_a_lazy_model_found_in_the_background_is_the_next_ones_first_plan(solved):
    for seed, begun in ((0, True), (1, False)):
        module = net(seed)
        made = fp.compile(module, X, tune="lazy")
        assert (made._improvement is not None) is begun
        assert made.settle()
        assert made.options.policy == "optimal"
        torch.testing.assert_close(made(X), module(X), rtol=1e-4, atol=1e-5)
    count = len(solved)
    fp.compile(net(seed=2), X)
    assert len(solved) == count, "the same choices as those of tune='auto'"
