"""Lower precision: which types change, where conversions stand, and that the meaning stays within bf16's rounding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.verify import Stage, verify
from fmtprop.layout import DataType
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.base import Pipeline
from fmtprop.passes.pipeline import NORMALISE
from fmtprop.passes.precision.lower import LowerPrecision, WidenPrecision
from fmtprop.runtime.agreement import relative_error


def lowered(module: nn.Module, x: torch.Tensor, dtype: DataType = DataType.BF16) -> Graph:
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(fp.from_torch(module.eval(), x))
    result = LowerPrecision(dtype).run(graph)
    verify(result, Stage.NORMAL)
    return result


def types(graph: Graph, op: str) -> list[str]:
    return [node.results[0].dtype.value for node in graph.nodes() if node.op == op]


def check(module: nn.Module, x: torch.Tensor) -> Graph:
    graph = lowered(module, x)
    (got,) = evaluate(graph, {graph.input_nodes[0].name: x})
    with torch.no_grad():
        want = module(x)
    assert got.dtype is want.dtype
    error = relative_error(got, want)
    # not exact, else nothing was rounded; a few times bf16's unit roundoff 2**-8
    assert 0 < error < 2e-2
    return graph


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return x + self.c(self.b(x))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_f16_is_lowered_as_bf16_and_rounds_an_eighth_as_much():
    module, x = Residual().eval(), torch.randn(1, 8, 9, 9)
    found = {}
    for dtype in (DataType.BF16, DataType.F16):
        graph = lowered(module, x, dtype)
        (got,) = evaluate(graph, {graph.input_nodes[0].name: x})
        shown = [str(node.results).replace(dtype.value, "narrow") for node in graph.nodes()]
        with torch.no_grad():
            found[dtype] = shown, relative_error(got, module(x))
    (shown, error), (others, other) = found.values()
    assert shown == others and 0 < other < error / 4


def test_operands_are_narrow_and_parameters_of_one_axis_stay_wide():
    graph = check(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)), torch.randn(1, 4, 8, 8))
    first, second = (node for node in graph.nodes() if node.op == "convolution")
    for node in (first, second):
        read = {name: graph.type_of(value).dtype.value for name, value in graph.inputs(node.name).items()}
        assert read == {"src": "bf16", "weights": "bf16", "bias": "f32"}
    assert first.results[0].dtype is DataType.BF16


def test_the_input_is_converted_once_for_all_readers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return torch.cat([self.a(x), self.b(x)], 1)

    graph = check(Two(), torch.randn(1, 4, 8, 8))
    x = graph.input_nodes[0]
    readers = {reader for reader, _ in graph.readers(fp.ir.Value(x.name))}
    assert {graph.node(name).op for name in readers} == {"reorder"}
    assert len(readers) == 1


def test_a_product_at_the_end_stores_its_accumulator():
    graph = check(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(2, 16))
    assert types(graph, "inner_product") == ["bf16", "f32"]
    # of activations only the input is converted
    assert [graph.node(name).op for name, _ in graph.readers(graph.inputs("output_1")["src"])] == ["output"]
    assert graph.node(graph.inputs("output_1")["src"].node).op == "inner_product"


def test_views_between_do_not_stand_in_the_way():
    graph = check(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()), torch.randn(2, 4, 6, 6))
    assert types(graph, "convolution") == ["f32"]
    assert set(types(graph, "reshape") + types(graph, "flatten")) == {"f32"}


def test_a_result_that_others_read_narrow_is_converted():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.a(x)
            return torch.relu(y) * 1.0, self.b(y), y

    graph = lowered(Both(), torch.randn(1, 4, 8, 8))
    assert types(graph, "convolution") == ["bf16", "f32"]


def test_a_sum_keeps_the_type_of_the_buffer_that_it_adds_into():
    graph = check(Residual(), torch.randn(1, 8, 6, 6))
    summing = [node for node in graph.nodes() if any(post_op.op == "sum" for post_op in node.post_ops)]
    assert [node.results[0].dtype for node in summing] == [DataType.BF16]
    assert graph.node(graph.inputs("output_1")["src"].node).op == "reorder"


def test_bandwidth_limited_ops_keep_what_they_read():
    x = torch.randn(1, 4, 8, 8)
    assert types(lowered(nn.MaxPool2d(2), x), "pooling") == ["f32"]
    graph = check(nn.Sequential(nn.Conv2d(4, 8, 1), nn.MaxPool2d(2)), x)
    assert types(graph, "pooling") == ["bf16"]


def test_normalization_reads_its_statistics_in_f32():
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    graph = check(nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), norm), torch.randn(1, 4, 8, 8))
    (node,) = (node for node in graph.nodes() if node.op == "batch_normalization")
    read = {name: graph.type_of(value).dtype.value for name, value in graph.inputs(node.name).items()}
    assert read.pop("src") == "bf16"
    assert set(read.values()) == {"f32"}


def test_host_ops_get_f32_back():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(torch.cumsum(self.a(x), 1))

    graph = check(Sorted(), torch.randn(2, 8))
    (host,) = (node for node in graph.nodes() if node.op == "aten")
    assert [graph.type_of(value).dtype for value in graph.inputs(host.name).values()] == [DataType.F32]
    assert types(graph, "inner_product") == ["f32", "f32"]


class Shifted(nn.Module):
    """Samples an image at positions that a layer shifts, as in optical flow."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.flow = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.features(x)
        axis = torch.linspace(-1, 1, x.shape[-1])
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
        shifted = grid + 0.1 * self.flow(torch.relu(image)).permute(0, 2, 3, 1)
        return nn.functional.grid_sample(image, shifted, align_corners=True), shifted - grid


