"""Models whose sizes change: one export, a plan per shape, the model's own arguments and results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import fmtprop as fp
from fmtprop.errors import ImportModelError, InputError, UnsupportedOpError
from fmtprop.ir.tensors import materialise
from fmtprop.runtime.constants import ConstantStore
from tests.passes.only_filtered import only_filtered


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 20, 3, padding=1)
        self.norm = nn.LayerNorm(20)
        self.fc = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None, flip: bool = False):
        y = self.conv(x).relu()
        y = nn.functional.interpolate(y, size=(x.shape[2] // 2 + 1, x.shape[3]))
        y = self.norm(y.flatten(2).transpose(1, 2))
        y = y if scale is None else y * scale
        logits = self.fc(y.flip(1) if flip else y)
        return {"logits": logits, "tokens": y.shape[1]}


def _compiled(**options) -> tuple[nn.Module, fp.DynamicModel]:
    model = Net().eval()
    batch, height = Dim("batch", max=6), Dim("height", min=2, max=40)
    net = fp.compile(
        model,
        torch.randn(2, 3, 8, 9),
        kwargs={"scale": torch.randn(2, 1, 1)},
        dynamic_shapes={"x": {0: batch, 2: height}, "scale": {0: batch}},
        tune="model",
        **options,
    )
    return model, net


def _call(batch: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, height, 9), torch.randn(batch, 1, 1)


def test_each_shape_equals_the_module() -> None:
    model, net = _compiled()
    for batch, height in ((2, 8), (1, 8), (3, 17), (6, 2), (2, 8)):
        x, scale = _call(batch, height)
        got, want = net(x, scale=scale), model(x, scale=scale)
        torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-4, atol=1e-5)
        assert got["tokens"] == want["tokens"]
    assert net.shapes[-1] == ((2, 3, 8, 9), (2, 1, 1))
    assert len(net.shapes) == 4


def test_an_example_of_one_image_stands_for_any_number() -> None:
    model = Net().eval()
    net = fp.compile(model, torch.randn(1, 3, 8, 9), dynamic_shapes={"x": {0: Dim("batch", max=6)}}, tune="model")
    for batch in (1, 3):
        x, _ = _call(batch, 8)
        torch.testing.assert_close(net(x)["logits"], model(x)["logits"], rtol=1e-4, atol=1e-5)


def test_an_example_of_one_image_is_enough_where_a_reshape_joins_its_axes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    net = fp.compile(model, torch.randn(1, 3, 8, 8), dynamic_shapes=({0: Dim("n", max=64)},), tune="model")
    assert net.shapes == [((1, 3, 8, 8),)]
    for batch in (1, 3):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)


class Squeezed(nn.Module):
    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) * 2 + others[0]


class Branching(nn.Module):
    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x - 1
        return x.expand(4, -1) if x.shape[0] == 1 else x * 3 + others[0]


@pytest.mark.parametrize("size", [Dim("n", max=8), Dim.AUTO, Dim.DYNAMIC], ids=["Dim", "AUTO", "DYNAMIC"])
@pytest.mark.parametrize("example", [1, 3])
@pytest.mark.parametrize("model", [Squeezed(), Branching()], ids=["squeezed", "branching"])
def test_a_size_of_0_or_1_is_taken_as_pytorch_takes_it(model: nn.Module, example: int, size: object) -> None:
    inputs = torch.randn(example, 5), torch.zeros(1, 1)
    shapes = {"x": {0: size}, "others": ({},)}
    net = fp.compile(model, inputs, dynamic_shapes=shapes, tune="model")
    for n in (example, 4, 1, 3, 0):
        x = torch.randn(n, 5)
        if n < min(example, 2) and not isinstance(size, Dim):
            with pytest.raises(InputError, match="exported for"):  # without a range, PyTorch begins it at 2
                net(x, inputs[1])
            continue
        got, expected = net(x, inputs[1]), model(x, inputs[1])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_file_has_no_program_for_sizes_of_1(tmp_path: Path) -> None:
    model = Squeezed()
    net = fp.compile(model, (torch.randn(3, 5), torch.zeros(1, 1)), dynamic_shapes=({0: Dim("n", max=8)}, ({},)))
    net.save(tmp_path / "net.fmtplan")
    other = fp.load_plan(tmp_path / "net.fmtplan")
    x = torch.randn(4, 5)
    torch.testing.assert_close(other(x, torch.zeros(1, 1)), x * 2)
    with pytest.raises(InputError, match=r"got 1: the model takes another branch there .* \(input x axis 0\) > 1"):
        other(x[:1], torch.zeros(1, 1))
    net(x[:1], torch.zeros(1, 1))
    net.save(tmp_path / "net.fmtplan")
    got = fp.load_plan(tmp_path / "net.fmtplan")(x[:1], torch.zeros(1, 1))
    torch.testing.assert_close(got, model(x[:1], torch.zeros(1, 1)))


def test_the_report_is_of_a_call_or_of_the_plan_used_last() -> None:
    net = fp.compile(nn.Linear(4, 4), torch.ones(2, 4), dynamic_shapes=({0: Dim("n", max=8)},), tune="model")
    net(torch.ones(3, 4))
    assert net.report(repeats=1).model == "Linear, input 3x4", "a report without its shape is of no plan"
    assert net.report(torch.ones(5, 4), repeats=1).model == "Linear, input 5x4" and net.shapes[-1] == ((5, 4),)


def test_a_notebook_shows_all_shapes_and_the_plan_used_last() -> None:
    net = fp.compile(nn.Linear(4, 4), torch.ones(2, 4), dynamic_shapes=({0: Dim("n", max=8)},), tune="model")
    net(torch.ones(3, 4))
    text = net._repr_html_()
    assert "DynamicModel Linear" in text and "<td>input 3x4</td><td>1</td>" in text and "<svg" in text
    assert "1 step, 0 reorders>" in repr(net.plan_for())


def test_plans_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    _, net = _compiled(max_shapes=2)
    for batch in (1, 2, 3, 3, 3):
        x, scale = _call(batch, 8)
        net(x, scale=scale)
    assert [shapes[0][0] for shapes in net.shapes] == [2, 3]


class Several(nn.Module):
    """Results of all kinds: nested, views, an input, a buffer, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"y": [y, y.t()], "x": x, "row": x[:1], "b": self.b, "no": None, "all": y.mean().expand(3)}


