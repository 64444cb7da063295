"""Attention as one node: which nodes are one, what it means, and that a plan runs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmtprop
from fmtprop.capture import from_torch
from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ir.verify import Stage
from fmtprop.jit import unavailable
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from fmtprop.ops import Attention, MatMul, emit
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision.lower import LowerPrecision
from fmtprop.passes.variants.attention_fusion import attention
from tests.threads import torch_threads

BATCH, HEADS, ROWS, WIDTH = 2, 3, 24, 16


class Written(nn.Module):
    """Attention as models write it, with what may be between the products."""

    def __init__(self, mask: torch.Tensor | None = None, *, way: str = "") -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.register_buffer("mask", mask)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2)
        if self.way == "masked before the factor":
            scores = scores + self.mask
        scores = scores / WIDTH**0.5
        if self.mask is not None and self.way != "masked before the factor":
            scores = scores + self.mask
        if self.way == "tanh":
            scores = scores.tanh()
        weights = scores.softmax(1 if self.way == "across heads" else -1)
        y = (weights @ v).transpose(1, 2).reshape(batch, rows, -1)
        return (y, weights) if self.way == "weights returned" else y


def normal(module: nn.Module) -> tuple[Graph, torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(BATCH, ROWS, HEADS * WIDTH)
    return Pipeline(NORMALISE, Stage.NORMAL).run(from_torch(module.eval(), x)), x


def fusions(graph: Graph) -> list:
    return [found for node in graph.nodes() if (found := attention(graph, node)) is not None]


def causal(lowest: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(1, 1, ROWS, ROWS).masked_fill(~torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), lowest)


SLIDING = causal().masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).tril(-5), -torch.inf)


@pytest.mark.parametrize(
    ("mask", "limit", "masks"),
    [
        (None, None, 0),
        (causal(), 0, 0),
        (causal(torch.finfo(torch.float32).min), 0, 0),
        (causal(-10.0), None, 1),
        (torch.zeros(1, 1, ROWS, ROWS), None, 0),
        (SLIDING, None, 1),
        (torch.randn(1, HEADS, ROWS, ROWS), None, 1),
        (torch.randn(BATCH, 1, 1, ROWS), None, 1),
    ],
)
def test_written_attention_is_found_and_means_the_same(mask, limit, masks):
    graph, x = normal(Written(mask))
    (found,) = fusions(graph)
    assert found.node.attrs == Attention(pytest.approx(0.25), limit)
    assert len(found.inputs) == 3 + masks
    (expected,) = evaluate(graph, {"x": x})
    out = Graph("fused")
    for node in graph.nodes():
        if node.name == found.covers[-1]:
            out.add(found.node, found.inputs)
        elif node.name not in found.covers:
            out.add(node, graph.inputs(node.name))
    out.constants.update(graph.constants)
    torch.testing.assert_close(evaluate(out, {"x": x})[0], expected)


class Scaled(nn.Module):
    """Attention as exporters of ONNX write it, with a factor of queries and one of keys."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q * 0.5) @ (k.transpose(-1, -2) * 0.25)).softmax(-1) @ v


def test_factors_of_queries_and_keys_are_one_of_their_product():
    torch.manual_seed(3)
    tensors = [torch.randn(BATCH, HEADS, ROWS, WIDTH) for _ in range(3)]
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(from_torch(Scaled(), tuple(tensors)))
    ((whole, _),) = [(found.node, found) for found in fusions(graph)]
    assert whole.attrs.scale == 0.125
    net = fmtprop.compile(Scaled(), tuple(tensors), tune="model", confirm=False)
    torch.testing.assert_close(net(*tensors), Scaled()(*tensors), rtol=1e-5, atol=1e-6)


class Padded(nn.Module):
    """Attention with a causal mask and a mask of padding, as models add them."""

    def __init__(self, lowest: float) -> None:
        super().__init__()
        self.register_buffer("causal", causal(lowest))

    def forward(self, q, k, v, padding):
        return (q @ k.transpose(-1, -2) + self.causal + padding).softmax(-1) @ v


