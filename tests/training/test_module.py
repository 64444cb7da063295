"""``fp.compile(module, x, training=True)``: trains as the module does, and says what PyTorch's users know."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fmtprop as fp
from fmtprop.errors import ImportModelError, InputError, UnsupportedOpError
from fmtprop.runtime import executor
from fmtprop.runtime.context import Context
from tests.training.networks import Transformer, convolutions, mlp, resnet

OPTIONS = {"training": True, "tune": "model", "confirm": False}


def compiled(module: nn.Module, *inputs: torch.Tensor, **how) -> tuple[nn.Module, nn.Module]:
    """Return the module compiled for training, and a copy of it to compare with."""
    return fp.compile(module, inputs, **OPTIONS | how), copy.deepcopy(module)


def image(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(batch: int = 4) -> torch.Tensor:
    return torch.arange(batch) % 5


def assert_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name
            continue
        error = float((one.grad - other.grad).abs().max())
        assert error <= 1e-4 * max(1e-2, float(other.grad.abs().max())), (name, error)


def assert_same_step(ours: nn.Module, theirs: nn.Module, *inputs: torch.Tensor) -> None:
    """Compare results, gradients and buffers of one step, inputs that want gradients among them."""
    results = []
    for module in (ours, theirs):
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        torch.manual_seed(1)
        y = module(*given)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        results.append([y, *(x.grad for x in given if x.requires_grad)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert_gradients(ours, theirs)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 12)),
    "convolutions": (convolutions, (4, 3, 8, 8)),
    "resnet": (resnet, (4, 3, 8, 8)),
    "transformer": (Transformer, (4, 3, 8, 8)),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "optimal") for name in NETWORKS), *(("resnet", policy) for policy in ("propagate", "plain"))],
)
def test_gradients_are_those_of_pytorch(name, policy):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_()
    ours, theirs = compiled(make(), x, policy=policy)
    for _ in range(2):  # gradients are added up
        assert_same_step(ours, theirs, x)
    assert ours.nets[0].plan.turn is not None


@pytest.mark.parametrize(
    "optimiser",
    [
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 1e-2),
        lambda p: torch.optim.RMSprop(p, 1e-3),
    ],
    ids=["sgd", "adamw", "rmsprop"],
)
def test_losses_follow(optimiser):
    ours, theirs = compiled(convolutions(), image())
    losses = []
    for module in (ours, theirs):
        steps = optimiser(module.parameters())
        losses.append([])
        for number in range(8):
            steps.zero_grad()
            loss = F.cross_entropy(module(image(seed=number)), labels())
            loss.backward()
            steps.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_state_is_the_modules_own():
    module = convolutions()
    ours, theirs = compiled(module, image())
    assert list(ours.state_dict()) == list(module.state_dict())
    assert dict(ours.named_parameters()).keys() == dict(module.named_parameters()).keys()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # compiling changed nothing
    other = convolutions()
    ours.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert_same_step(ours, other, image())


def test_frozen_parameters_get_no_gradient_and_may_be_thawed():
    module = convolutions()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    ours, theirs = compiled(module, image())
    assert_same_step(ours, theirs, image())
    assert module[0].weight.grad is None
    for one in (ours, theirs):
        one.get_submodule("0").requires_grad_(True)
        one.zero_grad()
    assert_same_step(ours, theirs, image())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.inner(x))) @ self.inner.weight


def test_a_parameter_that_is_used_twice():
    ours, theirs = compiled(Tied(), torch.randn(3, 8))
    assert_same_step(ours, theirs, torch.randn(3, 8))


def test_hooks_see_gradients():
    ours, theirs = compiled(mlp(), torch.randn(6, 12))
    for module in (ours, theirs):
        next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
    assert_same_step(ours, theirs, torch.randn(6, 12))


def test_zero_grad_and_accumulation():
    ours, theirs = compiled(mlp(), torch.randn(6, 12))
    for to_none in (True, False):
        for module in (ours, theirs):
            module.zero_grad(set_to_none=to_none)
        assert_same_step(ours, theirs, torch.randn(6, 12))
        assert_same_step(ours, theirs, torch.randn(6, 12))


def test_evaluation_between_steps():
    ours, theirs = compiled(convolutions(), image())
    assert_same_step(ours, theirs, image())
    for module in (ours, theirs):
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(image(seed=1)), theirs(image(seed=1)), rtol=1e-4, atol=1e-5)
    assert ours.evaluations[0].net is not None
    assert_same_step(ours, theirs, image())  # gradients in evaluation mode
    with torch.no_grad():
        for module in (ours, theirs):
            next(module.parameters()).mul_(0.5)
        torch.testing.assert_close(ours(image()), theirs(image()), rtol=1e-4, atol=1e-5)  # no stale weights
    for module in (ours, theirs):
        module.train()
    assert_same_step(ours, theirs, image())


def test_dropout_draws_from_torchs_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    ours, theirs = compiled(nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.4), nn.Linear(64, 5)), torch.randn(6, 12))
    assert not torch.equal(torch.get_rng_state(), state)  # parameters were drawn, …
    state = torch.get_rng_state()
    ours(torch.ones(6, 12))
    assert not torch.equal(torch.get_rng_state(), state)
    for _ in range(2):
        assert_same_step(ours, theirs, torch.randn(6, 12))
    assert not torch.equal(ours(torch.ones(6, 12)), ours(torch.ones(6, 12)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers(kind):
    """PyTorch's rule for tracing these layers forgets it."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(6, 4, 2, batch_first=True, bidirectional=True, dropout=0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0]

    ours, theirs = compiled(Last(), torch.randn(3, 2, 6))
    assert_same_step(ours, theirs, torch.randn(3, 2, 6))


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout])
def test_dropout_draws_in_the_order_of_memory(drop, memory):
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return drop(self.inner(x).transpose(1, 2), 0.5, self.training)

    ours, theirs = compiled(Turned(), torch.randn(2, 4, 6), memory=memory)
    assert_same_step(ours, theirs, torch.randn(2, 4, 6))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