@pytest.mark.parametrize("is_small", [False, True])
def test_pytorch_runs_a_rare_shape_until_its_third_call(is_small: bool) -> None:
    model = Several().eval()
    net = fp.compile(model, torch.ones(4, 8), dynamic_shapes=({0: Dim("n", max=9)},), tune="model", max_shapes=1)
    x = torch.randn(1 if is_small else 5, 8)
    for call in range(3):
        got, expected = net(x), model(x)
        torch.testing.assert_close(got, expected)
        tensors = [*got.pop("y"), *filter(torch.is_tensor, got.values())]
        assert len({x.data_ptr(), model.b.data_ptr(), *(t.data_ptr() for t in tensors)}) >= len(tensors) + 1
        assert not any(t.requires_grad for t in tensors)
        assert net.shapes == ([((4, 8),)] if call < 2 else [(tuple(x.shape),)])
    with pytest.raises(InputError, match="exported for 0 to 9"):
        net(torch.ones(10, 8))


def test_a_size_among_the_results_is_planned_at_once() -> None:
    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x.relu(), x.shape[0]

    net = fp.compile(Counted(), torch.ones(4, 8), dynamic_shapes=({0: Dim("n", max=9)},), tune="model", max_shapes=1)
    x = torch.randn(5, 8)
    got, count = net(x)
    assert torch.equal(got, x.relu()) and count == 5 and net.shapes == [((5, 8),)]


