"""Kernel of LSTM layers whose state is rounded to bytes: as the op says, on each instruction set."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.op import opdef
from fmtprop.jit import LstmBytesKernel
from fmtprop.jit.isa import Isa
from fmtprop.ops import LstmBytes
from tests.jit.work import statuses

#: steps, sequences, states: one of each, groups of sequences and a rest, several blocks of states
SIZES = [(1, 1, 16), (7, 1, 64), (3, 2, 32), (2, 4, 48), (2, 7, 16), (2, 8, 16), (2, 9, 80)]


def operands(times: int, rows: int, states: int, *, least: int = -127) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(times + 10 * rows + states)
    weights = torch.randint(least, 128, (4 * states, states), generator=drawn, dtype=torch.int8)
    return {
        "src": 2 * torch.randn(times, rows, 4 * states, generator=drawn),
        "src_h": torch.randn(rows, states, generator=drawn).tanh(),
        "src_c": torch.randn(rows, states, generator=drawn),
        "weights": weights,
        "scales": torch.rand(4 * states, generator=drawn) / 127 / states**0.5,
        "sums": weights.to(torch.int32).sum(1, dtype=torch.int32),
    }


def run(given: dict[str, torch.Tensor], *, reverse: bool, wide: bool = False) -> tuple[torch.Tensor, ...]:
    times, rows, states = given["src"].shape[0], *given["src_h"].shape
    src, dst = given["src"], torch.full((times, rows, states), 77.0)
    if wide:  # between other rows
        src = torch.cat([src, torch.full_like(src, torch.nan)], 1)[:, :rows]
        dst = torch.full((times, 3 * rows, states), 77.0)[:, rows : 2 * rows]
    symmetric = bool((given["weights"] > -128).all())
    kernel = LstmBytesKernel(times, rows, states, reverse, src.stride()[:2], dst.stride()[:2], symmetric)
    assert kernel.is_offered
    blocked = given["weights"].view(states // 4, 16, states // 4, 4).transpose(1, 2).contiguous()
    results = {"dst": dst, "dst_h": torch.full((rows, states), 77.0), "dst_c": torch.full((rows, states), 77.0)}
    work = kernel.work(2)
    for name, tensor in {**given, "src": src, "weights": blocked, **results}.items():
        work.point[name](tensor.data_ptr())
    for _ in range(2):  # the second run begins anew
        assert statuses(work) == [0]
    return tuple(results.values())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("least", [-128, -127])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layers_are_as_the_op_says(isa: Isa, sizes: tuple[int, int, int], least: int, reverse: bool) -> None:
    given = operands(*sizes, least=least)
    wanted = opdef("lstm_bytes").reference(LstmBytes(reverse), given)
    for got, want in zip(run(given, reverse=reverse, wide=sizes[0] == 3), wanted, strict=True):
        # functions differ in the last digit, and one of a thousand states is rounded the other way
        assert (got - want).abs().max() < 1e-2
        assert (got - want).abs().median() < 1e-6


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("state", [-1.0, 1.0])
def test_products_do_not_saturate(isa: Isa, state: float, weight: int) -> None:
    given = operands(1, 1, 64)
    given["src_h"][:] = state
    given["src_h"][0, ::7] = -state / 2
    given["weights"][:] = weight
    given["sums"][:] = weight * 64
    wanted = opdef("lstm_bytes").reference(LstmBytes(), given)
    for got, want in zip(run(given, reverse=False), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["src", "src_h", "src_c"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_spread_as_in_pytorch(isa: Isa, value: float, kind: str) -> None:
    given = operands(3, 2, 16)
    given[kind].view(-1)[5] = value
    wanted = opdef("lstm_bytes").reference(LstmBytes(), given)
    for got, want in zip(run(given, reverse=False), wanted, strict=True):
        assert torch.equal(got.isnan(), want.isnan())


def test_states_of_zero_have_no_scale(isa: Isa) -> None:
    given = operands(4, 2, 32)
    given["src_h"].zero_()
    given["src"].zero_()
    given["src_c"].zero_()
    assert not any(result.any() for result in run(given, reverse=False))


@pytest.mark.parametrize("states", [8, 24, 17])
def test_states_that_fill_no_block_have_no_kernel(states: int) -> None:
    assert not LstmBytesKernel(2, 1, states, False, (4 * states,) * 2, (states,) * 2, True).is_offered