def test_a_dropout_of_all_numbers_draws_none(door, learns):
    torch._dynamo.reset()
    module, x = nn.Sequential(nn.Linear(6, 4), nn.Dropout(1.0), nn.Linear(4, 3), nn.Dropout(0.5)), torch.randn(5, 6)
    how = {"backend": "fmtprop", "options": {"tune": "model", "verify": "off"}}
    ours = fp.compile(module, x, **OPTIONS) if door == "fp.compile" else torch.compile(module, **how)
    found = []
    for call in (ours, module):
        torch.manual_seed(2)
        with torch.set_grad_enabled(learns):
            found.append((call(x).detach(), torch.rand(3)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_dropout_that_is_off_shares_memory(memory):
    class Added(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self[0](x)
            self[1](hidden).mul_(3.0)
            return hidden

    for off in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        ours, theirs = compiled(Added(nn.Linear(4, 4), off), torch.randn(2, 4), memory=memory)
        assert_same_step(ours, theirs, torch.randn(2, 4))


@pytest.mark.parametrize("learns", [False, True])
def test_dropout_behind_a_channel_shuffle_in_channels_last(learns):
    body = nn.Conv2d(6, 6, 1) if learns else nn.Identity()
    module = nn.Sequential(body, nn.ChannelShuffle(2), nn.Dropout(0.5), nn.Conv2d(6, 3, 1))
    x = torch.randn(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    ours, theirs = compiled(module, x)
    assert_same_step(ours, theirs, x)


@pytest.mark.parametrize(
    ("inner", "source", "op"),
    [
        (nn.LSTM(6, 4, 2, dropout=0.3), lambda x: x, "lstm"),
        (nn.EmbeddingBag(8, 6), lambda x: torch.arange(12).view(3, 4) % 8, ""),
        (nn.ChannelShuffle(2), lambda x: x.view(4, 5, 3, 6).permute(0, 3, 1, 2), ""),
    ],
)
def test_calls_within_a_checkpoint_are_as_outside(inner, source, op):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), inner

        def part(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(source(self.first(x)))
            return F.dropout(y[0] if isinstance(y, tuple) else y, 0.5) + self.first.bias.sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)

    ours, theirs = compiled(Checkpointed(), torch.randn(20, 3, 6))
    assert_same_step(ours, theirs, torch.randn(20, 3, 6))
    assert not op or op in [node.op for node in ours.nets[0].graph.nodes()]


def test_a_window_of_one_channel_trains():
    # oneDNN crashes while it compiles this gradient
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LocalResponseNorm(1))
    ours, theirs = compiled(inner.to(memory_format=torch.channels_last), image())
    assert_same_step(ours, theirs, image())


def test_several_forward_passes_before_their_backward_passes():
    ours, theirs = compiled(convolutions(), image())
    for module in (ours, theirs):
        losses = [F.cross_entropy(module(image(seed=seed)), labels()) for seed in range(3)]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
    assert_gradients(ours, theirs)


def test_memory_comes_back(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(executor, "Context", lambda *plan, **how: made.append(1) or Context(*plan, **how))
    ours, _ = compiled(mlp(), torch.randn(6, 12), verify="off")
    made.clear()
    ours(torch.randn(6, 12)).sum().backward()
    first = len(made)
    result = ours(torch.randn(6, 12))
    assert len(made) == first, "the memory of the run before"
    other = ours(torch.randn(6, 12))
    assert len(made) == first + 1, "the first result may have a backward pass still"
    del result  # without one
    again = ours(torch.randn(6, 12))
    assert len(made) == first + 1
    del other, again


def test_memory_comes_back_while_another_program_is_traced():
    step = fp.compile(nn.Linear(8, 8), (torch.randn(4, 8),), training=True)
    held = [step(torch.randn(4, 8)).sum()]

    def program(x):
        held.clear()
        gc.collect()
        return x + 1

    traced = make_fx(program)(torch.ones(3))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_function", "output"]


def test_backward_twice():
    ours, theirs = compiled(convolutions(), image())
    for module in (ours, theirs):
        loss = module(image()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_gradients(ours, theirs)


def test_what_is_changed_in_place_is_noticed():
    ours, _ = compiled(mlp(), torch.randn(6, 12))
    loss = ours(torch.randn(6, 12)).sum()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    result = ours(torch.randn(6, 12).requires_grad_())
    assert result.requires_grad
    squared, _ = compiled(nn.Tanh(), torch.randn(4, requires_grad=True))
    result = squared(torch.randn(4, requires_grad=True))
    result.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


class Momentum(nn.Module):
    """A queue of keys, by the average of the encoder's parameters, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.average = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for one, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                one.mul_(0.9).add_(other, alpha=0.1)
            keys = self.average(x)
        scores = self.encoder(x) @ self.queue.clone().detach()
        self.queue[:, :3] = keys.T
        return scores


def test_a_copy_of_a_buffer_that_the_forward_pass_changes_and_changed_parameters():
    torch.manual_seed(0)
    module = Momentum()
    theirs = copy.deepcopy(module)
    ours = fp.compile(module, torch.randn(3, 6), **OPTIONS)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # compiling changed nothing
    for seed in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        assert_same_step(ours, theirs, x)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_other_shapes_get_a_plan_each():
    ours, theirs = compiled(convolutions(), image())
    for batch in (4, 2, 4, 3):
        assert_same_step(ours, theirs, image(batch))
    assert len(ours.nets) == 3


def test_parameters_of_another_shape():
    module, x = mlp(), torch.randn(3, 12)
    ours, theirs = compiled(module, x)
    with torch.no_grad():
        module[0].weight.data, module[0].bias.data = torch.randn(24, 12), torch.randn(24)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(3x24 and 32x16\)"):
        ours(x)
    module[2] = nn.Linear(24, 16)
    theirs[0], theirs[2] = copy.deepcopy(module[0]), copy.deepcopy(module[2])
    assert_same_step(ours, theirs, x)


def test_parameters_of_another_type_or_device():
    module, x = mlp(), torch.randn(3, 12)
    ours, theirs = compiled(module, x)
    for one in (ours, theirs):
        one.to(torch.float64)
    assert_same_step(ours, theirs, x.double())
    with pytest.raises(RuntimeError, match="must have the same dtype, but got Float and Double"):
        ours(x)
    module.to("meta")
    with pytest.raises(RuntimeError, match="is not on the expected device cpu"):
        ours(x.double())


def test_parallel_modules_are_wrapped_around(monkeypatch):
    class Wrapper(nn.Module):
        __module__ = "torch.nn.parallel.distributed"

    class Shard(torch.Tensor):
        pass

    with pytest.raises(ImportModelError, match="takes the module inside of Wrapper: compile that, and wrap the result"):
        fp.compile(Wrapper(), torch.ones(3), **OPTIONS)
    module = nn.Linear(3, 3)
    module.weight = nn.Parameter(torch.ones(3, 3).as_subclass(Shard))
    with pytest.raises(ImportModelError, match=r"parameter weight is a Shard, .* compile the module first"):
        fp.compile(module, torch.ones(3), **OPTIONS)


def test_nan_passes_through():
    ours, theirs = compiled(convolutions(), image())
    x = image()
    x[0, 0, 0, 0] = torch.nan
    for module in (ours, theirs):
        F.cross_entropy(module(x), labels()).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad.isnan(), other.grad.isnan())


def test_recomputation_gives_the_same():
    ours, theirs = compiled(Transformer(), image(), memory="recompute")
    assert_same_step(ours, theirs, image())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's own, of tensors between pieces
def test_python_that_cannot_be_captured_runs_between_pieces():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y if y.sum() > 0 else y.tanh())

    torch.manual_seed(0)
    module = Branch()
    x = torch.randn(6, 12)
    with pytest.warns(
        RuntimeWarning, match=r"cannot capture Branch as one graph, so it runs in pieces(.|\n)*branching"
    ):
        net = fp.compile(module, x, **OPTIONS)
    for sign in (1.0, -1.0, 1.0):
        module.zero_grad()
        assert_same_step(net, copy.deepcopy(module), sign * 10 * x)
    assert len(net.steps) >= 3  # before the branch, and each way after it


def test_ctc_loss_within_the_module_runs_between_pieces():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
            return F.ctc_loss(F.log_softmax(self.layer(x), -1), *lengths)

    module = Loss()
    args = (torch.randn(10, 2, 8), torch.tensor([[1, 2, 3], [2, 3, 4]]), torch.tensor([10, 9]), torch.tensor([3, 2]))
    theirs = copy.deepcopy(module)
    with pytest.warns(RuntimeWarning, match="_ctc_loss"):
        net = fp.compile(module, args, **OPTIONS)
    for run in (net, theirs):
        run(*args).backward()
    assert len(net.steps) == 1
    torch.testing.assert_close(module.layer.weight.grad, theirs.layer.weight.grad)


class Half(nn.Linear):
    """A call that has no gradients behind one that has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).floor_divide(0.5)


def test_what_has_no_gradients_is_named():
    named = (
        r"cannot trace the gradients: derivative for aten::floor_divide is not implemented. Call what has none under"
    )
    with (
        pytest.warns(UserWarning, match="Error detected in"),  # PyTorch's own
        pytest.raises(ImportModelError, match=named),
    ):
        fp.compile(Half(12, 3), torch.randn(6, 12), **OPTIONS)


def test_what_cannot_be_compiled_is_said():
    class Leaky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rrelu(x * 2.0, training=True)

    class Uncaptured(nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

    with pytest.raises(ImportModelError, match=r"rrelu.* draws random numbers that depend on values of the model; use"):
        fp.compile(Leaky(), torch.ones(3, requires_grad=True), **OPTIONS)
    with (
        pytest.warns(RuntimeWarning, match="as one graph, so it runs in pieces"),
        pytest.raises(ImportModelError, match="captures nothing of Uncaptured"),
    ):
        fp.compile(Uncaptured(), torch.ones(3, requires_grad=True), **OPTIONS)
    with pytest.raises(ImportModelError, match=r"takes a torch.nn.Module, got str"):
        fp.compile("resnet50", **OPTIONS)
    with pytest.raises(UnsupportedOpError, match="target='onednn'"):
        fp.compile(mlp(), torch.randn(6, 12), target="mkldnn", training=True)
    with pytest.raises(UnsupportedOpError, match="'memory' parameter of compile must be one of 'save', 'recompute'"):
        fp.compile(mlp(), torch.randn(6, 12), memory="swap", training=True)
    ours, _ = compiled(mlp(), torch.randn(6, 12))
    with pytest.raises(ImportModelError, match="Save its state_dict"):
        pickle.dumps(ours)
    with pytest.raises(ImportModelError, match=r"module 0 \(BatchNorm1d\): momentum=None .* give it a momentum"):
        compiled(nn.Sequential(nn.BatchNorm1d(12, momentum=None)), torch.randn(6, 12))
    with pytest.raises(ImportModelError, match=r"0\.weight has no size yet: call the module once before"):
        fp.compile(nn.Sequential(nn.LazyLinear(5)), torch.randn(6, 12), **OPTIONS)


def test_a_copy_has_its_own_parameters_and_plans():
    ours, theirs = compiled(mlp(), torch.randn(6, 12))
    averaged, expected = (torch.optim.swa_utils.AveragedModel(module) for module in (ours, theirs))
    for module, average in ((ours, averaged), (theirs, expected)):
        with torch.no_grad():
            next(module.parameters()).add_(1)
        average.update_parameters(module)
    x = torch.randn(6, 12)
    assert_same_step(averaged.module, expected.module, x)
    torch.testing.assert_close(ours(x), theirs(x))


class Scaled(nn.Linear):
    """A linear layer with a factor that is no parameter."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor * (2 if self.training else 1)


def test_attributes_are_set_on_the_original():
    x = torch.randn(2, 4)
    ours, module = compiled(Scaled(4, 3), x)
    for one in (ours, module):
        one.factor = 3.0
        one.bias = None
        one.training = False
    torch.testing.assert_close(ours(x), module(x))
    del ours.factor
    assert ours.factor == 1.0
    ours._original.train()
    assert ours.training


class Centred(nn.Linear):
    """A linear layer of which the first call chooses the bias."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.is_centred, self.calls = False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.is_centred:
            self.bias.data.copy_(-nn.functional.linear(x, self.weight).mean(0).detach())
            self.is_centred = True
        return super().forward(x)


def test_parts_by_index_are_those_of_the_original():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = fp.compile(module, None, training=True)
    assert net[0] is module[0]
    assert list(net) == list(module)
    with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
        fp.compile(module[0], None, training=True)[0]


def test_numbers_of_the_module_are_restored_after_the_example():
    ours, theirs = compiled(Centred(), torch.randn(5, 4))
    assert (ours.calls, ours.is_centred) == (0, False)
    for _ in range(2):
        assert_same_step(ours, theirs, torch.randn(5, 4))
    torch.testing.assert_close(ours.bias, theirs.bias)
    assert ours.calls == theirs.calls == 2


class Averaged(nn.Linear):
    """A layer that assigns a buffer anew in each call, and makes an attribute in its first."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not hasattr(self, "first"):
            self.first = y.detach().mean()
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return (y - self.average) * self.first


def test_assigned_tensors_are_restored_after_the_example():
    module = Averaged()
    theirs = copy.deepcopy(module)
    ours = fp.compile(module, torch.randn(5, 4), **OPTIONS)
    assert not hasattr(ours, "first") and not ours.average.any()
    for _ in range(2):
        assert_same_step(ours, theirs, torch.randn(5, 4))
    torch.testing.assert_close(ours.average, theirs.average)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_without_gradients(checkpointed):
    """In train mode under ``no_grad``, as for a teacher's numbers, or in a checkpoint that is run again."""

    class Noisy(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    ours, theirs = compiled(Noisy(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 3)), torch.randn(4, 6))
    x, found = torch.randn(4, 6, requires_grad=True), []
    for module in (ours, theirs):
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.set_grad_enabled(checkpointed):
                found.append(checkpoint(module, x, use_reentrant=True) if checkpointed else module(x))
            found.append(torch.rand(2))
            if checkpointed:
                x.grad = None
                found[-2].sum().backward()
                found.append(x.grad)
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(one, other)
    assert ours.evaluations[0].net is not None


def test_more_shapes_than_pytorch_allows(monkeypatch):
    ours, theirs = compiled(nn.Linear(4, 3), torch.randn(2, 4), verify="off")
    for rows in range(3, 11):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(ours(x), theirs(x))
    monkeypatch.setattr("fmtprop.training.module.MOST_PLANS", 9)
    with pytest.raises(InputError, match=r"Linear has 9 plans: .* Pad the inputs"):
        ours(torch.randn(20, 4))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_gradient_checkpointing(where):
    """The backward half runs the batch normalization again, so it needs running averages of before the step.

    It reads the random numbers of the forward half.
    """

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand_like(x)

    def body() -> nn.Module:
        return nn.Sequential(convolutions(), nn.Dropout(0.4), Noisy())

    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    ours, theirs = compiled(Within() if where == "inside" else body(), image())
    found = []
    for module in (ours, theirs):
        x = image().requires_grad_()
        torch.manual_seed(1)
        result = module(x) if where == "inside" else checkpoint(module, x, use_reentrant=False)
        result.square().sum().backward()
        # a second forward pass updates running averages, even if it ends at its last saved tensor
        averages = module.buffers() if where == "outside" else ()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters()), *averages])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_saved_tensors_that_were_moved_are_missed():
    ours, _ = compiled(convolutions(), image())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = ours(image()).sum()
    with pytest.raises(InputError, match="hooks for saved tensors"):
        loss.backward()


def test_group_normalization_under_autocast():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    eager, x = copy.deepcopy(module), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        results = fp.compile(module, (x,), training=True, tune="model", confirm=False)(x), eager(x)
        for result in results:
            result.float().square().mean().backward()
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.filterwarnings("ignore:torch.compile cannot capture")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_piece_that_computes_nothing():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            torch._dynamo.graph_break()
            y = F.pad(y, (0, 0))
            torch._dynamo.graph_break()
            return self.layer(y)

    module, x = Padded(), torch.randn(3, 4)
    net = fp.compile(module, x, training=True, tune="model", confirm=False)
    net(x).square().sum().backward()
    mine = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    for one, parameter in zip(mine, module.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)
    assert len(net.nets) == 2


def test_an_evaluation_that_computes_nothing():
    x = torch.randn(2, 3, 4)
    net = fp.compile(nn.Flatten(0, 0), x, training=True, tune="model", confirm=False)
    assert torch.equal(net(x), x)


@pytest.mark.parametrize("rows", [2, 8])
def test_gradients_of_attention_to_given_keys(rows):
    """The gradient of the softmax has the attributes of a softmax, and one product reads it."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.keys = nn.Linear(16, 16), nn.Buffer(torch.randn(3, 9, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ self.keys.transpose(1, 2)
            return scores.softmax(-1) @ self.keys

    ours, theirs = compiled(Attention(), torch.randn(3, rows, 16))
    assert_same_step(ours, theirs, torch.randn(3, rows, 16))


def test_sizes_that_changed_in_another_graph_are_fixed_here():
    x = torch.randn(5, 12)
    changing = torch.compile(mlp(), backend="aot_eager", dynamic=True)
    changing(x).sum().backward()
    assert x._dynamo_propagated_dynamic_indices  # it would make this size an argument of the step
    for given in (x, (x,)):
        ours, theirs = compiled(Packed(mlp()), given)
        for module in (ours, theirs):
            module(given).square().sum().backward()
        assert_gradients(ours, theirs)


class Packed(nn.Module):
    """Takes a tensor, or a tuple with one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given):
        return self.inner(given[0] if isinstance(given, tuple) else given)


@pytest.mark.parametrize("end", [lambda net, x: torch.func.vmap(net)(x[None]), lambda net, x: net(x.to_sparse())])
def test_a_call_that_cannot_be_captured_ends_no_capture_of_other_modules(end):
    torch._dynamo.reset()
    nets = [compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))[0] for _ in range(2)]
    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first one runs in pieces now
        end(nets[0], x)
    for net in nets:
        torch.testing.assert_close(net(x), net._original(x))
    assert [len(net.nets) >= 1 for net in nets] == [True, True]


class Drawing(nn.Module):
    """Scales by a number of Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * random.uniform(0.5, 1.5)


def test_numbers_of_pythons_generator_are_drawn_in_each_step_and_none_by_compilation():
    torch._dynamo.reset()
    module, x = Drawing(), torch.randn(2, 4)
    random.seed(3)
    before = random.getstate()
    net, _ = compiled(module, x)
    assert random.getstate() == before
    for _ in range(2):
        random.seed(3)
        found = net(x)
        random.seed(3)
        torch.testing.assert_close(found, module(x))
    found.sum().backward()
    assert module.layer.weight.grad is not None
