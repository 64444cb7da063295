"""``torch.compile(model, backend="fmtprop")``: as PyTorch would answer, whatever is done to the model meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.api import Options, compile_graph
from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.errors import UnsupportedOpError
from fmtprop.jit import no_code

OPTIONS = {"tune": "model", "confirm": False}


def compiled(model: Callable, **how) -> tuple[Callable, list[region.Region]]:
    regions: list[region.Region] = []
    return torch.compile(model, backend=regions_by(options_of(None, OPTIONS), regions.append), **how), regions


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    return nn.Sequential(*layers).eval()


def image(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))


def assert_alike(model: Callable, other: Callable, *args) -> None:
    torch.testing.assert_close(other(*args), model(*args), rtol=1e-4, atol=1e-5)


def test_it_is_listed_and_found_by_name():
    assert "fmtprop" in torch._dynamo.list_backends()
    model = network()
    with torch.no_grad():
        assert_alike(model, torch.compile(model, backend="fmtprop", options=OPTIONS), image())


@pytest.mark.usefixtures("always")
def test_a_graph_is_one_plan():
    model = network()
    run, regions = compiled(model)
    with torch.no_grad():
        assert_alike(model, run, image())
    (only,) = regions
    assert [outcome.net is not None for outcome in only.outcomes] == [True]


def test_what_is_not_faster_runs_as_pytorch_would(monkeypatch):
    monkeypatch.setattr(region, "compare", lambda ours, theirs: (False, (2.0, 1.0)))
    model = network()
    run, regions = compiled(model)
    with torch.no_grad():
        assert torch.equal(run(image()), model(image()))
    assert "PyTorch is as fast" in regions[0].outcomes[0].reason


def test_pytorch_runs_the_captured_graph_itself(monkeypatch):
    monkeypatch.setattr(region, "compare", lambda ours, theirs: (False, (2.0, 1.0)))
    model = network()
    run, regions = compiled(model)
    with torch.no_grad():
        run(image())
        monkeypatch.setattr(region.Region, "__call__", lambda self, args: pytest.fail("the functional form was run"))
        assert torch.equal(run(image(1)), model(image(1)))
        model[5].weight.mul_(2)
        assert torch.equal(run(image(1)), model(image(1)))
    assert len(regions) == 1


def returns_a_view(x):
    return x.view(-1), F.relu(x) @ x.t()


def changes_an_input(x):
    return F.relu(x.add_(1)) @ x.t()


def changes_the_mode(x):
    torch.set_grad_enabled(True)
    return F.relu(x) @ x.t()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("function", [returns_a_view, changes_an_input, changes_the_mode])
def test_calls_that_pytorch_must_wrap_go_through_its_wrapper(function):
    run, regions = compiled(function)
    x = torch.randn(4, 4)
    for _ in range(2):
        with torch.no_grad():
            other = x.clone()
            expected = function(other)
            mode = torch.is_grad_enabled()
        with torch.no_grad():
            torch.testing.assert_close(run(x), expected)
            assert torch.is_grad_enabled() == mode
            torch.testing.assert_close(x, other)
    assert not any(isinstance(one, region.Region) and one.is_direct for one in regions)


class Whitened(nn.Module):
    """Refuses numbers, so PyTorch keeps its checks in order: its graph has one more input."""

    def __init__(self):
        super().__init__()
        self.mix, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        y = self.mix(x)
        return torch.cholesky_solve(self.weight, torch.linalg.cholesky(y.t() @ y + torch.eye(6)))


@pytest.mark.usefixtures("always")
def test_calls_that_may_refuse_numbers():
    model = Whitened()
    run, _ = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            assert_alike(model, run, torch.randn(8, 6))
        model.weight.mul_(2)
        assert_alike(model, run, torch.randn(8, 6))
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            run(torch.full((8, 6), float("nan")))


@pytest.mark.usefixtures("always")
def test_a_plan_of_a_whole_graph_is_called_without_a_wrapper():
    model = network()
    run, regions = compiled(model)
    with torch.no_grad():
        for batch in (1, 1):
            assert_alike(model, run, image(batch))
    assert regions[0].is_direct


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (None, {"policies": "optimal"}, "no option 'policies'"),
        (None, {"pin": {}}, "no option 'pin'"),
        (None, {"dtype": "f23"}, "'dtype' parameter"),
        ("reduce-overhead", None, "no mode 'reduce-overhead'"),
    ],
)
def test_wrong_options_are_refused_by_name(mode, options, message):
    with pytest.raises(UnsupportedOpError, match=message):
        options_of(mode, options)


def test_autotuning_measures():
    assert options_of("max-autotune", None).tune == "measure"


def in_place(model: nn.Sequential) -> None:
    model[0].weight.mul_(2)


def data_swap(model: nn.Sequential) -> None:
    model[0].weight.data = model[0].weight.data * 3


def state_dict(model: nn.Sequential) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def replaced(model: nn.Sequential) -> None:
    model[5].weight = nn.Parameter(torch.ones_like(model[5].weight))


def statistics(model: nn.Sequential) -> None:
    model[1].running_mean.add_(1)


def frozen(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)
    model[5].bias.copy_(torch.ones(4))


def module_replaced(model: nn.Sequential) -> None:
    model[5] = nn.Linear(72, 4)


def moved_back(model: nn.Sequential) -> None:
    model.double().float()[0].bias.zero_()


class Adapted(nn.Module):
    """A layer with a correction of low rank, as LoRA adds it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(72, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted(model: nn.Sequential) -> None:
    model[5] = Adapted(model[5])


def optimised(model: nn.Sequential) -> None:
    with torch.enable_grad():
        model(image()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def resized(model: nn.Sequential) -> None:
    model[5].weight = nn.Parameter(model[5].weight[:3].clone())
    model[5].bias = nn.Parameter(model[5].bias[:3].clone())


def copied_without_autograd(model: nn.Sequential) -> None:
    with torch.inference_mode():
        model[0].weight.copy_(torch.ones_like(model[0].weight))


def parametrised(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[5]).parametrizations.weight.original0.mul_(3)


def pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[5], "weight", amount=0.5)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "change",
    [
        *(in_place, data_swap, state_dict, replaced, statistics, frozen, module_replaced, moved_back, adapted),
        *(optimised, resized, copied_without_autograd, parametrised, pruned),
    ],
)
def test_changed_weights_are_seen(change):
    model = network()
    run, _ = compiled(model)
    with torch.no_grad():
        before = run(image())
        change(model)
        assert_alike(model, run, image())
        assert run(image()).shape != before.shape or not torch.equal(run(image()), before)