@pytest.mark.parametrize(("lowest", "limit"), [(torch.finfo(torch.float32).min, None), (-torch.inf, 0)])
def test_a_lowest_number_beside_another_mask_is_a_number(lowest, limit):
    torch.manual_seed(5)
    inputs = tuple(torch.randn(BATCH, HEADS, ROWS, WIDTH) for _ in range(3))
    padding = torch.zeros(BATCH, 1, 1, ROWS)
    padding[0, ..., : ROWS // 3] = torch.finfo(torch.float32).min  # its first queries may look at padding alone
    module = Padded(lowest).eval()
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(from_torch(module, (*inputs, padding)))
    assert [found.node.attrs.limit for found in fusions(graph)] == [limit]
    net = fmtprop.compile(module, (*inputs, padding), tune="model", confirm=False)
    torch.testing.assert_close(net(*inputs, padding), module(*inputs, padding), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bound", "limit"), [(-0.25, None), (torch.finfo(torch.float32).min, 0)])
def test_a_bound_above_the_mask_shows_later_keys(bound, limit):
    class Bounded(nn.Module):
        def forward(self, q, k, v):
            later = torch.full((ROWS, ROWS), -torch.inf).triu(1)
            return (q @ k.transpose(-1, -2) + later).clamp_min(bound).softmax(-1) @ v

    torch.manual_seed(5)
    inputs = tuple(torch.randn(BATCH, HEADS, ROWS, WIDTH) for _ in range(3))
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(from_torch(Bounded(), inputs))
    assert [found.node.attrs.limit for found in fusions(graph)] == [limit]
    net = fmtprop.compile(Bounded(), inputs, tune="model", confirm=False)
    torch.testing.assert_close(net(*inputs), Bounded()(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["masked before the factor", "tanh", "across heads", "weights returned"])
def test_what_is_something_else_is_not(way):
    graph, _ = normal(Written(torch.randn(1, 1, ROWS, ROWS), way=way))
    assert not fusions(graph)


class Fused(nn.Module):
    def __init__(self, **how) -> None:
        super().__init__()
        self.qkv, self.how = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, **self.how).transpose(1, 2).reshape(batch, rows, -1)


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize(
    "module",
    [Fused(), Fused(is_causal=True), Fused(is_causal=True, scale=0.5), Written(torch.randn(BATCH, 1, 1, ROWS))],
)
def test_a_plan_runs_it_without_reorders(module):
    torch.manual_seed(4)
    x = torch.randn(BATCH, ROWS, HEADS * WIDTH)
    net = fmtprop.compile(module.eval(), x, deterministic=True)
    torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-5)
    assert [step.node.op for step in net.plan.steps].count("attention") == 1
    assert not [step.node.name for step in net.plan.steps if step.node.op == "reorder"]


@pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")
@pytest.mark.parametrize("how", [{}, {"is_causal": True}])
def test_a_plan_runs_it_in_bf16(how):
    class Projected(Fused):
        def __init__(self) -> None:
            super().__init__(**how)
            self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(super().forward(x))

    torch.manual_seed(4)
    module, x = Projected().eval(), torch.randn(BATCH, ROWS, HEADS * WIDTH)
    (found,) = fusions(LowerPrecision().run(normal(module)[0]))
    assert found.node.attrs == Attention(pytest.approx(0.25), 0 if how else None)
    net = fmtprop.compile(module, x, "bf16", deterministic=True)
    torch.testing.assert_close(net(x), module(x), rtol=5e-2, atol=2e-2)
    assert "attention" in [step.node.op for step in net.plan.steps]


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_another_number_of_threads_gives_the_same():
    module, x = Fused(is_causal=True).eval(), torch.randn(BATCH, ROWS, HEADS * WIDTH)
    net = fmtprop.compile(module, x, tune="model")
    first = net(x)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            assert torch.equal(net(x), first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": (2, 16, 10)}, "key and value have 4, 3 and 4 axes"),
        ({"key": (2, 4, 16, 10)}, "batch axes of src"),
        ({"key": (2, 3, 15, 10)}, "no matrices of one product"),
        ({"mask_0": (2, 3, 24, 9)}, "a mask has dims"),
        ({"mask_0": (2, 3, 24, 1)}, "a mask has dims"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    shapes = {"src": (2, 3, 24, 16), "key": (2, 3, 16, 10), "value": (2, 3, 10, 16), **changes}
    graph = Graph("test")
    inputs = {name: graph.input(name, TensorType(dims)) for name, dims in shapes.items()}
    with pytest.raises(ShapeError, match=message):
        emit(graph, "attention", inputs, Attention())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": TensorType((2, 3, 16, 10), "s8")}, "key is s8; codes are s8 and have scales, key_scales, others"),
        ({"value_scales": TensorType((2, 3, 10, 1))}, "value is f32; codes are s8"),
        (
            {"key": TensorType((2, 3, 16, 10), "s8"), "key_scales": TensorType((2, 3, 10, 1))},
            r"key_scales is f32\[2,3,10,1\]; it must be f32 of \(2, 3, 1, 10\), a scale for each key",
        ),
    ],
)
def test_codes_without_their_scales_are_refused(changes, message):
    types = {name: TensorType(dims) for name, dims in (("src", (2, 3, 24, 16)), ("key", (2, 3, 16, 10)))}
    types |= {"value": TensorType((2, 3, 10, 16)), **changes}
    graph = Graph("test")
    with pytest.raises(ShapeError, match=message):
        emit(graph, "attention", {name: graph.input(name, type_) for name, type_ in types.items()}, Attention())


def test_a_limit_without_keys_is_refused():
    with pytest.raises(ShapeError, match="at least 0"):
        Attention(1.0, -1)


def test_a_product_without_softmax_is_not_attention():
    graph = Graph("test")
    a, b, c = (graph.input(name, TensorType((2, 8, 8))) for name in "abc")
    scores = emit(graph, "matmul", {"src": a, "weights": b}, MatMul())
    graph.output(emit(graph, "matmul", {"src": scores, "weights": c}, MatMul(), name="last"))
    assert attention(graph, graph.node("last")) is None


def test_rows_that_may_look_at_nothing_are_zero_as_in_pytorch():
    class Padded(Fused):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(BATCH, ROWS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(BATCH, ROWS, -1)

    module, x, mask = Padded().eval(), torch.randn(BATCH, ROWS, HEADS * WIDTH), torch.zeros(BATCH, 1, ROWS, ROWS)
    mask[1, :, :, 5:], mask[0, :, 3] = -torch.inf, -torch.inf
    net = fmtprop.compile(module, (x, mask), deterministic=True)
    torch.testing.assert_close(net(x, mask), module(x, mask), rtol=1e-4, atol=1e-5)
    if not unavailable():
        assert "attention" in [step.node.op for step in net.plan.steps]