def test_shapes_share_packed_weights() -> None:
    model = nn.Linear(512, 384).eval()
    net = fp.compile(model, torch.randn(4, 512), dynamic_shapes=({0: Dim("n", max=64)},), tune="model")
    plans = [net.plan_for(torch.empty(n, 512)).plan for n in (20, 21)]
    weights = [{packed.data_ptr() for packed in plan.constants if packed.nbytes > 2**18} for plan in plans]
    assert weights[0] == weights[1] != set()


def _packed(monkeypatch) -> list[str]:
    """Return a list that gets the name of each constant node that runs: what packs weights."""
    names: list[str] = []
    plain = ConstantStore.compute
    monkeypatch.setattr(
        ConstantStore, "compute", lambda self, node, *a: names.append(node.name) or plain(self, node, *a)
    )
    return names


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(96, 160), nn.Linear(160, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_weights_are_packed_once_for_all_shapes(monkeypatch) -> None:
    names = _packed(monkeypatch)
    model, rows = Rows().eval(), Dim("rows", min=2, max=64)
    net = fp.compile(model, torch.randn(32, 96), tune="model", dynamic_shapes=({0: rows},))
    kept = {id(constant) for constant in net.plan_for(torch.empty(32, 96)).plan.constants}
    assert names
    names.clear()
    for count in (31, 33):
        plan = net.plan_for(torch.empty(count, 96)).plan
        assert {id(constant) for constant in plan.constants} <= kept
    assert names == []


def test_a_later_shape_has_weights_as_they_are_packed() -> None:
    model, rows = Rows().eval(), Dim("rows", min=2, max=64)
    net = fp.compile(model, torch.randn(32, 96), deterministic=True, dynamic_shapes=({0: rows},))
    x = torch.randn(31, 96)
    later = net.plan_for(x)
    assert later.plan.packed == ()
    constants = [node for node in later.graph if node.op == "constant"]
    names = [node.name.partition(".packed")[0] for node in constants]
    assert sorted(names) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert all(node.choice.reason == "as another shape's plan has it" for node in constants)
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    constant = constants[names.index("b.weight")].name
    read = materialise(later.compilation.with_constants().constants[constant], later.graph.node(constant).results[0])
    torch.testing.assert_close(read.flatten().sort()[0], model.b.weight.flatten().sort()[0], rtol=0, atol=0)
    threads = later.plan.threads + 1
    assert later.compilation.plan_for(threads).threads == threads


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 48, 3, padding=1), nn.Conv2d(48, 48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return x * torch.relu(self.b(x.mean((2, 3), keepdim=True)))


def test_what_keeps_its_sizes_keeps_its_implementation() -> None:
    model, sizes = Gate().eval(), {2: Dim("h", min=2, max=64), 3: Dim("w", min=2, max=64)}
    net = fp.compile(model, torch.randn(1, 3, 24, 24), deterministic=True, dynamic_shapes=(sizes,))
    first, x = net.plan_for(torch.empty(1, 3, 24, 24)), torch.randn(1, 3, 31, 20)
    later = net.plan_for(x)
    gate = next(step.node.name for step in first.plan.steps if step.node.results[0].dims == (1, 48, 1, 1))
    assert later.graph.node(gate).choice.handle is not first.graph.node(gate).choice.handle  # it averages more numbers
    gate = [step.node.name for step in first.plan.steps if step.node.results[0].dims == (1, 48, 1, 1)][1]
    assert later.graph.node(gate).choice.handle is first.graph.node(gate).choice.handle
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_filtered_kernel_is_transformed_once_for_all_shapes(monkeypatch) -> None:
    only_filtered(monkeypatch)
    names = _packed(monkeypatch)
    model, sizes = nn.Conv2d(32, 48, 3, padding=1), {2: Dim("h", min=2, max=64), 3: Dim("w", min=2, max=64)}
    net = fp.compile(model, torch.randn(1, 32, 24, 24), deterministic=True, dynamic_shapes=(sizes,))
    packed = [name for name in names if ".kernel_" in name]
    assert packed
    for height, width in ((18, 31), (25, 24)):  # whole tiles, and a part of one
        names.clear()
        x = torch.randn(1, 32, height, width)
        torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-4)
        assert any(".product_" in step.node.name for step in net.plan_for(x).plan.steps)
        assert not [name for name in names if ".kernel_" in name]
    with torch.no_grad():
        model.weight.mul_(2)
    x = torch.randn(1, 32, 21, 33)
    torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-4)
    assert [name for name in names if ".kernel_" in name]


