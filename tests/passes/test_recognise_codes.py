"""Matrices that a library's own steps decode from constants become codes, whatever the steps are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ops.matmul_nbits import packed

#: by fixed costs: two doors are compared bit by bit
OPTIONS = {"tune": "model", "confirm": False, "deterministic": True}
DEPTH, OUTPUTS, GROUP = 256, 96, 64

SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
#: AutoAWQ's order of the eight codes of an int32
AWQ_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
AWQ_REVERSE = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def numbers(*shape, low=0, high=16, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def in_words(codes: torch.Tensor) -> torch.Tensor:
    """Return eight codes of the last axis in an int32."""
    words = (codes.view(*codes.shape[:-1], -1, 8).long() << SHIFTS.long()).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class Gptq(nn.Module):
    """A linear layer as GPTQ's and GPTQModel's torch kernels have it: codes along K, ``g_idx`` tells the group."""

    def __init__(self, g_idx: torch.Tensor, scales: torch.dtype) -> None:
        super().__init__()
        groups = DEPTH // GROUP
        self.register_buffer("qweight", in_words(numbers(OUTPUTS, DEPTH)).t().contiguous())
        self.register_buffer("qzeros", in_words(numbers(groups, OUTPUTS, high=15, seed=1)))
        self.register_buffer("scales", (torch.rand(groups, OUTPUTS) * 0.1 + 0.01).to(scales))
        self.register_buffer("g_idx", g_idx)
        self.register_buffer("wf", SHIFTS.unsqueeze(0))
        self.bias = nn.Parameter(torch.randn(OUTPUTS))

    def weight(self) -> torch.Tensor:
        zeros = torch.bitwise_right_shift(self.qzeros.unsqueeze(2).expand(-1, -1, 8), self.wf.unsqueeze(0)).to(
            torch.int16
        )
        zeros = torch.bitwise_and(zeros, 15).reshape(self.scales.shape) + 1
        weight = torch.bitwise_right_shift(self.qweight.unsqueeze(1).expand(-1, 8, -1), self.wf.unsqueeze(-1)).to(
            torch.int16
        )
        weight = torch.bitwise_and(weight, 15).reshape(DEPTH, OUTPUTS)
        return self.scales[self.g_idx.long()] * (weight - zeros[self.g_idx.long()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight().to(x.dtype)) + self.bias


class Awq(nn.Module):
    """A linear layer as AutoAWQ has it: eight outputs in an int32, in its own order."""

    def __init__(self) -> None:
        super().__init__()
        groups = DEPTH // GROUP
        self.register_buffer("qweight", in_words(numbers(DEPTH, OUTPUTS).view(DEPTH, -1, 8)[..., AWQ_ORDER].flatten(1)))
        self.register_buffer("qzeros", in_words(numbers(groups, OUTPUTS, seed=1)))
        self.register_buffer("scales", torch.rand(groups, OUTPUTS) * 0.1 + 0.01)

    @staticmethod
    def unpacked(words: torch.Tensor) -> torch.Tensor:
        codes = torch.bitwise_right_shift(words[:, :, None], SHIFTS[None, None, :]).to(torch.int8)
        return torch.bitwise_and(codes[..., AWQ_REVERSE].flatten(1), 15)

    def weight(self) -> torch.Tensor:
        scales, zeros = (one.repeat_interleave(GROUP, 0) for one in (self.scales, self.unpacked(self.qzeros)))
        return (self.unpacked(self.qweight) - zeros) * scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight())


class PerRow(nn.Module):
    """A layer with bytes, and a scale and a floating zero point for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", numbers(OUTPUTS, DEPTH, high=256).to(torch.uint8))
        self.register_buffer("scales", torch.rand(OUTPUTS, 1))
        self.register_buffer("zeros", torch.rand(OUTPUTS, 1) * 200)

    def weight(self) -> torch.Tensor:
        return (self.codes.float() - self.zeros) * self.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight())


IN_ORDER = torch.arange(DEPTH) // GROUP
ANYWHERE = IN_ORDER[torch.randperm(DEPTH, generator=torch.Generator().manual_seed(2))].int()

LAYERS = {
    "gptq": lambda: Gptq(IN_ORDER, torch.float32),
    "gptq of f16 scales": lambda: Gptq(IN_ORDER, torch.float16),
    "gptq by activations": lambda: Gptq(ANYWHERE, torch.float32),
    "awq": Awq,
    "bytes": PerRow,
}


def ops(net):
    return [step.node.op for step in net.plan.steps]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("door", "rows"), [("compile", (1,)), ("compile", (40,)), ("backend", (2, 3))])
def test_layers_of_libraries_have_codes(door, name, rows):
    torch.manual_seed(0)
    layer, x = LAYERS[name]().eval(), torch.randn(*rows, DEPTH)
    with torch.no_grad():
        expected = layer(x)
        if door == "backend":
            torch._dynamo.reset()
            result = torch.compile(layer, backend="fmtprop", options=OPTIONS)(x)
        else:
            net = fp.compile(layer, (x,), **OPTIONS)
            result = net(x)
            found = "matmul_nbits" if x[..., 0].numel() <= 16 else "decode_nbits"
            assert ops(net).count(found) == 1
            assert sum(one.nbytes for one in net.plan.constants) < 0.5 * 4 * DEPTH * OUTPUTS
    # scales in f16: their products with codes are rounded to f16 in PyTorch
    tolerance = 1e-3 if "f16" in name else 2e-5
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_matrix_of_other_numbers_stays():
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", numbers(OUTPUTS, DEPTH, high=256).to(torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, torch.cos(self.codes.float()))

    layer, x = Cosine().eval(), torch.randn(1, DEPTH)
    net = fp.compile(layer, (x,), **OPTIONS)
    assert "matmul_nbits" not in ops(net)
    torch.testing.assert_close(net(x), layer(x), rtol=1e-4, atol=1e-4)