def with_weight_norm(model: nn.Sequential) -> torch.Tensor:
    return nn.utils.parametrizations.weight_norm(model[5]).parametrizations.weight.original1


def with_mask(model: nn.Sequential) -> torch.Tensor:
    prune.l1_unstructured(model[5], "weight", amount=0.5)
    return model[5].weight_mask


def with_tied_weights(model: nn.Sequential) -> torch.Tensor:
    model.append(nn.Linear(4, 72, bias=False).eval())
    model[6].weight = nn.Parameter(model[5].weight.t())
    model[5].weight = nn.Parameter(model[6].weight.data.t())
    return model[6].weight


def with_tensor_that_is_no_parameter(model: nn.Sequential) -> torch.Tensor:
    scale = torch.full((4,), 2.0)
    model[5].register_forward_hook(lambda module, args, result: result * scale)
    return scale


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("prepare", [with_weight_norm, with_mask, with_tied_weights, with_tensor_that_is_no_parameter])
def test_weights_in_other_places_that_change_are_seen(prepare):
    with torch.no_grad():
        model = network()
        weight = prepare(model)
        run, _ = compiled(model)
        before = run(image())
        weight[0].add_(1.5)
        assert_alike(model, run, image())
        assert not torch.equal(run(image()), before)


def by_data(weight: torch.Tensor) -> None:
    weight.data.mul_(0.5)


def by_data_and_a_sum(weight: torch.Tensor) -> None:
    weight.data += torch.ones_like(weight)  # as adapters are merged


