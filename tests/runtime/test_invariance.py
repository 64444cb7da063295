"""Formats never change an answer: any legal assignment gives what `plain` gives, and exact sums stay exact."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ir import TensorType
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops import emit
from fmtprop.ops.convolution import Conv
from fmtprop.ops.inner_product import InnerProduct
from fmtprop.ops.matmul import MatMul
from fmtprop.passes.assignment.assign import AssignFormats
from fmtprop.passes.assignment.formats import like, usual
from fmtprop.passes.assignment.policies import Option, Policy, Question
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.target import Setting
from fmtprop.runtime import Executor, build_plan
from fmtprop.runtime.agreement import relative_error
from fmtprop.targets import OneDnnTarget, ReferenceTarget


def random_policy(seed: int) -> Policy:
    """Return a policy that asks for formats at random: each activation and result its own."""
    dice = random.Random(seed)

    def policy(question: Question) -> Iterator[Option]:
        sources = question.activations()
        for _ in range(12):
            src = {name: dice.choice(usual(question.given[name])) for name in sources}
            dst = {name: dice.choice(usual(desc)) for name, desc in question.results.items()}
            yield Option(question.fill({**src, **dst}), "at random")
            yield Option(question.fill(src), "at random, dst `any`")
        for offer in usual(question.given[sources[0]]):
            same = {name: like(question.given[name], offer) or question.given[name] for name in sources}
            yield Option(question.fill(same), "the same for all")

    return policy


class Net(nn.Module):
    """A little of everything: odd channels, groups, a residual, a concat, views, pooling, normalization, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 17, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(17)
        self.wide = nn.Conv2d(17, 24, 1)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.left = nn.Conv2d(24, 8, 1)
        self.right = nn.Conv2d(24, 9, 3, padding=1)
        self.up = nn.ConvTranspose2d(17, 8, 2, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.wide(x)
        x = x + nn.functional.hardswish(self.depthwise(x))
        x = torch.cat([self.left(x), torch.sigmoid(self.right(x))], 1)
        x = nn.functional.max_pool2d(self.up(x), 3, 2)
        x = x[:, 2:6].repeat(1, 2, 1, 1) * x.mean((2, 3), keepdim=True)
        return torch.softmax(self.head(x.flatten(2).transpose(1, 2)), -1)


def compiled(graph: Graph, rule: Policy) -> Executor:
    target = OneDnnTarget()
    formatted = AssignFormats("random", Setting(target, ReferenceTarget()), rule=rule).run(graph)
    verify(formatted, Stage.FORMATTED)
    return Executor(build_plan(formatted, target))


@pytest.fixture(scope="module")
def net() -> tuple[Graph, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = Net().eval()
    x = torch.randn(2, 3, 18, 18)
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(fp.from_torch(module, x))
    with torch.no_grad():
        return graph, x, module(x)


@pytest.mark.parametrize("seed", range(8))
def test_any_legal_assignment_gives_the_same_output(net, seed):
    graph, x, expected = net
    (got,) = compiled(graph, random_policy(seed)).run([x])
    assert relative_error(got, expected) < 1e-5


def test_the_random_assignments_differ(net):
    graph, _, _ = net
    plans = {
        tuple(step.results[0].desc for step in compiled(graph, random_policy(seed)).plan.steps) for seed in range(4)
    }
    assert len(plans) == 4


# ---------------------------------------------------------------- exact sums


def integers(dims: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return small integers: every partial sum of a few thousand products is exact in f32."""
    return torch.randint(-4, 5, dims, generator=torch.Generator().manual_seed(seed)).float()


def one_op(op: str, attrs: object, data: dict[str, torch.Tensor]) -> Graph:
    """Return the graph of one op whose weights are constants."""
    g = Graph(op)
    inputs = {}
    for name, tensor in data.items():
        type_ = TensorType(tuple(tensor.shape))
        inputs[name] = g.input(name, type_) if name == "src" else g.constant(name, type_, tensor)
    g.output(emit(g, op, inputs, attrs))
    return g


EXACT = {
    "convolution": lambda: one_op(
        "convolution",
        Conv((2, 1), (0, 0), (1, 1), (1, 0), 1),
        {"src": integers((2, 19, 9, 8), 0), "weights": integers((33, 19, 3, 3), 1), "bias": integers((33,), 2)},
    ),
    "grouped": lambda: one_op(
        "convolution",
        Conv((1, 1), (0, 0), (1, 1), (1, 1), 4),
        {"src": integers((1, 32, 7, 7), 0), "weights": integers((4, 8, 8, 3, 3), 1)},
    ),
    "inner_product": lambda: one_op(
        "inner_product",
        InnerProduct(),
        {"src": integers((3, 20, 4, 4), 0), "weights": integers((37, 20, 4, 4), 1), "bias": integers((37,), 2)},
    ),
    "matmul": lambda: one_op(
        "matmul", MatMul(), {"src": integers((2, 13, 40), 0), "weights": integers((2, 40, 21), 1)}
    ),
}


@pytest.mark.parametrize("op", EXACT)
@pytest.mark.parametrize("seed", range(6))
def test_exact_sums_are_bit_identical_in_all_formats(op, seed):
    graph = EXACT[op]()
    x = integers(graph.input_nodes[0].results[0].dims, 0)
    from fmtprop.ops.evaluate import evaluate

    (expected,) = evaluate(graph, {"src": x})
    (got,) = compiled(graph, random_policy(seed)).run([x])
    assert torch.equal(got, expected)