def test_a_matrix_with_a_scale_that_is_infinite_stays():
    layer, x = PerRow().eval(), torch.ones(1, DEPTH)
    layer.scales[3] = torch.inf
    net = fp.compile(layer, (x,), **OPTIONS)
    assert "matmul_nbits" not in ops(net)
    assert torch.equal(net(x).isfinite(), layer(x).isfinite())


@pytest.mark.parametrize("zero", [0.0, 8.0, 3.5, 300.0])
@pytest.mark.parametrize(("low", "high", "bits"), [(0, 16, 4), (-8, 8, 4), (5, 21, 4), (0, 256, 8), (-128, 128, 8)])
def test_integers_are_packed_exactly(low, high, bits, zero):
    from fmtprop.ops.matmul_nbits import MatMulNBits, decoded

    codes, points = numbers(5, 128, low=low, high=high).float(), torch.full((5, 2), zero)
    found, made, zero_points = packed(codes, points)
    assert found == bits
    given = {"weights": made, "scales": torch.ones(5, 2)}
    if zero_points is not None:
        given["zero_points"] = zero_points
    assert torch.equal(decoded(MatMulNBits(bits, 64), given, 128), codes - zero)


def test_integers_of_more_bits_are_not_packed():
    assert packed(numbers(5, 128, high=300).float(), torch.zeros(5, 2)) is None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *(("int8", torch.float32), ("int8 in groups", torch.bfloat16)),
        *(("int4 in groups", torch.float32), ("dynamic int8 and int4", torch.bfloat16)),
    ],
)
def test_configurations_of_torchao(config, dtype):
    pytest.importorskip("torchao")
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    four = {"weight_dtype": torch.int4}
    configs = {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int8 in groups": lambda: Int8WeightOnlyConfig(granularity=PerGroup(64)),
        "int4 in groups": lambda: IntxWeightOnlyConfig(**four, granularity=PerGroup(64)),
        "dynamic int8 and int4": lambda: Int8DynamicActivationIntxWeightConfig(**four, weight_granularity=PerGroup(64)),
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256)).eval().to(dtype)
    quantize_(model, configs[config]())
    x = torch.randn(3, 256, dtype=dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(x)
        net = fp.compile(model, (x,), **OPTIONS)
        compiled = torch.compile(model, backend="fmtprop", options=OPTIONS)(x)
    results = net(x), compiled
    assert ops(net).count("matmul_nbits") == 2
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
    for result in results:
        assert result.dtype is dtype and (result - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(*results)


@pytest.mark.parametrize(("kind", "symmetric"), [("INT4", True), ("UINT4", False), ("INT8", True), ("UINT8", False)])
@pytest.mark.parametrize("block", [32, 128, 0])
def test_blocks_of_onnx(tmp_path, block, kind, symmetric):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    element, bits = getattr(TensorProto, kind), 4 if "4" in kind else 8
    low, high = (0, 2**bits) if kind.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    rng = np.random.default_rng(0)
    codes = rng.integers(low, high, (DEPTH, OUTPUTS)).astype(np.int16)
    shape = (DEPTH // block, OUTPUTS) if block else (OUTPUTS,)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    zeros = np.full(shape, 0) if symmetric else rng.integers(low, high, shape)
    kept = [numpy_helper.from_array(scales, "scales")]
    kept += [
        helper.make_tensor(name, element, one.shape, one.flatten().tolist())
        for name, one in (("codes", codes), ("zeros", zeros))
    ]
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scales", "zeros"], ["w"], **attributes),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, d]) for n, d in (("x", DEPTH), ("y", OUTPUTS))]
    graph = helper.make_graph(nodes, "blocks", info[:1], info[1:], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = torch.randn(2, DEPTH)
    onnx.save(model, tmp_path / "blocks.onnx")
    net = fp.compile(tmp_path / "blocks.onnx", **OPTIONS)
    y = net(x).numpy()
    wide = [np.repeat(one, block, 0) if block else one[None] for one in (scales, zeros)]
    expected = x.numpy().astype(np.float64) @ ((codes - wide[1]) * wide[0].astype(np.float64))
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
    assert ops(net) == ["matmul_nbits"]


def test_products_with_one_matrix_share_its_codes():
    class Twice(nn.Module):
        """As the steps of a recurrent layer."""

        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Buffer(numbers(DEPTH, DEPTH, low=-100, high=100).to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            matrix = self.codes.float() * 0.01
            return torch.tanh(x @ matrix) @ matrix

    module, x = Twice().eval(), torch.randn(1, DEPTH)
    net = fp.compile(module, (x,), **OPTIONS)
    products = [node for node in net.compilation.normal.nodes() if node.op == "matmul_nbits"]
    assert len(products) == 2
    assert len({net.compilation.normal.inputs(node.name)["weights"] for node in products}) == 1
    torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-4)
