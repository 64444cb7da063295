"""Of a layer of which few rows are read, the others are not computed; results and gradients stay."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fmtprop as fp
from fmtprop.training.unread_rows import leave_out_unread_rows

ROWS, WIDTH = 9, 32

Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Linear layers, attention and norm for functions that the tests write."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out, self.first, self.second = (
            nn.Linear(WIDTH, WIDTH) for _ in range(6)
        )
        self.norm, self.heads = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.body, self.share = body, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.share, training=True)

    def perceptron(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropped(self.second(F.gelu(self.first(x)))))

    def attention(self, x: Tensor, **how: Tensor | bool) -> Tensor:
        q, k, v = (f(x).view(2, ROWS, 4, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, **how)
        return x + self.out(y.transpose(1, 2).contiguous().view(2, ROWS, WIDTH))


class Linears(fx.Interpreter):
    """Notes the rows of each linear layer's result."""

    def run(self, *args: Tensor) -> Tensor:
        self.rows: list[int] = []
        return super().run(*args)

    def call_function(self, target, args, kwargs):
        result = super().call_function(target, args, kwargs)
        if target is F.linear:
            self.rows.append(result.numel() // WIDTH // 2)
        return result


def rows_of(net: Net, x: Tensor) -> list[int]:
    """Check results, gradients and random numbers of the changed graph; return the rows of its linear layers."""
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    inputs: list[Tensor] = []

    def keep(module: fx.GraphModule, given: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(module)
        inputs.extend(given)
        return module.forward

    torch.compile(net, backend=keep, fullgraph=True)(x)
    changed = fx.GraphModule(graphs[0], copy.deepcopy(graphs[0].graph))
    leave_out_unread_rows(changed.graph)
    changed.graph.lint()
    own = Linears(changed)
    figures = [step(call, inputs) for call in (own.run, Linears(graphs[0]).run)]
    torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-4)
    return own.rows


def step(call: Callable[..., tuple[Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    (result,) = call(*inputs)
    learned = [one for one in inputs if one.requires_grad]
    gradients = torch.autograd.grad(result.square().sum(), learned, allow_unused=True)
    return [result, *(one for one in gradients if one is not None), torch.rand(2)]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, ROWS, WIDTH)


@pytest.mark.parametrize(
    ("select", "rows"),
    [
        (lambda x: x[:, 0], 1),
        (lambda x: x[:, -1], 1),
        (lambda x: x[:, 3:6], 3),
        (lambda x: x[:, 3:6, :], 3),
        (lambda x: x[:, 3:6] + x[:, 3:6], 3),
        (lambda x: x[:, ::2], ROWS),
        (lambda x: x[:, :8], ROWS),
        (lambda x: x[:, 0] + x[:, 1], ROWS),
        (lambda x: x[:, 0] + x.mean(1), ROWS),
        (lambda x: x.relu_()[:, 0], ROWS),
        (lambda x: F.relu(x, inplace=True)[:, 0], ROWS),
        (lambda x: operator.iadd(x, 1.0)[:, 0], ROWS),
        (lambda x: F.layer_norm(x, (ROWS, WIDTH))[:, 0], ROWS),
    ],
)
def test_rows_that_are_read(x, select, rows):
    net = Net(lambda self, x: select(self.perceptron(x)))
    assert rows_of(net, x) == [rows, rows]


def test_another_function_of_the_same_name(x):
    @torch.compiler.allow_in_graph
    def relu(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    assert rows_of(Net(lambda self, x: relu(self.first(x))[:, 0]), x) == [ROWS]


def test_pytorchs_other_dropout(x):
    assert rows_of(Net(lambda self, x: self.first(torch.dropout(x, p=0.5, train=True))[:, 0]), x) == [1]


def test_a_dropout_draws_the_numbers_of_all_rows(x):
    net = Net(lambda self, x: self.perceptron(x)[:, 0])
    net.share = 0.3
    assert rows_of(net, x) == [1, 1]


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({}, [1, ROWS, ROWS, 1]),
        ({"attn_mask": torch.randn(2, 1, ROWS, ROWS)}, [1, ROWS, ROWS, 1]),
        ({"attn_mask": torch.randn(2, 1, 1, ROWS)}, [1, ROWS, ROWS, 1]),
        ({"is_causal": True}, [ROWS, ROWS, ROWS, 1]),
        ({"dropout_p": 0.5}, [ROWS, ROWS, ROWS, 1]),
    ],
)
def test_attention_reads_few_queries_and_all_keys(x, how, rows):
    assert rows_of(Net(lambda self, x: self.attention(x, **how)[:, 0]), x) == rows


def test_heads_of_pytorchs_module(x):
    net = Net(lambda self, x: self.second(self.heads(q := self.first(x), q, q)[0])[:, 0])
    assert rows_of(net, x) == [ROWS, 1]


@pytest.mark.parametrize(
    ("several", "rows"),
    [
        (lambda net, x: net.first(x).chunk(2, -1)[0], [ROWS]),
        (lambda net, x: net.first(x).split(8, 2)[0] * 2, [ROWS]),
        (lambda net, x: net.first(x).max(-1, keepdim=True)[0], [ROWS]),
        (lambda net, x: net.heads(q := net.first(x), q, q)[0] + net.heads(q, q, q)[1].mean(), [ROWS]),
    ],
)
def test_one_of_several_results(x, several, rows):
    assert rows_of(Net(lambda self, x: several(self, x)[:, 0]), x) == rows


def test_merged_and_split_axes(x):
    net = Net(lambda self, x: self.first(x.reshape(ROWS, 2, WIDTH)).view(3, 3, 2, -1).permute(0, 1, 3, 2)[:, 1])
    assert rows_of(net, x) == [ROWS]
    net = Net(lambda self, x: self.first(x).unflatten(-1, (4, 8)).reshape(2, ROWS, 2, 16).flatten(2)[:, 1])
    assert rows_of(net, x) == [1]


def test_a_view_of_another_type(x):
    net = Net(lambda self, x: self.first(x)[:, :2] * self.second(x).detach().view(dtype=torch.int32)[:, :2] % 5)
    assert rows_of(net, x) == [2, ROWS]


def without_gradient(net: Net, x: Tensor) -> Tensor:
    """Read the same rows of an input twice, first where no gradient is recorded."""
    with torch.no_grad():
        first = net.first(x)[:, 2:4]
    return first * net.first(x)[:, 2:4]


def written(change: Callable[[Tensor], object]) -> Body:
    """Return a function that changes some rows of a tensor, and reads all behind another name."""

    def body(net: Net, x: Tensor) -> Tensor:
        whole = net.first(x).roll(1, 1)
        change(whole.contiguous()[:, :2])
        return whole

    return body


def checkpointed(x: Tensor) -> object:
    return checkpoint(lambda x: x.mul_(2.0), x, use_reentrant=False)


@pytest.mark.parametrize("change", [lambda x: F.relu(x, True), lambda x: x.mul_(2.0), checkpointed])
def test_rows_that_are_changed_in_place(x, change):
    assert rows_of(Net(written(change)), x) == [ROWS]


def test_a_count_in_place_does_not_matter(x):
    net = Net(lambda self, x: self.norm(self.first(x))[:, 0] + self.count.add_(0))
    net.register_buffer("count", torch.zeros(()))
    assert rows_of(net, x) == [1]


def test_rows_that_are_read_without_gradient_first(x):
    assert rows_of(Net(without_gradient), x.requires_grad_()) == [2, 2]


def test_queries_for_several_batches_of_keys(x):
    net = Net(lambda self, x: F.scaled_dot_product_attention(self.query(x)[0], self.key(x), x)[:, :2])
    assert rows_of(net, x) == [ROWS, ROWS]


@pytest.mark.parametrize("form", [lambda x: x.contiguous()[:, :2], lambda x: x[0].t().contiguous()[:, :1]])
def test_a_result_shares_memory_as_before(x, form):
    calls = Net(lambda self, x: form(x)), fp.compile(Net(lambda self, x: form(x)), None, training=True, tune="model")
    shared = []
    for call in calls:
        given = x.clone()
        call(given).fill_(7.0)
        shared.append(given)
    torch.testing.assert_close(*shared)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_planned_step_computes_few_rows(x, share):
    net = Net(lambda self, x: self.perceptron(self.attention(x))[:, 0])
    net.share = share
    eager = copy.deepcopy(net)
    planned = fp.compile(net, x, training=True, tune="model", confirm=False)
    figures = []
    for call in (planned, eager):
        torch.manual_seed(3)
        result = call(x)
        result.square().sum().backward()
        gradients = [p.grad for n, p in call.named_parameters() if p.grad is not None and n != "key.bias"]
        figures.append([result, *gradients, torch.rand(1)])
    torch.testing.assert_close(*figures, rtol=1e-4, atol=1e-5)
    products = [node.results[0].dims for node in planned.nets[0].graph.nodes() if node.op == "matmul"]
    assert products.count((2 * ROWS, WIDTH)) == 2  # keys and values