def test_passes_that_changed_nothing_are_left_out_for_later_shapes() -> None:
    model, net = _compiled()
    x, scale = _call(3, 13)
    torch.testing.assert_close(net(x, scale=scale)["logits"], model(x, scale=scale)["logits"], rtol=1e-4, atol=1e-5)
    later = net.plan_for(x, scale=scale).compilation
    fresh = fp.compile(model, x, kwargs={"scale": scale}, tune="model").compilation
    assert "recognise-lrn" in later.idle
    assert "few-rows" not in later.idle  # it asks for sizes
    assert [(node.op, node.post_ops) for node in later.normal] == [(node.op, node.post_ops) for node in fresh.normal]


def test_weights_that_changed_are_packed_again(monkeypatch) -> None:
    model, rows = Rows().eval(), Dim("rows", min=2, max=64)
    net = fp.compile(model, torch.randn(32, 96), tune="model", dynamic_shapes=({0: rows},))
    with torch.no_grad():
        model.a.weight.mul_(2)
    x = torch.randn(31, 96)
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ((torch.randn(7, 3, 8, 9),), {"scale": torch.randn(7, 1, 1)}), "x axis 0: got 7, .* to 6"),
        (
            lambda: ((torch.randn(2, 3, 8, 9),), {"scale": torch.randn(3, 1, 1)}),
            "scale axis 0: got 3, .* be 2",
        ),
        (
            lambda: ((torch.randn(2, 3, 8, 10),), {"scale": torch.randn(2, 1, 1)}),
            "axis 3: got 10, .* 9, which is fixed",
        ),
        (lambda: ((torch.randn(2, 3, 8),), {"scale": torch.randn(2, 1, 1)}), "expected a tensor of 4 axes"),
        (lambda: ((None,), {"scale": torch.randn(2, 1, 1)}), "must be a torch.Tensor, got NoneType"),
        (lambda: ((np.zeros((2, 3, 8, 9)),), {"scale": torch.randn(2, 1, 1)}), "got ndarray; pass torch.from_numpy"),
        (lambda: ((torch.randn(2, 3, 8, 9),), {}), "'scale' is missing"),
        (lambda: ((torch.randn(2, 3, 8, 9),), {"scale": torch.randn(2, 1, 1), "flip": True}), "fixed in the graph"),
        (lambda: ((torch.randn(2, 3, 8, 9).double(),), {"scale": torch.randn(2, 1, 1)}), "float64"),
        (lambda: ((torch.randn(2, 3, 0, 9),), {"scale": torch.randn(2, 1, 1)}), "axis 2: got 0"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, message: str) -> None:
    _, net = _shared()
    args, kwargs = call()
    with pytest.raises(InputError, match=message):
        net(*args, **kwargs)


_SHARED: list[tuple[nn.Module, fp.DynamicModel]] = []


def _shared() -> tuple[nn.Module, fp.DynamicModel]:
    if not _SHARED:
        _SHARED.append(_compiled())
    return _SHARED[0]


def test_warm_up_plans_before_calls() -> None:
    _, net = _compiled(max_shapes=3)
    net.warm_up([{"x": torch.empty(batch, 3, 8, 9), "scale": torch.empty(batch, 1, 1)} for batch in (1, 4)])
    assert {shapes[0][0] for shapes in net.shapes} == {1, 2, 4}
    with pytest.raises(InputError, match="max_shapes is 3"):
        net.warm_up([torch.empty(1)] * 4)


