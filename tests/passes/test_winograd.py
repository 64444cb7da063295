"""Winograd's filtering computes what the direct convolution does, and is chosen where it costs less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fmtprop as fp
from fmtprop.errors import GraphError
from fmtprop.ir import Graph, TensorType, Value
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Eltwise, emit
from fmtprop.ops.convolution import Conv, infer
from fmtprop.ops.convolution_backward import ConvGradient
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.assignment.same_expansions import expand_alike
from fmtprop.passes.base import Pipeline
from fmtprop.passes.optimal import OptimalFormats, expansions, trial
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.target import Setting
from fmtprop.passes.variants.merge_groups import MergeGroups
from fmtprop.passes.variants.winograd import Tile, Winograd
from fmtprop.targets import OneDnnTarget
from fmtprop.targets.reference import ReferenceTarget
from tests.models.odd import RandomCosts
from tests.passes.only_filtered import only_filtered
from tests.passes.rewriting import Builder, rewrite
from tests.passes.table_target import TableTarget
from tests.passes.test_assign import BLOCKED
from tests.passes.test_optimal import US, TableCosts


def convolution(
    src: tuple[int, int, int, int] = (1, 4, 12, 10),
    kernel: tuple[int, int] = (3, 3),
    padding: tuple[int, int, int, int] = (1, 1, 1, 1),
    stride: int = 1,
    dilate: int = 0,
    bias: bool = True,
    tail: bool = True,
) -> Graph:
    """Return a graph of one convolution to 6 channels; padding is top, left, bottom, right."""
    b = Builder()
    operands = {"weights": b.constant(b.random(6, src[1], *kernel))}
    if bias:
        operands["bias"] = b.constant(b.random(6))
    attrs = Conv((1, stride), (0, dilate), padding[:2], padding[2:])
    y = b.op("convolution", attrs, "conv", src=b.input(*src), **operands)
    return b.output(b.act(y) if tail else y)


def weights(b: Builder, outputs: int = 4, inputs: int = 4, rows: int = 3, columns: int = 3) -> Value:
    """Return weights that are no constant, as in training."""
    return b.input(outputs, inputs, rows, columns, name=b.graph.fresh_name("weights"))


def filtered(graph: Graph, tolerance: float = 1e-4) -> Graph:
    """Rewrite a graph; refuse one that stayed as it was, or means something else."""
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    result = rewrite(normal, Winograd(), tolerance=tolerance)
    assert result is not normal
    verify(result, Stage.NORMAL)
    return result


def products(graph: Graph) -> int:
    """Return in how many convolutions of one row the only filtered convolution was taken apart."""
    return sum(".product_" in node.name for node in graph.nodes())


@pytest.mark.parametrize(
    ("rows", "taps", "most"), [(2, 3, 1.0), (4, 3, 1.6), (6, 3, 3.2), (2, 5, 1.4), (4, 5, 2.4), (2, 7, 2.4)]
)
def test_errors_grow_as_a_tile_says(rows, taps, most):
    """A convolution of random numbers against f64, in root mean squares: what its tile says, by 25 %."""
    b = Builder()
    channels, height = 64, 24
    weights = b.constant(b.random(8, channels, taps, 1))
    attrs = Conv((1, 1), (0, 0), (taps // 2, 0), (taps // 2, 0))
    graph = b.output(b.op("convolution", attrs, "conv", src=b.input(1, channels, height, 40), weights=weights))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    tile = Tile.make(rows, taps)
    assert tile.growth <= most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmtprop.passes.variants.winograd.ROWS", {taps: (rows,)})
        result = Winograd().run(normal)
    x = torch.randn(1, channels, height, 40, generator=torch.Generator().manual_seed(3))
    data = next(iter(normal.constants.values()))
    exact = torch.nn.functional.conv2d(x.double(), data.double(), padding=(taps // 2, 0))

    def error(y: torch.Tensor) -> float:
        return float((y.double() - exact).square().mean().sqrt())

    (filtered_result,) = evaluate(result, {"x": x})
    assert error(filtered_result) <= 1.25 * tile.growth * error(direct_sums(x, data, taps))


def direct_sums(x: torch.Tensor, weights: torch.Tensor, taps: int) -> torch.Tensor:
    """Return a convolution of columns in f32, its products added one after another as a kernel does."""
    padded = torch.nn.functional.pad(x, (0, 0, taps // 2, taps // 2))
    total = torch.zeros(1, weights.shape[0], *x.shape[2:])
    for channel in range(x.shape[1]):
        for tap in range(taps):
            row = padded[:, channel : channel + 1, tap : tap + x.shape[2]]
            total += row * weights[:, channel, tap, 0][None, :, None, None]
    return total


@pytest.mark.parametrize(("rows", "taps"), [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5), (2, 7)])
def test_a_tile_is_a_convolution_exactly(rows, taps):
    tile = Tile.make(rows, taps)
    source = [(7 * i * i + 3) % 11 - 5 for i in range(rows + taps - 1)]
    kernel = [(5 * i + 2) % 7 - 3 for i in range(taps)]

    def times(matrix, vector):
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    pairs = zip(times(tile.kernel, kernel), times(tile.source, source), strict=True)
    got = times(tile.output, [a * b for a, b in pairs])
    assert got == [sum(source[i + k] * kernel[k] for k in range(taps)) for i in range(rows)]


@pytest.mark.parametrize(
    ("window", "count"),
    [
        ({}, 6),
        ({"src": (1, 4, 7, 5)}, 6),
        ({"src": (1, 4, 8, 9), "kernel": (3, 1), "padding": (1, 0, 1, 0)}, 6),
        ({"padding": (0, 0, 0, 0)}, 6),
        ({"padding": (2, 1, 0, 3)}, 6),
        ({"padding": (0, 1, 2, 0)}, 6),
        ({"stride": 2}, 6),
        ({"dilate": 1, "padding": (1, 2, 1, 2)}, 6),
        ({"bias": False, "tail": False}, 6),
        ({"src": (3, 4, 12, 9)}, 6),
        ({"src": (2, 4, 14, 6)}, 6),
        ({"src": (3, 4, 2, 6)}, 4),
        ({"src": (1, 3, 9, 9), "kernel": (5, 5), "padding": (2, 2, 2, 2)}, 6),
        ({"src": (1, 3, 3, 3)}, 6),
    ],
)
def test_a_filtered_convolution_means_the_same(window, count):
    assert products(filtered(convolution(**window))) == count


@pytest.mark.parametrize("bias", [False, True])
def test_weights_may_be_computed(bias):
    b = Builder()
    operands = {"weights": weights(b, 6, 4, 3, 2)} | ({"bias": b.input(6, name="bias")} if bias else {})
    y = b.op("convolution", Conv.make(2, pad_l=1), "conv", src=b.input(2, 4, 12, 10), **operands)
    assert products(filtered(b.output(b.act(y)))) == 6


@given(
    height=st.integers(7, 20),
    width=st.integers(5, 9),
    taps=st.sampled_from([3, 5]),
    columns=st.integers(1, 3),
    top=st.integers(0, 2),
    bottom=st.integers(0, 2),
    side=st.integers(0, 2),
    dilate=st.integers(0, 1),
    batch=st.integers(1, 2),
    constant=st.booleans(),
)
def test_the_gradient_by_a_source_means_the_same(
    height, width, taps, columns, top, bottom, side, dilate, batch, constant
):
    side = min(side, (columns - 1) * (dilate + 1))
    b, dims = Builder(), (batch, 3, height, width)
    attrs = ConvGradient((1, 1), (0, dilate), (top, side), (bottom, 0), 1, dims)
    types = {"src": TensorType(dims), "weights": TensorType((5, 3, taps, columns))}
    diff_dst = b.input(*infer(attrs.convolution, types)[0].dims)
    kernel = b.constant(b.random(5, 3, taps, columns)) if constant else weights(b, 5, 3, taps, columns)
    y = b.op("convolution_backward_data", attrs, "conv", diff_dst=diff_dst, weights=kernel)
    filtered(b.output(b.act(y, "tanh")), tolerance=5e-4)


@given(
    height=st.integers(3, 20),
    width=st.integers(3, 9),
    taps=st.sampled_from([3, 5]),
    top=st.integers(0, 4),
    bottom=st.integers(0, 4),
    batch=st.integers(1, 2),
)
def test_any_height_and_padding(height, width, taps, top, bottom, batch):
    if height + top + bottom < taps:
        return
    graph = convolution((batch, 2, height, width), (taps, 3), (top, 1, bottom, 1))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    rewrite(normal, Winograd(), tolerance=5e-4)


@pytest.mark.parametrize(("height", "width"), [(12, 23), (7, 10), (16, 5), (35, 1)])
def test_another_shape_keeps_its_tiles(height, width):
    before = filtered(convolution((1, 4, 12, 10)))
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(convolution((1, 4, height, width)))
    after = expand_alike(graph, before, [MergeGroups(), Winograd(), Winograd(rows=2)])
    verify(after, Stage.NORMAL)
    assert products(after) == products(before)
    inputs = {node.name: torch.randn(node.results[0].dims) for node in graph.input_nodes}
    torch.testing.assert_close(evaluate(after, inputs), evaluate(graph, inputs), rtol=1e-4, atol=1e-4)


def followed(height: int, batch: int = 1) -> Graph:
    """Return a residual sum, a factor for each channel and a ReLU behind a convolution, all within it."""
    b = Builder()
    x, factor = b.input(batch, 8, height, 6), b.input(batch, 8, 1, 1, name="factor")
    y = b.conv(x, 8, "conv", kernel=3, pad_l=1)
    total = b.act(b.binary("add", b.act(y, "tanh"), x))
    return b.output(b.act(b.binary("mul", total, factor), "logistic"))


@pytest.mark.parametrize(
    ("height", "batch", "summed"), [(12, 1, ["joined"]), (12, 2, ["joined"]), (7, 1, ["conv"]), (7, 2, ["conv"])]
)
def test_what_reads_other_tensors_follows_too(height, batch, summed):
    result = filtered(followed(height, batch))
    adding = [
        n.name.rpartition(".")[2] for n in result.nodes() for p in n.post_ops if getattr(p.attrs, "alg", "") == "add"
    ]
    alone = [n.name for n in result.nodes() if getattr(n.attrs, "alg", "") == "add"]
    assert adding + alone == summed


def test_a_residual_sum_becomes_an_addition():
    b = Builder()
    x = b.act(b.input(1, 8, 12, 6), "tanh")
    graph = b.output(b.act(b.binary("add", b.conv(x, 8, "conv", kernel=3, pad_l=1), b.act(x, "abs"))))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    assert [post_op.op for post_op in normal.node("conv").post_ops] == ["sum", "eltwise"]
    result = filtered(graph)
    assert [post_op.op for post_op in result.node("conv.joined").post_ops] == ["binary", "eltwise"]


def test_what_it_cannot_compute_stays():
    b = Builder()
    x = b.input(2, 4, 9, 9)
    b.conv(x, 4, "pointwise")
    b.conv(x, 4, "strided", kernel=3, pad_l=1, strides=2)
    b.conv(x, 4, "dilated", kernel=3, pad_l=2, dilates=1)
    b.conv(x, 4, "grouped", kernel=3, pad_l=1, groups=2)
    b.op("convolution", Conv.make(2, pad_l=1), "constant", src=b.constant(b.random(1, 4, 9, 9)), weights=weights(b))
    names = ["pointwise", "strided", "dilated", "grouped", "constant"]
    for strides, pad in ((2, 1), (1, 3)):  # pads beyond the kernel cut the gradient
        attrs = ConvGradient((strides, strides), (0, 0), (pad, pad), (pad, pad), 1, (2, 4, 9, 9))
        dims = infer(attrs.convolution, {"src": TensorType((2, 4, 9, 9)), "weights": TensorType((4, 4, 3, 3))})[0].dims
        names.append(f"gradient_{strides}")
        diff_dst = b.input(*dims, name=f"diff_{strides}")
        b.op("convolution_backward_data", attrs, names[-1], diff_dst=diff_dst, weights=weights(b))
    graph = b.output(*map(Value, names))
    assert Winograd().run(graph) is graph
    assert Winograd(["strided"]).run(graph) is graph
    with pytest.raises(GraphError, match="nobody"):
        Winograd(["nobody"]).run(graph)


def test_nothing_stays_nothing():
    graph = convolution((0, 4, 9, 9))
    assert Winograd().run(graph) is graph
    assert expansions(convolution((1, 4, 9, 9)), solver({})) == {}, "too small to be asked about"


def test_one_channel_stays_direct():
    graph = convolution((1, 1, 9, 9))
    assert Winograd().run(graph) is graph
    module, x = nn.Conv2d(1, 32, 3, padding=1).eval(), torch.randn(1, 1, 28, 28)
    torch.testing.assert_close(fp.compile(module, x)(x), module(x), rtol=1e-5, atol=1e-5)


def test_names_in_use_are_kept():
    graph = convolution()
    emit(graph, "eltwise", {"src": Value("x")}, Eltwise("relu"), name="conv.product_0")
    graph.output(Value("conv.product_0"))
    filtered(graph)


# ---------------------------------------------------------------- chosen by cost


def three() -> Graph:
    """Return two equal convolutions and a wider one."""
    b = Builder()
    x = b.input(1, 16, 12, 12)
    first = b.conv(x, 16, "first", kernel=3, pad_l=1)
    same = b.conv(first, 16, "same", kernel=3, pad_l=1)
    return b.output(b.conv(same, 32, "wider", kernel=3, pad_l=1))


def solver(seconds: dict[str, float]) -> OptimalFormats:
    """Return a solver by a table: microseconds by node or op, 30 for a direct convolution, 1 for all other products."""
    direct = dict.fromkeys((*(f"direct_{number}" for number in range(16)), "first", "same", "wider"), 30.0)
    costs = {**direct, "convolution": 1.0, "matmul": 1.0, **seconds}
    tags = ("abcd", "acdb", BLOCKED, "abc")
    table = TableCosts({(name, tag): cost * US for name, cost in costs.items() for tag in tags})
    kernels = {f"expanded_{number}.kernel_product": "ab" for number in range(16)}
    target = TableTarget({"convolution": "acdb", "matmul": "abc", **kernels})
    return OptimalFormats(Setting(target, ReferenceTarget()), table)


def joined(graph: Graph) -> set[str]:
    """Return the convolutions that are filtered in a formatted graph."""
    return {node.name.removesuffix(".joined") for node in graph.nodes() if node.name.endswith(".joined")}


def spent(formatted: Graph) -> float:
    """Return the seconds of all nodes that depend on the input."""
    computed, total = {"x"}, 0.0
    for node in formatted.nodes():
        if any(value.node in computed for value in formatted.inputs(node.name).values()):
            computed.add(node.name)
            total += node.choice.cost
    return total


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({}, {"first", "same", "wider"}),
        ({"first": 10.0}, {"same", "wider"}),
        ({"expanded_1.product_3": 30.0, "expanded_3.product_3": 30.0}, {"first", "same"}),
        ({"convolution": 5.0}, set()),
    ],
)
def test_it_is_chosen_for_those_that_cost_less(seconds, chosen):
    graph, by_table = three(), solver(seconds)
    composed = expansions(graph, by_table)
    assert composed.keys() == {"first", "same", "wider"} and composed["first"][0] is composed["same"][0]
    found = list(by_table.solutions(graph, composed))
    assert [joined(formatted) for formatted, _ in found] == [chosen, set()][: 1 + bool(chosen)]
    objectives = [certificate.objective for _, certificate in found]
    assert objectives == sorted(objectives), "the first costs least"
    for formatted, certificate in found:
        verify(formatted, Stage.FORMATTED)
        assert certificate.gap == pytest.approx(1 - objectives[0] / certificate.objective), "the second is no optimum"
        assert certificate.objective == pytest.approx(spent(formatted)), "what it says is what its nodes cost"


def test_equal_convolutions_share_the_constants_that_depend_on_no_operand():
    graph, by_table = three(), solver({})
    formatted, _ = next(by_table.solutions(graph, expansions(graph, by_table)))
    added = [node.name for node in formatted.nodes() if node.op == "constant" and node.name not in graph]
    assert {name.partition(".")[0] for name in added} == {"first", "wider"}


def test_a_trial_of_many_layers_is_made_anew_once_for_each_rewrite(monkeypatch):
    b = Builder()
    y = b.input(1, 16, 12, 12)
    for width in range(16, 24):
        y = b.conv(y, width, f"conv_{width}", kernel=3, pad_l=1)
    graph, runs = b.output(y), []
    run = Winograd.run
    monkeypatch.setattr(Winograd, "run", lambda self, graph: runs.append(self.rows) or run(self, graph))
    composed = expansions(graph, solver({}))
    assert len(composed) == 8
    assert len(runs) == len(set(runs)), "a trial grows with the layers, so that making it for each takes their square"


def test_of_many_layers_those_with_most_work_are_tried(monkeypatch):
    b = Builder()
    y = b.input(1, 16, 12, 12)
    for width in (32, 16, 24, 48, 17):
        y = b.conv(y, width, f"conv_{width}", kernel=3, pad_l=1)
    monkeypatch.setattr(trial, "MOST_DISTINCT", 2)
    composed = expansions(b.output(y), solver({}))
    # 24 x 48 and 48 x 17 channels; 16 x 24, 32 x 16 and 16 x 32 are fewer products
    assert composed.keys() == {"conv_48", "conv_17"} and all(len(found) == 1 for found in composed.values())


def test_a_trial_has_a_convolution_with_a_residual_sum_beside_what_replaces_it():
    b = Builder()
    x = b.act(b.input(1, 16, 12, 12), "tanh")
    graph = b.output(b.binary("add", b.conv(x, 16, "first", kernel=3, pad_l=1), b.act(x, "abs")))
    normal = Pipeline(NORMALISE, Stage.NORMAL).run(graph)
    assert [post_op.op for post_op in normal.node("first").post_ops] == ["sum"]
    found = expansions(normal, OptimalFormats(Setting(OneDnnTarget(), ReferenceTarget()), RandomCosts(0)))
    assert found.keys() == {"first"}


def test_nobody_is_asked_to_write_rows_in_a_trial(monkeypatch):
    asked, candidates = [], TableTarget.candidates

    def noting(self, node, request):
        if node.name.startswith("expanded_") and (dst := request.get("dst")) is not None:
            asked.append((node.op, dst.ndim, str(dst.tag)))
        return candidates(self, node, request)

    monkeypatch.setattr(TableTarget, "candidates", noting)
    assert expansions(three(), solver({}), with_originals=False).keys() == {"first", "same", "wider"}
    assert {tag for op, ndim, tag in asked if op == "convolution" and ndim == 4} == {"acdb"}


def test_a_pinned_convolution_stays():
    graph = three()
    by_table = replace(solver({}), pins={"same.dst": MemoryDesc((1, 16, 12, 12), "f32", tag="acdb")})
    formatted, _ = next(by_table.solutions(graph, expansions(graph, by_table)))
    assert joined(formatted) == {"first", "wider"}


class Two(nn.Module):
    """Two convolutions that can be filtered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no other way to run a convolution that can be filtered."""
    only_filtered(monkeypatch)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("size", [(1, 16, 20, 13), (1, 16, 17, 24), (2, 16, 12, 12), (3, 16, 14, 9)])
def test_a_filtered_model_runs(size):
    torch.manual_seed(0)
    module, x = Two().eval(), torch.randn(size)
    net = fp.compile(module, x, deterministic=True, verify="full")
    assert sum(step.node.name.endswith(".joined") for step in net.plan.steps) == 2
    assert {step.target for step in net.plan.steps} == {"onednn"}
    assert not any(step.node.choice.impl.startswith("ref") for step in net.plan.steps)
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """What is added to is a part of what a filtered convolution joins, where its tiles reach beyond the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return self.second(y.tanh()) + y


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_residual_is_added_to_what_a_filtered_convolution_gives(batch):
    torch.manual_seed(0)
    module, x = Residual().eval(), torch.randn(batch, 16, 7, 7)
    net = fp.compile(module, x, deterministic=True, verify="full")
    steps = {step.node.name: step for step in net.plan.steps}
    (joined,) = [step for name, step in steps.items() if name.endswith(".joined")]
    (added,) = [step for step in steps.values() if any(post_op.op == "sum" for post_op in step.node.post_ops)]
    assert not any(name.endswith("_copy") for name in steps)
    # several images have gaps between them, which a copy in another format leaves out
    assert (added.results[0].buffer == joined.results[0].buffer) == (batch == 1)
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("special_values", "size"), [("kept", (1, 16, 20, 13)), ("exact", (3, 16, 14, 9))])
def test_both_passes_of_training_are_filtered(size, special_values):
    torch.manual_seed(0)
    module, x = Two(), torch.randn(size)
    how = {"confirm": False, "verify": "full", "special_values": special_values}
    net, ours = fp.compile(module, x, training=True, **how), x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    given = torch.randn_like(module(x))
    found = torch.autograd.grad(net(ours), [ours, *module.parameters()], given)
    expected = torch.autograd.grad(module(theirs), [theirs, *module.parameters()], given)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    filtered = {name for one in net.nets for name in joined(one.graph)}
    both = {"conv_1", "conv_2", "conv_data_1", "conv_data_2"}
    assert filtered == (both if special_values == "kept" else set())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_training_shows_what_is_not_finite(value):
    torch.manual_seed(0)
    module, x = Two(), torch.randn(1, 16, 24, 9)
    x[0, 3, 7, 4] = value
    net = fp.compile(module, x, training=True, confirm=False)
    with torch.no_grad():
        got, want = net(x), module(x)
    assert not got[~want.isfinite()].isfinite().any() and not want.isfinite().all()


@pytest.mark.usefixtures("always")
def test_it_can_be_switched_off():
    module, x = Two().eval(), torch.randn(1, 16, 20, 13)
    net = fp.compile(module, x, confirm=False, winograd=False)
    assert len([step for step in net.plan.steps if step.node.op == "convolution"]) == 2


@pytest.mark.usefixtures("always")
def test_what_is_not_finite_reaches_the_rows_of_its_tiles_and_no_others():
    torch.manual_seed(0)
    module, x = Two().first.eval(), torch.randn(1, 16, 24, 9)
    x[0, 3, 7, 4] = torch.inf
    net = fp.compile(module, x, confirm=False)
    (got,), (want,) = net(x), module(x)
    assert got[:, ~want.isfinite().all(0)].isnan().any(), "inf becomes NaN"
    assert not got.isfinite()[~want.isfinite()].any(), "nothing is lost"
    clean = [row for row in range(24) if not 0 <= row < 12]  # tiles of 6 rows, with a window of 8
    assert got[:, clean].isfinite().all()
    torch.testing.assert_close(got[:, clean], want[:, clean], rtol=1e-5, atol=1e-5)
