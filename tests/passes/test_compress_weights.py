"""Weights as codes: which products have them, that results are those of the decoded weights, and the memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import UnsupportedOpError
from fmtprop.ir import Graph, TensorType
from fmtprop.ir.op import op_of
from fmtprop.layout import DataType
from fmtprop.ops import GroupedNBits, emit
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS, CompressWeights
from fmtprop.passes.precision.decode_weights import DecodeWeights
from fmtprop.targets import OneDnnTarget

OPTIONS = {"tune": "model", "confirm": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.small = nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return self.small(y)


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def with_decoded_weights(module: nn.Module, bits: int) -> nn.Module:
    module = copy.deepcopy(module)
    for layer in (module.up, module.down):
        codes, scales = encoded(layer.weight, bits, 128)
        given = {"weights": codes.contiguous(), "scales": scales}
        layer.weight.data = decoded(MatMulNBits(bits, 128), given, layer.in_features)
    return module


def ops(net) -> list[str]:
    return [step.node.op for step in net.plan.steps]


@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize(
    ("policy", "dims"),
    [("optimal", (1, 128)), ("propagate", (1, 7, 128)), ("naive", (2, 40, 128)), ("plain", (64, 128))],
)
def test_results_are_those_of_the_decoded_weights(policy, dims, weights):
    module, x = block(), torch.randn(dims)
    net = fp.compile(module, (x,), weights=weights, policy=policy, **OPTIONS)
    with torch.no_grad():
        expected = with_decoded_weights(module, BITS[weights])(x)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
    many = x[..., 0].numel() > 16
    assert ops(net).count("decode_nbits") == 2 * many and ops(net).count("matmul_nbits") == 2 * (not many)


@pytest.mark.skipif("avx512" not in str(dnnl.lib().isa), reason="needs AVX-512")
@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_a_matrix_is_decoded_in_the_blocks_that_its_product_reads(policy):
    """No step puts them in order."""
    layer, x = nn.Linear(512, 1024, bias=False).eval(), torch.randn(64, 512)
    net = fp.compile(layer, x, weights="int4", policy=policy, deterministic=True)
    assert ops(net) == ["decode_nbits", "matmul"]
    assert net.plan.steps[0].node.descs[0].inner_blocks


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_a_narrow_type_has_codes(dtype, rows):
    module, x = block().to(dtype), torch.randn(rows, 128).to(dtype)
    expected = with_decoded_weights(block().to(dtype).float(), 4)(x.float())
    net = fp.compile(module, (x,), weights="int4", **OPTIONS)
    assert ops(net).count("decode_nbits" if rows > 16 else "matmul_nbits") == 2
    result = net(x)
    assert result.dtype is dtype and (result - expected).abs().max() <= 0.03 * expected.abs().max()


@pytest.mark.parametrize("attrs", [MatMulNBits(8, 64), GroupedNBits(8, 64)])
def test_products_of_f16_with_codes_are_computed_in_f32(attrs):
    """On CPUs that have f16, too, no kernel multiplies it with codes."""
    inputs = {"src": TensorType((6, 64), "f16"), "weights": TensorType((256, 64), "s8"), "scales": TensorType((256, 1))}
    if isinstance(attrs, GroupedNBits):
        inputs["ends"] = TensorType((2,), "s32")
    graph = Graph("product")
    values = {name: graph.input(name, type_) for name, type_ in inputs.items()}
    graph.output(emit(graph, op_of(attrs), values, attrs))
    lowered = DecodeWeights(OneDnnTarget()).run(graph)
    product = next(node for node in lowered.nodes() if node.op in ("matmul", "matmul_nbits", "grouped_matmul_nbits"))
    assert product.results[0].dtype is DataType.F32
    assert lowered.type_of(lowered.inputs(lowered.output_nodes[0].name)["src"]).dtype is DataType.F16


def test_small_and_infinite_matrices_stay():
    module = block()
    module.up.weight.data[3, 5] = torch.inf
    graph = CompressWeights(4).run(fp.from_torch(module, (torch.randn(1, 128),)))
    kept = [node.op for node in graph.nodes() if node.op in ("inner_product", "matmul", "matmul_nbits")]
    assert sorted(kept) == ["inner_product", "inner_product", "matmul_nbits"]


def test_a_product_of_images_has_codes():
    module = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4 * 4, 256)).eval()
    x = torch.randn(2, 8, 4, 4)
    net = fp.compile(module, x, weights="int8", **OPTIONS)
    given = dict(zip(("weights", "scales"), encoded(module[1].weight, 8, 128), strict=True))
    expected = nn.functional.linear(x.flatten(1), decoded(MatMulNBits(8, 128), given, 128), module[1].bias)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
    assert ops(net) == ["matmul_nbits"]


def test_a_residual_of_outputs_that_are_no_whole_vectors_is_added_once():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 100), nn.Linear(128, 100)

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            y = torch.exp(self.first(x))
            return torch.tanh(y + self.second(z))

    torch.manual_seed(0)
    module, x, z = Residual().eval(), torch.randn(1, 256), torch.randn(1, 128)
    net = fp.compile(module, (x, z), weights="int8", **OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(net(x, z), module(x, z), rtol=0.05, atol=0.05)


def test_codes_are_all_that_a_plan_keeps():
    layer, x = nn.Linear(1024, 1024, bias=False).eval(), torch.randn(1, 1024)
    packed = {
        name: sum(t.nbytes for t in fp.compile(layer, (x,), weights=name, **OPTIONS).plan.constants)
        for name in (None, "int8", "int4")
    }
    assert packed[None] >= 4 << 20
    assert packed["int8"] <= 1.04 * (1 << 20) and packed["int4"] <= 0.57 * (1 << 20)


def test_torch_compile_has_the_option():
    module, x = block(), torch.randn(1, 128)
    run = torch.compile(module, backend="fmtprop", options={"weights": "int4", **OPTIONS})
    with torch.no_grad():
        torch.testing.assert_close(run(x), with_decoded_weights(module, 4)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "int2"}, "The 'weights' parameter of compile must be one of None, 'int8', 'int4'. Got 'int2'"),
        ({"weights": "int8", "verify": "full"}, "verify='full' compares with the model's own weights"),
        ({"weights": "int8", "training": True}, "weights='int8' is for inference"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(UnsupportedOpError, match=message):
        fp.compile(block(), (torch.randn(1, 128),), **given)


@pytest.mark.skipif(not dnnl.lib().includes("avx512_core_bf16"), reason="kernels have no bf16 on this CPU")
def test_rows_of_a_plan_in_bf16_are_read_as_bf16():
    module, x = block(), torch.randn(1, 128)
    net = fp.compile(module, (x,), dtype="bf16", weights="int4", **OPTIONS)
    read = [step.node.choice.operands["src"].dtype for step in net.plan.steps if step.node.op == "matmul_nbits"]
    assert len(read) == 2 and DataType.BF16 in read  # a product whose result stays in f32 reads f32
    with torch.no_grad():
        expected = with_decoded_weights(module, 4)(x)
    assert (net(x) - expected).abs().max() <= 0.02 * expected.abs().max()