def test_known_ranges_are_planned_at_once() -> None:
    rows, columns = Dim("rows", max=64), Dim("columns", min=4, max=64)
    layer, x = nn.Conv1d(3, 4, 3).eval(), torch.randn(2, 3, 8)
    net = fp.compile(
        layer, x, dynamic_shapes=({0: rows, 2: columns},), shapes={"input": ([1, 3], 3, (8, 16, 4))}, max_shapes=6
    )
    assert {shape for (shape,) in net.shapes} == {(n, 3, m) for n in (1, 3) for m in (8, 12, 16)}
    torch.testing.assert_close(net(x), layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="9 combinations of sizes, but max_shapes is 6"):
        net.warm_up({"input": ([1, 2, 3], 3, [8, 9, 10])})
    with pytest.raises(InputError, match=r"shapes\['input'\] axis 1: 4 is not the model's own 3"):
        net.warm_up({"input": (1, 4, 8)})
    with pytest.raises(InputError, match="got 65, but the model was exported for"):
        net.warm_up({"input": (65, 3, 8)})
    with pytest.raises(InputError, match="without buckets, warm_up needs the sizes"):
        net.warm_up()
    with pytest.raises(ImportModelError, match="for models with dynamic axes"):
        fp.compile(layer, x, shapes={"input": (1, 3, 8)})


def test_buckets_are_planned_at_once() -> None:
    tokens = Dim("tokens", max=512)
    net = fp.compile(
        nn.Linear(8, 4).eval(),
        torch.randn(1, 5, 8),
        dynamic_shapes=({1: tokens},),
        buckets={"input": {-2: (64, 16)}},
    )
    assert net.shapes == [((1, 16, 8),)]
    net.warm_up()
    assert net.shapes == [((1, 16, 8),), ((1, 64, 8),)]
    assert net(torch.randn(1, 20, 8)).shape == (1, 20, 4)
    assert net.shapes[:1] == [((1, 16, 8),)] or len(net.shapes) == 3  # the first padded call is compared without


def test_a_program_exported_with_dynamic_shapes_needs_no_word() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(3, 6),), dynamic_shapes=({0: Dim("n", max=99)},))
    net = fp.compile(program)
    for n in (3, 5, 99):
        x = torch.randn(n, 6)
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)


@dataclass
class Boxes:
    near: torch.Tensor
    far: list


torch.export.register_dataclass(Boxes)


class Nested(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, extra: dict | None = None) -> Boxes:
        total = pair[0] + pair[1]
        return Boxes(total, [total * 2, None] if extra is None else [extra["more"] - total, None])


def test_keyword_arguments_and_dataclasses_without_dynamic_shapes() -> None:
    x, y, more = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    net = fp.compile(Nested(), ((x, y),), kwargs={"extra": {"more": more}})
    got = net((x, y), extra={"more": more})
    assert type(got) is Boxes
    torch.testing.assert_close(got.far[0], more - (x + y))
    assert got.far[1] is None


class Open(nn.Module):
    def forward(self, x: torch.Tensor, **more: object) -> torch.Tensor:
        scaled = x * more["scale"]
        return scaled.flip(0) if more.get("flip") else scaled


def test_arguments_that_kwargs_take_have_sizes_of_their_own_or_fixed_ones() -> None:
    model, rows = Open(), Dim("rows", max=9)
    kwargs = {"scale": torch.randn(4, 1), "flip": True}
    shapes = {"x": {0: rows}, "scale": {0: rows}}
    net = fp.compile(model, torch.randn(4, 3), kwargs=kwargs, dynamic_shapes=shapes, tune="model")
    x, scale = torch.randn(7, 3), torch.randn(7, 1)
    torch.testing.assert_close(net(x, scale=scale, flip=True), (x * scale).flip(0))
    assert "forward" not in vars(model)