def by_numpy(weight: torch.Tensor) -> None:
    weight.numpy()[...] -= 1


@pytest.mark.skipif(bool(no_code()), reason=no_code())
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("change", [by_data, by_data_and_a_sum, by_numpy])
@pytest.mark.parametrize("place", ["0.weight", "0.bias", "1.running_mean", "5.weight"])
def test_changes_that_pytorch_does_not_count_are_seen(change, place):
    model = network().requires_grad_(requires_grad=False)
    model[1].running_mean.normal_()
    model[5].weight[:, ::2] = 0
    run, _ = compiled(model)
    with torch.no_grad():
        before = run(image())
        change(model.state_dict(keep_vars=True)[place])
        assert_alike(model, run, image())
        assert not torch.equal(run(image()), before)


@pytest.mark.skipif(bool(no_code()), reason=no_code())
@pytest.mark.usefixtures("always")
def test_a_new_shape_sees_changes_that_pytorch_does_not_count():
    model = network().requires_grad_(requires_grad=False)
    run, _ = compiled(model, dynamic=True)
    with torch.no_grad():
        assert_alike(model, run, image(2))
        by_data(model[5].weight)
        assert_alike(model, run, image(3))


@pytest.mark.usefixtures("always")
def test_a_model_that_becomes_bf16_is_seen():
    model = network()
    run, _ = compiled(model)
    with torch.no_grad():
        run(image())
        model.to(torch.bfloat16)
        got, expected = run(image().bfloat16()), model(image().bfloat16())
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("always")
def test_weights_that_change_all_the_time_are_not_packed_again_and_again():
    model = network()
    run, regions = compiled(model)
    with torch.no_grad():
        for _ in range(region._MOST_CHANGES + 2):
            assert_alike(model, run, image())
            model[0].weight.add_(0.1)
    assert "have changed" in regions[0].outcomes[0].reason


@pytest.mark.usefixtures("always")
def test_each_shape_has_a_plan_of_its_own(monkeypatch):
    monkeypatch.setattr(region, "MOST_PLANS", 2)
    model = network()
    run, regions = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 4, 3, 2):
            assert_alike(model, run, image(batch))
    (one,) = regions
    assert [outcome.net is not None for outcome in one.outcomes] == [True, True, False]  # the last tells of rare ones


@pytest.mark.usefixtures("always")
def test_the_plan_that_was_used_longest_ago_goes_first(monkeypatch):
    monkeypatch.setattr(region, "MOST_PLANS", 2)
    made: list[int] = []
    plain = region.compile_graph
    monkeypatch.setattr(region, "compile_graph", lambda *given, **shapes: made.append(1) or plain(*given, **shapes))
    run, _ = compiled(lambda x: torch.relu(x) @ x.t(), dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 2, 4, 4, 4, 2):
            run(torch.randn(rows, 8))
    assert len(made) == 3  # that of two rows was kept


@pytest.mark.usefixtures("always")
def test_rare_shapes_run_in_pytorch(monkeypatch):
    monkeypatch.setattr(region, "MOST_PLANS", 4)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    run, regions = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (*range(2, 12), 11, 11):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x))
    assert [shapes[-1] for shapes in regions[0]._plans] == [(3, 8), (4, 8), (5, 8), (11, 8)]  # 11 was met three times
    assert "5 shapes were met less than 3 times" in regions[0].outcomes[-1].reason


@pytest.mark.usefixtures("always")
def test_weights_without_a_version_are_not_packed():
    with torch.inference_mode():
        model = network()
        run, regions = compiled(model)
        for _ in range(2):
            assert_alike(model, run, image())
            model[0].weight.mul_(2)  # nobody counts it
    assert all(outcome.net is None for one in regions for outcome in one.outcomes)


@pytest.mark.usefixtures("always")
def test_plans_read_tensors_that_were_made_in_inference_mode():
    model = network()
    run, regions = compiled(model)
    with torch.inference_mode():
        x = image().mul(2)
        assert x.is_inference()
        for _ in range(2):
            assert_alike(model, run, x)
    with torch.no_grad():
        assert_alike(model, run, x)
        assert_alike(model, run, image())
    outcomes = [outcome for one in regions for outcome in one.outcomes]
    assert outcomes
    assert all(outcome.net is not None for outcome in outcomes)


