"""Programs that are made functional call by call mean what they did; the others are left to PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtprop.capture import functionalising
from fmtprop.capture.call_by_call import made_functional
from fmtprop.capture.torch_export import from_torch, from_torch_symbolic
from tests.capture.checking import check, compare, run

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.ones(6))
        self.norm = nn.BatchNorm1d(4)
        self.own_statistics = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def chain(m, x):
    y = x * 2
    return y.relu_().add_(x).mul_(3)


def source_behind_a_change(m, x):
    y = x.exp()
    z = y.add_(1)
    return y * 2, z


def source_in_front_of_a_change(m, x):
    y = x.exp()
    before = y * 5
    y.sigmoid_()
    return before, y


def dropout_is_its_source(m, x):
    y = x.exp()
    F.dropout(y, 0.5, training=False).add_(1)
    return y


def dropout_beside_a_change(m, x):
    y = x.exp().relu_()
    return F.dropout(y, 0.5, training=False) + y


def copy_of_a_transposed(m, x):
    y = x.transpose(1, 2)
    return y.reshape(2, 24).relu_(), y.contiguous().tanh_(), y.flatten()


def composites(m, x):
    parts = x.chunk(3, dim=-1)
    y = torch.cat([parts[2], parts[0].expand_as(parts[1])]).to(torch.float64).to(torch.float64)
    return y.unflatten(-1, (2, 1)), m.norm(x).reshape_as(x), torch.einsum("bij,bkj->bik", x, x)


def twice_the_same_operand(m, x):
    y = x.exp()
    y.mul_(y)
    return y.reshape(-1) + y.reshape(-1)


def statistics_of_the_batch(m, x):
    return m.own_statistics(x)


def read_before_the_change(m, x):
    y = x.exp()
    total = y.view(-1).sum()
    y.add_(1)
    later = y.view(-1) * 2
    return y, total, later


def check_and_count(function, monkeypatch) -> int:
    """Compare a function's graph with the function; return how often PyTorch traced its program again."""
    retraced, programs = functionalising._retraced, []
    monkeypatch.setattr(functionalising, "_retraced", lambda program: programs.append(program) or retraced(program))
    check(Function(function).eval(), X, aten=None)
    return len(programs)


@pytest.mark.parametrize(
    "function",
    [
        chain, source_behind_a_change, source_in_front_of_a_change, copy_of_a_transposed,
        dropout_beside_a_change, composites, twice_the_same_operand, read_before_the_change, statistics_of_the_batch,
    ],
)  # fmt: skip
def test_it_needs_no_second_trace(function, monkeypatch):
    assert check_and_count(function, monkeypatch) == 0


def view_between_two_changes(m, x):
    y = x.exp()
    y.add_(1)
    view = y.view(-1)
    y.mul_(2)
    return view + 1


def view_shows_the_change(m, x):
    y = x.exp()
    view = y.view(-1)
    y.add_(1)
    return view * 2


def changed_view(m, x):
    y = x.exp()
    y[:, 0].add_(1)
    return y


def change_behind_a_reshape(m, x):
    y = x.exp()
    y.reshape(-1).add_(1)
    return y


def einsum_is_its_source(m, x):
    y = x.exp()
    torch.einsum("ijk->ijk", y).add_(1)
    return y


def einsum_of_a_dropout(m, x):
    y = x.exp()
    same = torch.einsum("ijk->ijk", F.dropout(y, 0.5, training=False))
    y.add_(1)
    return same * 2


def part_of_several(m, x):
    first, second = x.exp().split(2, dim=1)
    first.add_(second)
    return first


def another_type(m, x):
    return x.exp().add_(torch.ones(6, dtype=torch.float64))


def copied_into(m, x):
    y = torch.zeros(2, 4, 6)
    y.copy_(x)
    return y


@pytest.mark.parametrize(
    "function",
    [
        view_between_two_changes, view_shows_the_change, changed_view, change_behind_a_reshape, einsum_is_its_source,
        einsum_of_a_dropout, part_of_several, another_type, copied_into,
    ],
)  # fmt: skip
def test_what_needs_more_is_left_to_pytorch(function, monkeypatch):
    assert check_and_count(function, monkeypatch) == 1


def test_a_dropout_without_effect_is_its_source(monkeypatch):
    """PyTorch 2.14 records that the change is what is returned; 2.13 returns its source, which needs a trace."""
    assert check_and_count(dropout_is_its_source, monkeypatch) <= 1