def test_bad_options_are_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="max_shapes"):
        fp.compile(nn.ReLU(), torch.ones(2), dynamic_shapes=({0: Dim("n")},), max_shapes=0)
    with pytest.raises(UnsupportedOpError, match="is for modules"):
        fp.compile("resnet50", dynamic_shapes=({0: Dim("n")},))
    with pytest.raises(UnsupportedOpError, match="release_weights frees"):
        fp.compile(nn.Linear(2, 2), torch.ones(3, 2), dynamic_shapes=({0: Dim("n")},), release_weights=True)
    with pytest.raises(UnsupportedOpError, match="release_weights frees"):
        fp.compile(nn.Linear(2, 2), torch.ones(3, 2), training=True, release_weights=True)
    with pytest.raises(UnsupportedOpError, match="not for training"):
        fp.compile(nn.ReLU(), torch.ones(2), dynamic_shapes=({0: Dim("n")},), training=True)
    with pytest.raises(ImportModelError):
        fp.compile(nn.ReLU(), torch.ones(2), dynamic_shapes={"no_such": {0: Dim("n")}})
    with pytest.raises(ImportModelError, match="kwargs"):
        fp.compile(nn.ReLU(), torch.ones(2), kwargs=[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(48), nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 3, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_a_similar_shape_takes_the_choices_of_another_one(policy: str) -> None:
    model, tokens = Block().eval(), Dim("tokens", min=2, max=400)
    net = fp.compile(model, torch.randn(2, 32, 48), tune="model", policy=policy, dynamic_shapes=({1: tokens},))
    for count, is_similar in ((31, True), (100, True), (5, True), (3, False), (2, True), (300, False)):
        x = torch.randn(2, count, 48)
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
        compilation = net.plan_for(x).compilation
        assert compilation.is_like_another_shape == (is_similar and policy == "optimal"), count


def test_few_queries_take_the_choices_of_another_shape() -> None:
    model, tokens = Block().eval(), Dim("tokens", min=2, max=400)
    net = fp.compile(model, torch.randn(2, 8, 48), tune="model", dynamic_shapes=({1: tokens},))
    if "attention" not in [step.node.op for step in net.plan_for(torch.randn(2, 8, 48)).plan.steps]:
        pytest.skip("attention is no kernel here")
    x = torch.randn(2, 3, 48)  # the kernel, if it can, or the nodes that it stands for
    torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    assert net.plan_for(x).compilation.is_like_another_shape


def test_many_threads_meet_new_shapes_at_once() -> None:
    model, net = _compiled(max_shapes=2)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for batch in (1, 2, 3, 1):
            x, scale = torch.randn(batch, 3, 8, 9, generator=generator), torch.randn(batch, 1, 1, generator=generator)
            if not torch.allclose(net(x, scale=scale)["logits"], model(x, scale=scale)["logits"], 1e-4, 1e-5):
                failures.append(f"{seed}, {batch}")

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_calls_in_the_background_have_any_shape() -> None:
    model, net = _compiled(max_shapes=3)
    calls = [_call(batch, 8) for batch in (1, 2, 3, 2, 1, 3)]
    futures = [net.submit(x, scale=scale) for x, scale in calls]
    for (x, scale), future in zip(calls, futures, strict=True):
        torch.testing.assert_close(future.result(60)["logits"], model(x, scale=scale)["logits"], rtol=1e-4, atol=1e-5)
    with net.throughput(2) as pool, pytest.raises(InputError, match="'scale' is missing"):
        pool.submit(calls[0][0]).result(60)
    net.close()


def test_a_size_that_the_model_fixes_is_named():
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[1] == 8)
            return x @ x.t()

    anything = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    net = fp.compile(Fixed(), (torch.ones(2, 8),), dynamic_shapes=(anything,), tune="model")
    assert net(torch.ones(3, 8)).shape == (3, 3)
    with pytest.raises(InputError, match="x axis 1: got 7, but it must be 8, which is fixed: the model itself"):
        net(torch.ones(3, 7))


class Parity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


def test_a_size_for_which_the_model_takes_another_branch_is_refused(tmp_path) -> None:
    shapes = ({0: Dim.AUTO},)
    net = fp.compile(Parity(), torch.ones(4, 5), dynamic_shapes=shapes)
    assert torch.equal(net(torch.ones(6, 5)), torch.full((6, 5), 2.0))
    with pytest.raises(InputError, match=r"input x axis 0: got 3: the model takes another branch there than .*Mod\("):
        net(torch.ones(3, 5))
    torch.export.save(torch.export.export(Parity(), (torch.ones(4, 5),), dynamic_shapes=shapes), tmp_path / "m.pt2")
    loaded = fp.compile(torch.export.load(tmp_path / "m.pt2"))
    assert torch.equal(loaded(torch.ones(6, 5)), torch.full((6, 5), 2.0))
    with pytest.raises(InputError, match=r"takes another branch for \(3, 5\) than when it was exported"):
        loaded(torch.ones(3, 5))


def test_sizes_are_multiples_of_a_size_that_changes(monkeypatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2.0)).eval()
    net = fp.compile(model, torch.ones(1, 3, 8, 8), dynamic_shapes=({2: 4 * Dim("rows", min=1, max=4)},), tune="model")
    # all sizes follow from the rows: PyTorch is asked about no call
    with monkeypatch.context() as patched:
        patched.setattr("fmtprop.capture.specialise._Specialiser._called", None)
        x = torch.randn(1, 3, 12, 8)
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    one = torch.randn(1, 3, 4, 8)
    torch.testing.assert_close(net(one), model(one), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"axis 2: got 10, but it must be 4\*\w+ for a whole number \w+"):
        net(torch.ones(1, 3, 10, 8))
    with pytest.raises(InputError, match="axis 2: got 20, but the model was exported for 8 to 16"):
        net(torch.ones(1, 3, 20, 8))


