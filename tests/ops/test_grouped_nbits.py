"""Experts in codes: by plans, and as a module keeps them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import PlanError, ShapeError
from fmtprop.ir.types import TensorType
from fmtprop.ops.grouped_nbits import GroupedNBits, infer
from fmtprop.ops.matmul_nbits import MatMulNBits, decoded, encoded
from fmtprop.passes.precision.compress_weights import BITS
from fmtprop.runtime.agreement import relative_error
from tests.ops.test_grouped_matmul import grouped_mm

OPTIONS = {"tune": "model", "confirm": False}


class Experts(torch.nn.Module):
    """Experts as transformers has them: matrices [experts, outputs, depth], or transposed ones."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.is_transposed = SimpleNamespace(_experts_implementation="grouped_mm"), is_transposed
        for name, outputs, depth in (("up_proj", 192, 128), ("down_proj", 128, 192)):
            dims = (4, depth, outputs) if is_transposed else (4, outputs, depth)
            setattr(self, name, torch.nn.Parameter(torch.randn(dims) / depth**0.5))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        up, down = (one if self.is_transposed else one.transpose(1, 2) for one in (self.up_proj, self.down_proj))
        return grouped_mm(F.silu(grouped_mm(rows, up, ends)), down, ends)


def with_decoded(module: Experts, bits: int) -> Experts:
    module = copy.deepcopy(module).float()
    for weight in module.parameters():
        experts = weight.transpose(1, 2) if module.is_transposed else weight
        group = 128 if experts.shape[2] % 128 == 0 else 64
        codes, scales = encoded(experts.flatten(0, 1), bits, group)
        tensors = {"weights": codes, "scales": scales}
        numbers = decoded(MatMulNBits(bits, group), tensors, experts.shape[2]).view(experts.shape)
        weight.data = (numbers.transpose(1, 2) if module.is_transposed else numbers).contiguous()
    return module


#: rows, and where those of each expert end: one for each, all for one, few and many
ROWS = ((4, (1, 2, 3, 4)), (12, (0, 12, 12, 12)), (60, (3, 3, 40, 60)))


def numbers(rows: int, ends: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    return drawn.to(dtype), torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(("rows", "ends"), ROWS)
@pytest.mark.parametrize(
    ("weights", "dtype", "is_transposed"),
    [("int8", torch.float32, False), ("int4", torch.float32, True), ("int4", torch.bfloat16, False)],
)
def test_a_plan_multiplies_the_codes_of_experts(weights, dtype, is_transposed, rows, ends):
    module, given = Experts(is_transposed=is_transposed).eval().to(dtype), numbers(rows, ends, dtype)
    expected = with_decoded(module, BITS[weights])(given[0].float(), given[1])
    net = fp.compile(module, given, weights=weights, **OPTIONS)
    assert [step.node.op for step in net.plan.steps].count("grouped_matmul_nbits") == 2
    assert not [tensor for tensor in net.plan.constants if tensor.nbytes >= 4 * 128 * 192 * 2]
    assert relative_error(net(*given), expected) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_module_keeps_the_codes_of_its_experts(is_transposed):
    module, given = Experts(is_transposed=is_transposed).eval(), numbers(*ROWS[2], torch.float32)
    expected = with_decoded(module, 4)
    model = fp.optimize(copy.deepcopy(module), weights="int4", **OPTIONS)
    assert isinstance(model, Experts) and not list(model.parameters())
    assert [name for name, _ in model.named_buffers()] == [
        f"{name}_proj_{what}" for name in ("up", "down") for what in ("codes", "scales")
    ]
    assert torch.equal(model.up_proj, expected.up_proj) and torch.equal(model.down_proj, expected.down_proj)
    assert relative_error(model(*given), expected(*given)) < 1e-5
    net = fp.compile(Experts.forward.__get__(model), given, **OPTIONS)
    assert [step.node.op for step in net.plan.steps].count("grouped_matmul_nbits") == 2


def test_rows_behind_the_last_end_are_zeros():
    rows, ends = numbers(30, (1, 2, 23, 25), torch.float32)
    net = fp.compile(Experts().eval(), (rows, ends), weights="int8", **OPTIONS)
    whole = net(rows, torch.tensor((1, 2, 23, 30), dtype=torch.int32))
    assert not net(rows, ends)[25:].any() and relative_error(net(rows, ends)[:25], whole[:25]) < 1e-5


def test_experts_that_stay():
    module = Experts().eval()
    module.config._experts_implementation = "eager"
    fp.optimize(module, weights="int8", **OPTIONS)
    assert module.up_proj.shape == (4, 192, 128) and isinstance(module.up_proj, torch.nn.Parameter)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="the CPU has no instructions for bf16")
def test_rows_of_a_plan_in_bf16_are_read_as_bf16():
    module, given = Experts().eval(), numbers(*ROWS[0], torch.float32)
    net = fp.compile(module, given, dtype="bf16", weights="int4", **OPTIONS)
    read = [step.node.choice.operands["src"].dtype.value for step in net.plan.steps if "nbits" in step.node.op]
    assert read[0] == "bf16" and relative_error(net(*given), with_decoded(module, 4)(*given)) < 2e-2


@pytest.mark.parametrize("ends", [(2, 1, 4, 4), (0, 0, 0, 5), (-1, 2, 3, 4)])
def test_wrong_ends(ends):
    rows, right = numbers(*ROWS[0], torch.float32)
    net = fp.compile(Experts().eval(), (rows, right), weights="int4", **OPTIONS)
    with pytest.raises(PlanError, match="ends must not decrease, and there are 4 rows"):
        net(rows, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"src": TensorType((7, 2, 64))}, r"products of groups take rows: \(rows, K\)"),
        ({"src": TensorType((7, 65))}, "65 numbers in groups of 32 take 48"),
        ({"scales": TensorType((51, 3))}, "51 rows of 2 groups need as many f32 numbers"),
        ({"ends": TensorType((2,), "s64")}, "each group of 51 rows of codes has one, of s32 or s64"),
        ({"ends": TensorType((3,))}, "each group of 51 rows of codes has one, of s32 or s64"),
    ],
)
def test_wrong_types(changed, message):
    types = {"src": TensorType((7, 64)), "weights": TensorType((51, 32), "u8"), "scales": TensorType((51, 2))}
    with pytest.raises(ShapeError, match=message):
        infer(GroupedNBits(4, 32), {**types, "ends": TensorType((3,), "s64"), **changed})