def test_an_operator_whose_parts_fail_is_one_error():
    library = torch.library.Library("call_by_call", "DEF")
    library.define("fails(Tensor x) -> Tensor")
    traced = []

    def fails(x):
        if traced:
            raise KeyError("a key of the operator's own")
        return x * 2

    library.impl("fails", fails, "CompositeImplicitAutograd")
    program = torch.export.export(Function(lambda m, x: torch.ops.call_by_call.fails(x)).eval(), (X,))
    traced.append(True)
    assert made_functional(program) is None


def flat(m, x):
    return x.flatten().view(-1) * 2, x.flatten(1).exp(), (x + 1).reshape(x.shape[0] * 4, -1)


def parts(m, x):
    first, second = x.chunk(2, 1)
    y = torch.cat([first, second.expand_as(first)], 2).relu_()
    return m.norm(x).reshape_as(x), y.unflatten(1, (2, 1)), y[:, :, : x.shape[2]]


def sizes_as_numbers(m, x):
    return x.exp().add_(x.shape[0]).reshape(-1, x.shape[2] * x.shape[1]), F.interpolate(x, size=x.shape[2] + 3)


@pytest.mark.parametrize(
    "function", [chain, source_behind_a_change, twice_the_same_operand, flat, parts, sizes_as_numbers]
)
def test_sizes_that_change_need_no_second_trace(function, monkeypatch):
    monkeypatch.setattr(functionalising, "_retraced", None)
    model = Function(function).eval()
    axes = {0: torch.export.Dim("n", min=2), 2: torch.export.Dim("m", min=2)}
    program = from_torch_symbolic(model, (X,), dynamic_shapes=(axes,))
    for batch, length in ((2, 6), (5, 8)):
        x = torch.randn(batch, 4, length)
        compare(run(program.graph([x]), x), model(x))


def test_sizes_that_depend_on_data_are_left_to_pytorch():
    program = torch.export.export(Function(lambda m, x: x[x > 0].flatten()), (X,))
    assert made_functional(program) is None


def test_the_graph_is_the_same_as_by_a_second_trace(monkeypatch):
    module = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5))

    def described():
        return [(node.op, node.attrs, node.results) for node in from_torch(module, X).nodes()]

    quick = described()
    monkeypatch.setattr(functionalising, "made_functional", lambda program: None)
    assert described() == quick


class Random(nn.Module):
    """Some calls that a seed chooses: in-place ones, views, copies and what may be either."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(self.seed)
        made = [x * 1.0, x.exp()]
        for _ in range(draw.randrange(3, 12)):
            chosen = draw.randrange(len(made))
            call = CALLS[draw.randrange(len(CALLS))]
            result = call(made[chosen])
            made += result if isinstance(result, tuple) else [result]
        return (*made[2:], made[0] + 0, made[1] + 0)


CALLS = (
    lambda t: t.relu_(),
    lambda t: F.relu(t, inplace=True),
    lambda t: t.add_(1),
    lambda t: t.mul_(t),
    lambda t: t.sigmoid_().add_(t),
    lambda t: t.clamp_(-1, 1),
    lambda t: t.view(-1) if t.is_contiguous() else t.unsqueeze(0),
    lambda t: t.reshape(2, -1),
    lambda t: t.transpose(0, -1),
    lambda t: t[..., 1:] if t.shape[-1] > 1 else t[..., None],
    lambda t: t.contiguous(),
    lambda t: t.flatten(-2) if t.ndim > 1 else t.flatten(),
    lambda t: t.chunk(2, -1) if t.shape[-1] > 1 and t.shape[-1] % 2 == 0 else t.squeeze(),
    # PyTorch's exporter gives the result of others row-major strides, so it takes a copy for the source
    lambda t: F.dropout(t, 0.3, training=False) if t.is_contiguous() else t.tanh(),
    lambda t: torch.einsum("...i->...i", t),
    lambda t: t.to(torch.float32),
    lambda t: t.sum(-1, keepdim=True).expand_as(t) * 1,
    lambda t: t.clone(),
)


@pytest.mark.parametrize(
    "seeds",
    [range(25), *(pytest.param(range(i, i + 25), marks=pytest.mark.slow) for i in range(25, 1000, 25))],
    ids=str,
)
def test_random_changes_in_place(seeds):
    for seed in seeds:
        module, expected = Random(seed), Random(seed)(X.clone())
        compare(run(from_torch(module, X), X), expected, 1e-5, 1e-5)
