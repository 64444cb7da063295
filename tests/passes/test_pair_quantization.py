"""Pairs of quantization and dequantization become roundings, quantized constants real ones, and grids are marked."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.tensors import materialise, tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.ops import (
    Concat,
    Conv,
    Dequantize,
    Eltwise,
    FakeQuantize,
    MatMul,
    Permute,
    Pooling,
    Quantize,
    Reshape,
    emit,
)
from fmtprop.ops.evaluate import evaluate
from fmtprop.passes.precision.mark_grids import MarkGrids, grids_of
from fmtprop.passes.precision.pair_quantization import PairQuantization
from fmtprop.passes.rewrites.fold_constants import FoldConstants


def held(graph, name, data):
    """Add a constant."""
    return graph.constant(name, tensor_type(data), data)


def scalars(graph, scale, zero, dtype=torch.uint8):
    name = f"{scale}_{zero}_{len(graph)}"
    return {
        "scale": held(graph, f"s{name}", torch.tensor(scale)),
        "zero_point": held(graph, f"z{name}", torch.tensor(zero, dtype=dtype)),
    }


def rounded(graph, value, scale=0.5, zero=3):
    """Add a quantization and a dequantization."""
    quantized = emit(graph, "quantize", {"src": value, **scalars(graph, scale, zero)}, Quantize("u8", 0, 255))
    return emit(graph, "dequantize", {"src": quantized, **scalars(graph, scale, zero)}, Dequantize())


def ops(graph):
    return [node.op for node in graph.nodes() if not node.is_boundary]


def test_a_pair_becomes_a_rounding_and_means_the_same():
    graph = Graph("pair")
    graph.output(rounded(graph, graph.input("x", TensorType((2, 3)))))
    paired = PairQuantization().run(graph)
    assert ops(paired) == ["fake_quantize"]
    (node,) = (node for node in paired.nodes() if node.op == "fake_quantize")
    assert node.attrs == FakeQuantize(0.5, -3, 252)
    x = {"x": torch.randn(2, 3) * 100}
    assert torch.equal(evaluate(paired, x)[0], evaluate(graph, x)[0])


def test_a_pair_of_other_scales_stays():
    graph = Graph("other")
    x = graph.input("x", TensorType((2, 3)))
    quantized = emit(graph, "quantize", {"src": x, **scalars(graph, 0.5, 3)}, Quantize("u8", 0, 255))
    graph.output(emit(graph, "dequantize", {"src": quantized, **scalars(graph, 0.25, 3)}, Dequantize()))
    assert ops(PairQuantization().run(graph)) == ["quantize", "dequantize"]


def test_a_quantization_with_another_reader_stays_beside_the_rounding():
    graph = Graph("both")
    x = graph.input("x", TensorType((2, 3)))
    quantized = emit(graph, "quantize", {"src": x, **scalars(graph, 0.5, 3)}, Quantize("u8", 0, 255))
    graph.output(emit(graph, "dequantize", {"src": quantized, **scalars(graph, 0.5, 3)}, Dequantize()))
    graph.output(quantized)
    assert sorted(ops(PairQuantization().run(graph))) == ["fake_quantize", "quantize"]


@pytest.mark.parametrize(
    "between",
    [
        ("pooling", Pooling.make("max", (2, 2))),
        ("reshape", Reshape((2, 4, 36))),
        ("permute", Permute((0, 2, 3, 1))),
    ],
)
def test_a_second_rounding_behind_an_op_that_keeps_numbers_is_removed(between):
    graph = Graph("twice")
    value = rounded(graph, graph.input("x", TensorType((2, 4, 6, 6))))
    value = emit(graph, between[0], {"src": value}, between[1])
    graph.output(rounded(graph, value))
    assert ops(PairQuantization().run(graph)) == ["fake_quantize", between[0]]


def test_a_second_rounding_behind_a_function_stays():
    graph = Graph("twice")
    value = emit(graph, "eltwise", {"src": rounded(graph, graph.input("x", TensorType((2, 4))))}, Eltwise("tanh"))
    graph.output(rounded(graph, value))
    assert ops(PairQuantization().run(graph)) == ["fake_quantize", "eltwise", "fake_quantize"]


def test_a_concat_keeps_a_grid_that_its_sources_share():
    graph = Graph("concat")
    a, b = (graph.input(name, TensorType((2, 4))) for name in "ab")
    alike = {"src_0": rounded(graph, a), "src_1": rounded(graph, b)}
    other = {"src_0": rounded(graph, a), "src_1": rounded(graph, b, scale=0.25)}
    for operands in (alike, other):
        graph.output(emit(graph, "concat", operands, Concat(1)))
    found = grids_of(PairQuantization().run(graph))
    assert [value.node for value in found if value.node.startswith("concat")] == ["concat_1"]


def grouped(groups, channels=4):
    """Return a convolution with quantized weights, whose scales vary along the outputs."""
    graph = Graph("grouped")
    weights = torch.randint(-128, 128, (channels, 4 // groups, 3, 3), dtype=torch.int8)
    scale = torch.rand(channels) + 0.1
    parameters = {
        "scale": held(graph, "s", scale),
        "zero_point": held(graph, "z", torch.zeros(channels, dtype=torch.int8)),
    }
    w = emit(graph, "dequantize", {"src": held(graph, "w", weights), **parameters}, Dequantize(0))
    if groups > 1:
        w = emit(graph, "reshape", {"src": w}, Reshape((groups, channels // groups, 4 // groups, 3, 3)))
    src = rounded(graph, graph.input("x", TensorType((1, 4, 8, 8))))
    graph.output(emit(graph, "convolution", {"src": src, "weights": w}, Conv.make(2, groups=groups)))
    return graph, scale


@pytest.mark.parametrize(("groups", "shape"), [(1, (4, 1, 1, 1)), (2, (2, 2, 1, 1, 1)), (4, (4, 1, 1, 1, 1))])
def test_quantized_weights_become_real_ones_on_a_grid(groups, shape):
    graph, scale = grouped(groups)
    done = MarkGrids().run(FoldConstants().run(PairQuantization().run(graph)))
    (convolution,) = (node for node in done.nodes() if node.op == "convolution")
    grid = convolution.grids["weights"]
    assert (grid.shape, grid.low, grid.high) == (shape, -128, 127)
    assert torch.equal(torch.tensor(grid.scales), scale)
    weights = done.node(done.inputs(convolution.name)["weights"].node)
    assert weights.op == "constant" and weights.grids["dst"] == grid
    numbers = materialise(done.constants[weights.name], weights.results[0])
    assert torch.equal(numbers, torch.round(numbers / scale.reshape(shape)) * scale.reshape(shape))
    x = {"x": torch.randn(1, 4, 8, 8)}
    assert torch.allclose(evaluate(done, x)[0], evaluate(graph, x)[0], atol=1e-4)


def test_different_zero_points_along_an_axis_are_no_grid():
    graph = Graph("zeros")
    numbers = held(graph, "w", torch.randint(0, 255, (4, 3), dtype=torch.uint8))
    parameters = {
        "scale": held(graph, "s", torch.ones(4)),
        "zero_point": held(graph, "z", torch.arange(4).to(torch.uint8)),
    }
    graph.output(emit(graph, "dequantize", {"src": numbers, **parameters}, Dequantize(0)))
    done = PairQuantization().run(graph)
    assert ops(done) == [] and not grids_of(done)
    assert torch.equal(evaluate(done, {})[0], evaluate(graph, {})[0])


def test_a_grid_is_saved_with_its_constant(tmp_path):
    import fmtprop as fp

    graph, _ = grouped(1)
    paired = PairQuantization().run(graph)
    fp.save(paired, tmp_path / "paired.json")
    again = fp.load(tmp_path / "paired.json")
    (name,) = (node.name for node in paired.nodes() if node.op == "constant" and node.grids)
    assert again.node(name).grids == paired.node(name).grids
    assert isinstance(again.node(name).grids["dst"], Grid)


def integers_of(graph, value, scale=0.5, zero=3):
    return emit(graph, "quantize", {"src": value, **scalars(graph, scale, zero)}, Quantize("u8", 0, 255))


def reals_of(graph, value, scale=0.5, zero=3):
    return emit(graph, "dequantize", {"src": value, **scalars(graph, scale, zero)}, Dequantize())


@pytest.mark.parametrize("readers", [1, 2])
def test_a_dequantization_moves_before_ops_that_keep_integers(readers):
    graph = Graph("integers")
    a, b = (integers_of(graph, graph.input(name, TensorType((1, 4, 6, 6)))) for name in "ab")
    value = emit(graph, "concat", {"src_0": a, "src_1": b}, Concat(1))
    value = emit(graph, "pooling", {"src": value}, Pooling.make("max", (2, 2)))
    value = emit(graph, "reshape", {"src": value}, Reshape((1, 8, 25)))
    for _ in range(readers):
        graph.output(reals_of(graph, value))
    paired = PairQuantization().run(graph)
    assert sorted(ops(paired)) == ["concat", "fake_quantize", "fake_quantize", "pooling", "reshape"]
    x = {name: torch.randn(1, 4, 6, 6) * 50 for name in "ab"}
    assert all(map(torch.equal, evaluate(paired, x), evaluate(graph, x)))
    assert {value.node for value in grids_of(paired)} >= {"concat_2", "pool_2"}


def test_a_dequantization_of_another_scale_stays_behind_them():
    graph = Graph("other")
    value = integers_of(graph, graph.input("x", TensorType((1, 4, 6, 6))))
    value = emit(graph, "pooling", {"src": value}, Pooling.make("max", (2, 2)))
    graph.output(reals_of(graph, value, scale=0.25))
    x = {"x": torch.randn(1, 4, 6, 6) * 50}
    assert torch.equal(evaluate(PairQuantization().run(graph), x)[0], evaluate(graph, x)[0])


def test_the_callers_integers_lie_on_a_grid_behind_their_dequantization():
    graph = Graph("caller")
    value = reals_of(graph, graph.input("x", TensorType((2, 3), "u8")))
    graph.output(value)
    assert grids_of(PairQuantization().run(graph))[value] == Grid((0.5,), -3, 252)


def test_a_quantized_constant_is_its_integers():
    graph = Graph("constant")
    weights = torch.randn(4, 6)
    parameters = {"scale": held(graph, "s", torch.rand(4) + 0.1)}
    stored = emit(graph, "quantize", {"src": held(graph, "w", weights), **parameters}, Quantize("s8", -127, 127, 0))
    graph.output(emit(graph, "dequantize", {"src": stored, **parameters}, Dequantize(0)))
    paired = PairQuantization().run(graph)
    assert ops(paired) == []
    assert torch.equal(evaluate(paired, {})[0], evaluate(graph, {})[0])
    (grid,) = grids_of(paired).values()
    assert (grid.shape, grid.stored.value) == ((4, 1), "s8")


def test_a_computed_second_factor_has_signed_bytes():
    graph = Graph("attention")
    query, key = (rounded(graph, graph.input(name, TensorType((2, 4, 8)))) for name in ("query", "key"))
    turned = emit(graph, "permute", {"src": key}, Permute((0, 2, 1)))
    graph.output(emit(graph, "matmul", {"src": query, "weights": turned}, MatMul()))
    marked = MarkGrids().run(PairQuantization().run(graph))
    (product,) = (node for node in marked.nodes() if node.op == "matmul")
    assert (product.grids["src"].stored.value, product.grids["src"].zero) == ("u8", 3)
    second = product.grids["weights"]
    assert (second.stored.value, second.zero, second.low, second.high) == ("s8", -125, -3, 252)
    assert Grid.from_json(second.to_json()) == second
    roundings = [node.grids["dst"].signed for node in marked.nodes() if node.op == "fake_quantize"]
    assert sorted(roundings) == [False, True]