@pytest.mark.usefixtures("always")
def test_graph_breaks_make_several_graphs():
    def broken(x):
        y = torch.sin(x) @ x
        torch._dynamo.graph_break()
        return {"y": torch.relu(y) @ y, "x": x}

    x = torch.randn(8, 8)
    run, regions = compiled(broken)
    with torch.no_grad():
        got, expected = run(x), broken(x)
    assert got["x"] is x
    torch.testing.assert_close(got["y"], expected["y"])
    assert len(regions) == 2


@pytest.mark.usefixtures("always")
def test_inputs_and_buffers_are_changed_as_pytorch_changes_them(monkeypatch):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x, y):
            self.count += 1
            x.add_(y)
            return x * self.count

    made: list[int] = []
    plain = region.compile_graph
    monkeypatch.setattr(region, "compile_graph", lambda *given, **shapes: made.append(1) or plain(*given, **shapes))
    model, other = Counting(), Counting()
    run, regions = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            x, same = torch.ones(3), torch.ones(3)
            assert torch.equal(run(x, torch.ones(3)), other(same, torch.ones(3)))
            assert torch.equal(x, same)
    assert torch.equal(model.count, other.count)
    assert all(len(one.outcomes) == 1 for one in regions)
    assert len(made) <= len(regions), "no plan is made anew"


@pytest.mark.usefixtures("always")
def test_results_have_the_strides_that_pytorch_gives_them():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last).eval()
    run, _ = compiled(lambda x: model(x).permute(0, 2, 3, 1))
    x = image(2).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        got, expected = run(x), model(x).permute(0, 2, 3, 1)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_a_graph_that_needs_gradients_is_a_step(monkeypatch, ours):
    monkeypatch.setattr(
        import_module("fmtprop.dynamo.backend"), "compare", lambda a, b, _: (a(), b(), (ours, (1.0, 2.0)))[-1]
    )
    model, other = network().train(), network().train()
    run, steps = compiled(model)
    for _ in range(2):
        for call in (run, other):
            torch.manual_seed(0)
            call(image(4)).square().sum().backward()
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in other.parameters()], rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
    (only,) = steps
    assert (only.net is not None, only.reason != "") == (ours, not ours)


def test_a_step_that_cannot_be_imported_runs_as_pytorch_would():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.multinomial(torch.softmax(x, -1), 1)

    run, steps = compiled(noisy)
    results = []
    for call in (run, noisy):
        x = image()[0, 0].requires_grad_()
        torch.manual_seed(0)
        call(x).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)
    assert "draws random numbers" in steps[0].reason


@pytest.mark.usefixtures("always")
def test_inference_mode_and_autocast():
    model = network()
    run, _ = compiled(model)
    with torch.inference_mode():
        assert_alike(model, run, image())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run(image()), model(image()), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("always")
def test_tensors_that_are_not_plain_run_as_pytorch_would():
    run, regions = compiled(lambda x: torch.sparse.mm(x, torch.ones(3, 3)))
    x = torch.eye(3).to_sparse()
    with torch.no_grad():
        assert torch.equal(run(x), torch.ones(3, 3))
    assert all(outcome.net is None for one in regions for outcome in one.outcomes)


def test_an_explanation_names_graphs_and_breaks():
    def broken(x):
        y = x @ x
        torch._dynamo.graph_break()
        return torch.relu(y) @ y

    found = fp.explain(broken, torch.ones(8, 8), options=OPTIONS)
    assert len(found.regions) == 2
    assert len(found.breaks) == 1
    assert str(found).startswith("2 graphs, 1 graph break")


def test_explanations_have_no_limit_of_captures():
    layer, others = nn.Linear(8, 8), [nn.Linear(8, 8) for _ in range(torch._dynamo.config.recompile_limit + 1)]
    inputs = torch.ones(2, 8)
    trained = [fp.compile(other, inputs, training=True, tune="model", confirm=False) for other in others]
    assert len(fp.explain(layer, inputs, options=OPTIONS).regions) == 1
    assert len(trained) == len(others)


