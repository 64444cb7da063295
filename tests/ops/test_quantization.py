"""Quantization, its inverse and both as one: ONNX's meaning, PyTorch's calls, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import fmtprop as fp
from fmtprop.errors import FmtpropError, GraphError, ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.grid import Grid
from fmtprop.ir.tensors import tensor_type
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.onnx.model import save_onnx
from fmtprop.ops import Dequantize, FakeQuantize, Quantize, emit
from fmtprop.ops.quantization import reference_fake_quantize, reference_quantize, to_bytes, to_reals


def held(graph, name, data):
    """Add a constant."""
    return graph.constant(name, tensor_type(data), data)


def quantized(numbers, scale, zero, dtype="u8"):
    attrs = Quantize(dtype, *((0, 255) if dtype == "u8" else (-128, 127)))
    kind = {"u8": torch.uint8, "s8": torch.int8}[dtype]
    tensors = {"src": torch.tensor(numbers), "scale": torch.tensor(scale), "zero_point": torch.tensor(zero, dtype=kind)}
    return reference_quantize(attrs, tensors)[0].tolist()


def test_the_middle_goes_to_the_even_integer_before_the_zero_point_is_added():
    assert quantized([0.5, 1.5, 2.5, -0.5], 1.0, 3) == [3, 5, 5, 3]


def test_numbers_beyond_the_limits_become_the_limits():
    assert quantized([1e30, -1e30, float("inf")], 1.0, 100) == [255, 0, 255]
    assert quantized([1e30, -1e30], 1.0, -5, "s8") == [127, -128]


def test_a_grid_says_how_its_numbers_are_stored():
    grids = {(0, 255): ("u8", 0), (-128, 127): ("s8", 0), (-127, 127): ("s8", 0), (-117, 138): ("u8", 117)}
    assert {limits: (str(Grid((1.0,), *limits).stored), Grid((1.0,), *limits).zero) for limits in grids} == grids


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (((0.0,), 0, 255), "a scale of a grid is 0.0"),
        (((float("nan"),), 0, 255), "a scale of a grid is nan"),
        (((1.0,), 1, 200), "has no zero"),
        (((1.0,), -200, 200), "more than 256 numbers"),
        (((1.0, 2.0), 0, 255), "has 2 scales"),
    ],
)
def test_a_grid_refuses(arguments, rule):
    with pytest.raises(GraphError, match=rule):
        Grid(*arguments)


def test_a_grid_is_the_same_when_it_is_read_again():
    grid = Grid((0.5, 0.25), -128, 127, (2, 1))
    assert Grid.from_json(grid.to_json()) == grid
    with pytest.raises(GraphError, match="needs scales, low, high and shape"):
        Grid.from_json({"scales": [1.0]})
    with pytest.raises(GraphError, match="list of float numbers"):
        Grid.from_json({**grid.to_json(), "scales": "1"})


@pytest.mark.parametrize("limits", [(0, 255), (-128, 127), (-117, 138), (-30, 30)])
def test_bytes_of_a_grid_lose_nothing(limits):
    grid = Grid((0.37,), *limits)
    multiples = torch.arange(limits[0], limits[1] + 1)
    numbers = multiples * torch.tensor(0.37)
    assert torch.equal(to_reals(to_bytes(numbers, grid), grid), numbers)
    (rounded,) = reference_fake_quantize(FakeQuantize(0.37, *limits), {"src": numbers * 1.001})
    assert torch.equal(rounded, numbers)


def test_both_ops_are_onnx_s(tmp_path):
    graph = Graph("pair")
    x, scale = graph.input("x", TensorType((3, 5))), held(graph, "s", torch.tensor([0.1, 0.02, 3.0]))
    zero = held(graph, "z", torch.tensor([7, 128, 255], dtype=torch.uint8))
    q = emit(graph, "quantize", {"src": x, "scale": scale, "zero_point": zero}, Quantize("u8", 0, 255, 0))
    graph.output(emit(graph, "dequantize", {"src": q, "scale": scale, "zero_point": zero}, Dequantize(0)))
    save_onnx(graph, tmp_path / "pair.onnx")
    data = torch.randn(3, 5) * 10
    (expected,) = ReferenceEvaluator(str(tmp_path / "pair.onnx")).run(None, {"x": data.numpy()})
    assert np.array_equal(fp.compile(graph)(data).numpy(), expected)


@pytest.mark.parametrize(
    ("types", "axis", "rule"),
    [
        ({"scale": TensorType((4,))}, 0, "scale has dims \\(4,\\) but src axis 0 has size 3"),
        ({"scale": TensorType((3,))}, 2, "axis 2 does not exist in src, which has 2 dimensions"),
        ({"scale": TensorType((3,)), "zero_point": TensorType((), "u8")}, 0, "zero_point has dims \\(\\) but scale"),
        ({"scale": TensorType(()), "zero_point": TensorType((), "s8")}, 0, "zero_point is s8 but the integers are u8"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(types, axis, rule):
    graph = Graph("bad")
    inputs = {name: graph.input(name, type_) for name, type_ in {"src": TensorType((3, 5)), **types}.items()}
    with pytest.raises(ShapeError, match=rule):
        emit(graph, "quantize", inputs, Quantize("u8", 0, 255, axis))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused_by_the_node_s_name(scale):
    graph = Graph("bad")
    x, s = graph.input("x", TensorType((3,))), held(graph, "s", torch.tensor(scale))
    graph.output(emit(graph, "quantize", {"src": x, "scale": s}, Quantize("u8", 0, 255)))
    with pytest.raises(FmtpropError, match=r"node quantize_1 \(quantize\): its scale is .*must be positive and finite"):
        fp.compile(graph)


def test_attributes_are_checked():
    with pytest.raises(ShapeError, match="integers of at most 32 bits, not f32"):
        Quantize("f32", 0, 255)
    with pytest.raises(ShapeError, match="must be smaller than the largest"):
        Quantize("u8", 255, 0)
    with pytest.raises(ShapeError, match=r"scale is 0\.0"):
        FakeQuantize(0.0, 0, 255)
    with pytest.raises(ShapeError, match="0 must lie between"):
        FakeQuantize(1.0, 5, 255)


def test_pytorch_s_calls_become_the_same_ops():
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (it makes the operators)

    class Both(torch.nn.Module):
        def forward(self, x):
            q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8)
            return torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.1, 3, 0, 255, torch.uint8)

    graph = fp.from_torch(Both(), (torch.randn(2, 3),))
    assert [node.op for node in graph.nodes() if not node.is_boundary] == ["quantize", "dequantize"]
    assert graph.node("quantize_1").results[0].dtype is DataType.U8
    x = torch.randn(2, 3) * 10
    assert torch.allclose(fp.compile(graph)(x), Both()(x), atol=1e-6)


def test_codes_stay_codes_however_few():
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (it makes the operators)

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randint(-128, 128, (4, 3), dtype=torch.int8))

        def forward(self, x):
            weights = torch.ops.quantized_decomposed.dequantize_per_tensor(self.codes, 0.1, 3, -128, 127, torch.int8)
            return x @ weights

    module, x = Product(), torch.randn(2, 4)
    graph = fp.from_torch(module, (x,))
    assert [node.op for node in graph.nodes() if not node.is_boundary] == ["dequantize", "matmul"]
    assert torch.allclose(fp.compile(graph)(x), module(x), atol=1e-5)