def test_positions_are_computed_in_f32():
    module, x = Shifted().eval(), torch.randn(1, 3, 100, 100)
    graph = lowered(module, x)
    assert [node.results[0].dtype.value for node in graph.nodes() if node.op == "convolution"] == ["bf16", "f32"]
    with torch.no_grad():
        for got, want in zip(evaluate(graph, {graph.input_nodes[0].name: x}), module(x), strict=True):
            assert relative_error(got, want) < 2e-2


class Flow(nn.Module):
    """Adds up small steps to positions, or to any numbers that it starts from."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.step = nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(torch.tanh(self.features(x)))


class FromPositions(Flow):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        axis = torch.linspace(-1, 1, image.shape[-1])
        start = torch.stack(torch.meshgrid(axis, axis, indexing="xy")).expand(image.shape[0], -1, -1, -1)
        grid = start + self.moved(image)
        for _ in range(2):
            found = nn.functional.grid_sample(image, grid.permute(0, 2, 3, 1), align_corners=True)
            grid = grid + self.moved(found)
        return grid - start


class FromInput(Flow):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x + self.moved(x) * 0.01
        return x


class Leaky(nn.Module):
    """A leaky integrator of products."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.step, self.start = nn.Linear(8, 16), nn.Parameter(start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.start.expand(x.shape[0], -1)
        for t in range(x.shape[1]):
            state = 0.95 * state + 0.05 * torch.tanh(self.step(x[:, t]))
        return state