def test_a_part_that_begins_later_in_a_tensor_has_sizes_that_follow(monkeypatch) -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = x.split(2, 1)
            return first.relu() + second

    net = fp.compile(Parts(), torch.ones(2, 4, 5), dynamic_shapes=({2: Dim("n", min=2, max=9)},), tune="model")
    monkeypatch.setattr("fmtprop.capture.specialise._Specialiser._called", None)
    x = torch.randn(2, 4, 7)
    assert torch.equal(net(x), Parts()(x))


class Fixed(nn.Module):
    """Results that no input changes: a parameter, and what is made of one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(8, 8), nn.Parameter(torch.arange(24.0).reshape(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.head(x).relu(), self.table.t() * 2.0, self.head.weight + 1.0


def test_results_that_no_input_changes_are_those_of_each_shape() -> None:
    model = Fixed().eval()
    net = fp.compile(model, (torch.randn(2, 8),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},), tune="model")
    for batch in (2, 3, 5, 9):
        x = torch.randn(batch, 8)
        for got, want in zip(net(x), model(x), strict=True):
            torch.testing.assert_close(got, want)


def test_marks_and_sizes_that_can_never_be_met_are_named() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(3, 4)
    with pytest.raises(ImportModelError, match=r"marks axis 5 of a tensor of shape \(3, 4\): its axes are 0 to 1"):
        fp.compile(layer, x, dynamic_shapes=({5: Dim("n")},), tune="model")
    with pytest.raises(InputError, match="input input axis 0: sizes must be a tuple of numbers"):
        fp.compile(layer, x, dynamic_shapes=({0: Dim("n")},), buckets={"input": {0: ()}}, tune="model")
    net = fp.compile(layer, x, dynamic_shapes=({0: Dim("n")},), tune="model")
    for wrong in (3, x, iter([x])):
        with pytest.raises(InputError, match="warm_up takes sizes by input or a list of calls, got"):
            net.warm_up(wrong)


def test_a_packed_sequence_is_refused_with_a_remedy() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 4), torch.ones(3, 4)])
    with pytest.raises(ImportModelError, match=r"such as a PackedSequence .*: pass its tensors, or use torch.compile"):
        fp.compile(nn.GRU(4, 6).eval(), (packed,))