def test_plans_compete_with_the_captured_graph_and_not_with_its_functional_form(monkeypatch):
    competed: list[bool] = []
    functional = monkeypatch.context

    def compare(ours: Callable, theirs: Callable) -> tuple[bool, tuple[float, float]]:
        with functional() as during:
            during.setattr(region.Region, "__call__", lambda self, args: pytest.fail("the functional form was run"))
            competed.append(isinstance(theirs(), torch.Tensor | tuple | list))
        ours()
        return True, (1e-6, 2e-6)

    monkeypatch.setattr(region, "compare", compare)
    run, regions = compiled(network(), dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 2):
            run(image(batch))
    assert competed == [True, True]
    assert [outcome.net is not None for outcome in regions[0].outcomes] == [True, True]


@pytest.mark.parametrize(
    ("ours", "theirs", "compared"), [(0.5, 1.0, 1), (0.95, 1.0, 2), (1e-6, 2e-6, 2), (2.0, 1.0, 2)]
)
def test_a_new_shape_of_a_clearly_faster_plan_is_not_compared(monkeypatch, ours, theirs, compared):
    calls: list[float] = []
    monkeypatch.setattr(region, "compare", lambda *runs: (calls.append(ours), (ours < theirs, (ours, theirs)))[1])
    model = network()
    run, regions = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3):
            x = image(batch)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == compared
    assert [outcome.net is not None for outcome in regions[0].outcomes] == [ours < theirs] * 2


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x[0], size=(2 * x.shape[3],), mode="linear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=(2.0, 1.5), mode="nearest-exact"),
        lambda x: F.interpolate(x[None], size=(3, x.shape[2] + 1, 4), mode="trilinear"),
        lambda x: F.local_response_norm(x, 3),
    ],
)
def test_whole_calls_of_sizes_that_change(function):
    run, regions = compiled(function, dynamic=True)
    for rows in (4, 6):
        x = torch.randn(2, 3, rows, 5)
        with torch.no_grad():
            assert_alike(function, run, x)
        gradients = []
        for call in (run, function):
            given = x.clone().requires_grad_()
            call(given).square().sum().backward()
            gradients.append(given.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    calls = [str(node.target) for node in regions[0].module.graph.nodes]
    assert any("upsample" in call for call in calls) or any("pow" in call for call in calls)


@pytest.mark.usefixtures("always")
def test_a_resampling_to_a_size_that_changes():
    def resampled(x: torch.Tensor, size: int) -> torch.Tensor:
        return F.interpolate(2 * x, size=(size, size), mode="bilinear")

    run, _ = compiled(resampled)
    for size in (4, 6, 7):
        gradients = []
        for call in (run, resampled):
            x = image().requires_grad_()
            call(x, size).square().sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", None])
def test_whole_calls_of_no_images(mode):
    def function(x):
        return F.local_response_norm(x, 3) if mode is None else F.interpolate(x, scale_factor=2.0, mode=mode)

    run, _ = compiled(function)
    x = torch.randn(0, 6, 5, 4)
    with torch.no_grad():
        assert_alike(function, run, x)
    given = x.clone().requires_grad_()
    run(given).sum().backward()
    assert given.grad is not None and given.grad.shape == x.shape


@pytest.mark.usefixtures("always")
def test_nothing_is_traced_while_a_shape_is_planned():
    """While one thread traces, PyTorch refuses calls of compiled functions in all threads."""
    traced: list[bool] = []

    @torch.library.custom_op("fmtprop_tests::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @same.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.fx._symbolic_trace.is_fx_tracing())
        return torch.empty_like(x)

    run, regions = compiled(lambda x: same(x) @ x.t(), dynamic=True)
    with torch.no_grad():
        run(torch.ones(2, 8))
        traced.clear()
        run(torch.ones(3, 8))
    assert len(regions[0].outcomes) == 2
    assert traced and not any(traced)


def test_training_with_sizes_that_change():
    """AOTAutograd gives the sizes to the backward half before its tensors."""
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    module = nn.Sequential(*layers)
    call, _ = compiled(module)
    for size in (8, 10, 12):
        x = torch.randn(2, 3, size, 9)
        found = []
        for one in (call, module):
            module.zero_grad()
            one(x).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in module.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_races_are_not_watched():
    """AOTAutograd watches each operator of a function's first call, which makes PyTorch's operators slow."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} is watched")

    with Watching():
        _, seconds = region.compare(lambda: torch.ones(2) + 1, lambda: torch.ones(2) - 1)
        net = compile_graph(fp.load("chain"), Options(tune="model"))
    assert min(seconds) > 0 and net.plan.steps


def test_a_step_in_pytorch_takes_other_strides_than_traced(monkeypatch):
    monkeypatch.setattr(import_module("fmtprop.dynamo.backend"), "compare", lambda ours, theirs, _: (False, (2.0, 1.0)))

    @torch.library.custom_op("fmtprop_tests::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    @turned.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (turned(x).reshape(-1) * w).sum()

    x, w = torch.randn(3, 4), torch.randn(12, requires_grad=True)
    torch.compile(function, backend="fmtprop", options=OPTIONS)(x, w).backward()
    torch.testing.assert_close(w.grad, x.reshape(-1))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("parameters", "statistics"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
)
def test_statistics_of_bf16_have_the_type_that_pytorch_gives_them(parameters, statistics):
    rows, image = torch.randn(4, 6).bfloat16(), torch.randn(2, 6, 5).bfloat16()
    weight, average, variance = (torch.ones(6, dtype=parameters) for _ in range(3))
    aten = torch.ops.aten
    for function, x in (
        (lambda x: torch.native_layer_norm(x, (6,), weight, weight, 1e-5), rows),
        (lambda x: torch.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5), image),
        (
            lambda x: aten._native_batch_norm_legit(
                x, weight, weight, average.clone(), variance.clone(), True, 0.1, 1e-5
            ),
            image,
        ),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            expected, got = function(x), compiled(function)[0](x)
        assert [result.dtype for result in expected] == [torch.bfloat16, statistics, statistics]
        for result, wanted in zip(got, expected, strict=True):
            assert result.dtype is wanted.dtype
            torch.testing.assert_close(result, wanted)


class Half(nn.Module):
    """A call that has no gradients, behind a layer that has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).floor_divide(0.5) * 2


def test_what_has_no_gradients_runs_in_pytorch():
    model, x = Half(), torch.randn(3, 7)
    compiled = torch.compile(model, backend="fmtprop")
    torch.testing.assert_close(compiled(x), model(x))
    with pytest.raises(RuntimeError, match="floor_divide"):
        compiled(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.usefixtures("always")
def test_a_model_that_is_captured_anew_for_other_sizes_keeps_its_choices():
    model = network()
    run, regions = compiled(model, dynamic=False)
    with torch.no_grad():
        for batch in (2, 3):
            assert_alike(model, run, image(batch))
    first, second = (one.outcomes[0].net for one in regions)
    assert not first.compilation.is_like_another_shape
    assert second.compilation.is_like_another_shape


def test_weights_that_a_plan_reads_in_place_get_huge_pages(monkeypatch):
    seen = []
    monkeypatch.setattr(dnnl, "use_huge_pages", lambda blocks: seen.extend(blocks))
    module = nn.Linear(1024, 1024).eval()
    with torch.no_grad():
        torch.compile(module, backend="fmtprop", options={"deterministic": True})(torch.ones(1, 1024))
    assert (module.weight.data_ptr(), module.weight.nbytes) in seen


def test_an_explanation_tells_of_recurrent_modules():
    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layer(x)[0])

    module, x = Tagger().eval(), torch.ones(3, 2, 8)
    found = fp.explain(module, x, options=OPTIONS)
    assert not found.regions and "nn.LSTM to Python; torch._dynamo.config.allow_rnn = True" in str(found)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        found = fp.explain(module, x, options=OPTIONS)
    assert len(found.regions) == 1 and "allow_rnn" not in str(found)