class FromLearned(Flow):
    """Like a residual network: its first numbers are learned, or come from a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.place = nn.Conv2d(2, 2, 1), nn.Parameter(torch.randn(1, 2, 12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) + self.place
        x = x + self.moved(x)
        return self.stem(x + self.moved(x))


def test_steps_add_up_in_f32():
    """In bf16, each sum is rounded by up to 2**-9, beside which the step of an integrator is small."""
    x = torch.randn(1, 2, 12, 12)
    for module, bound in ((FromPositions(), 3e-2), (FromInput(), 2e-4)):
        graph = lowered(module.eval(), x)
        sums = [node for node in graph.nodes() if any(one.op in ("sum", "binary") for one in node.post_ops)]
        assert sums
        for node in sums:
            read = {name: graph.type_of(value).dtype.value for name, value in graph.inputs(node.name).items()}
            assert (read["src"], read["post_op_0"], node.results[0].dtype.value) == ("bf16", "f32", "f32")
        (got,) = evaluate(graph, {graph.input_nodes[0].name: x})
        with torch.no_grad():
            assert relative_error(got, module(x)) < bound


@pytest.mark.parametrize("start", [torch.zeros(1, 16), torch.linspace(-9, 9, 16)[None]], ids=["zeros", "learned"])
def test_a_state_that_starts_at_a_constant_adds_up_in_f32(start):
    module, x = Leaky(start).eval(), torch.randn(4, 12, 8)
    graph = lowered(module, x)
    (got,) = evaluate(graph, {graph.input_nodes[0].name: x})
    with torch.no_grad():
        assert relative_error(got, module(x)) < 3e-3
    assert set(types(graph, "inner_product")) == {"f32"}


def test_a_constant_that_each_layer_changes_once_is_no_state():
    """As the learned places of an encoder: each layer adds to the sum once."""

    class Encoder(Leaky):
        def __init__(self) -> None:
            super().__init__(torch.linspace(-9, 9, 16)[None])
            self.steps = nn.ModuleList(nn.Linear(8, 16) for _ in range(12))
            self.last = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.start.expand(x.shape[0], -1)
            for t, step in enumerate(self.steps):
                state = state + torch.tanh(step(x[:, t]))
            return self.last(state)

    graph = lowered(Encoder().eval(), torch.randn(4, 12, 8))
    assert types(graph, "inner_product") == ["bf16"] * 12 + ["f32"]


def test_sums_of_computed_and_learned_numbers_are_narrow():
    graph = lowered(FromLearned().eval(), torch.randn(1, 2, 12, 12))
    assert types(graph, "convolution") == ["bf16"] * 5 + ["f32"]


def test_what_is_read_in_f32_alone_is_not_rounded():
    """The probability that nothing is left is a product of numbers near 1."""

    class Remains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            taken = torch.sigmoid(self.linear(x) - 4)
            left = torch.cumprod(1 - taken, 1)
            return left, taken * left

    module, x = Remains().eval(), torch.randn(8, 16)
    graph = lowered(module, x)
    with torch.no_grad():
        for got, want in zip(evaluate(graph, {graph.input_nodes[0].name: x}), module(x), strict=True):
            assert 0 < relative_error(got, want) < 5e-3
    assert types(graph, "inner_product") == ["f32"]
    assert set(types(graph, "eltwise") + types(graph, "binary")) == {"f32"}
    assert types(graph, "reorder").count("f32") == 0


@pytest.mark.parametrize(("kind", "op", "expected"), [(nn.GRU, "lbr_gru", "f32"), (nn.LSTM, "lstm", "bf16")])
def test_a_gru_stays_in_f32(kind: type[nn.Module], op: str, expected: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.last = nn.Linear(8, 16), kind(16, 24, batch_first=True), nn.Linear(24, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layer(self.first(x))[0])

    torch.manual_seed(0)
    graph = check(Layers(), torch.randn(2, 5, 8))
    assert types(graph, op) == [expected]


def test_a_gru_in_bf16_is_computed_in_f32() -> None:
    class Fast:
        def computes_in(self, dtype: DataType) -> bool:
            return True

        def is_fast_in(self, dtype: DataType) -> bool:
            return True

    torch.manual_seed(0)
    module, x = nn.GRU(16, 24, batch_first=True).bfloat16().eval(), torch.randn(2, 5, 16).bfloat16()
    graph = WidenPrecision(Fast()).run(fp.from_torch(module, x))
    verify(graph, Stage.IMPORTED)
    assert types(graph, "lbr_gru") == ["f32"]
    for got, want in zip(evaluate(graph, {graph.input_nodes[0].name: x}), module(x), strict=True):
        assert got.dtype is torch.bfloat16 and relative_error(got, want) < 2e-2


def test_integers_stay_integers():
    graph = lowered(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)), torch.tensor([[1, 2]]))
    assert graph.input_nodes[0].results[0].dtype is DataType.S64


def test_what_does_not_compute_is_unchanged():
    graph = lowered(nn.Softmax(1), torch.randn(2, 4))
    assert {node.op for node in graph.nodes()} == {"input", "softmax", "output"}
    assert types(graph, "softmax") == ["f32"]


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x).bfloat16().float()) * 2


def test_conversions_of_the_model_s_own_keep_the_types_and_names_that_they_have():
    graph = check(Rounded(), torch.randn(1, 8, 9, 9))
    assert graph.node("reorder_1").results[0].dtype is DataType.BF16
    assert graph.node("reorder_2").results[0].dtype is DataType.F32


def test_an_op_that_reads_another_narrow_type_keeps_its_types():
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x + x.half()

    assert types(check(Halved(), torch.randn(2, 8)), "binary") == ["f32"]


def test_a_product_of_few_rows_reads_the_caller_s_matrix_as_it_is():
    class Read(nn.Module):
        def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) @ matrix.transpose(1, 2)

    def converted(rows: int) -> int:
        inputs = torch.ones(2, rows, 8), torch.ones(2, 32, 8)
        graph = LowerPrecision(DataType.BF16).run(
            Pipeline(NORMALISE, Stage.NORMAL).run(fp.from_torch(Read().eval(), inputs))
        )
        return types(graph, "reorder").count("bf16")

    assert (converted(1), converted(17)) == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_type_that_the_target_lacks_is_computed_in_f32(dtype):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.body(x)
            return y, y.cumsum(-1)

    x = torch.randn(2, 4, 8, 8, dtype=dtype)
    module = Heads().eval().to(dtype)
    graph = fp.from_torch(module, x)
    assert WidenPrecision(Lacking(())).run(graph).is_copy_of(graph)
    widen = WidenPrecision(Lacking((DataType.F16, DataType.BF16)))
    wide = Pipeline((widen, *NORMALISE), Stage.NORMAL).run(graph)
    assert types(wide, "convolution") == ["f32", "f32"]
    assert types(wide, "aten") == [DataType.from_any(dtype).value]  # a call gets the model's type
    results = evaluate(wide, {wide.input_nodes[0].name: x})
    for got, want in zip(results, module.float()(x.float()), strict=True):
        assert got.dtype is dtype and relative_error(got, want) < 2e-2


@dataclass
class Lacking:
    """A target that cannot compute in some types."""

    missing: tuple[DataType, ...]
    slow: tuple[DataType, ...] = ()

    def computes_in(self, dtype: DataType) -> bool:
        return dtype not in self.missing

    def is_fast_in(self, dtype: DataType) -> bool:
        return dtype not in (*self.missing, *self.slow)


@pytest.mark.parametrize(("rows", "kept"), [(2, True), (40, False)])
def test_only_products_of_few_rows_stay_in_a_type_that_is_slow(rows, kept):
    """Those take the time of reading the matrix, which has half the bytes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).half().eval()
    x = torch.randn(rows, 16).half()
    graph = Pipeline(NORMALISE, Stage.NORMAL).run(fp.from_torch(module, x))
    wide = WidenPrecision(Lacking((), (DataType.F16,))).run(graph)
    verify(wide, Stage.NORMAL)
    found = [node.results[0].dtype for node in wide.nodes() if node.op in ("matmul", "inner_product")]
    assert found == [DataType.F16 if kept else DataType.F32] * 2
    (result,) = evaluate(wide, {wide.input_nodes[0].name: x})
    assert result.dtype is torch.float16 and relative_error(result, module.float()(x.float())) < 5e-3


class Router(nn.Module):
    """Chooses experts as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = self.gate(self.before(x)).softmax(-1).topk(2)
        return weights, experts


def test_numbers_that_choose_places_are_not_rounded():
    """In bf16, the weights of two experts are equal for many tokens: a tie that PyTorch, in f32, does not have."""
    graph = lowered(Router(), torch.randn(5, 16))
    (topk,) = (node for node in graph.nodes() if "topk" in getattr(node.attrs, "target", ""))
    (scores,) = graph.inputs(topk.name).values()
    (logits,) = graph.inputs(scores.node).values()
    assert [graph.type_of(value).dtype for value in (scores, logits)] == [DataType.F32, DataType.F32]
    read = {graph.type_of(value).dtype for value in graph.inputs(logits.node).values()}
    assert read == {DataType.BF16}  # the product itself is narrow
