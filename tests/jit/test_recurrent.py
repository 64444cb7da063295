"""Kernel of layers of an LSTM or a GRU in f32, as PyTorch computes them."""

from __future__ import annotations

import pytest
import torch

from fmtprop.ir.op import opdef
from fmtprop.jit import RecurrentKernel
from fmtprop.jit.isa import Isa
from fmtprop.jit.recurrent import GATES, STEPS
from fmtprop.ops.recurrent import KINDS, Recurrent
from tests.jit.work import statuses

OPS = {"lstm": "lstm", "gru": "lbr_gru"}

#: steps, sequences, channels, states: one step, fewer than six, six and a rest of one or more, odd sizes; two and three
#: groups of sequences, which do not come out even
SIZES = [(1, 1, 8, 16), (5, 2, 7, 5), (6, 1, 16, 8), (7, 3, 3, 20), (14, 2, 33, 9), (13, 1, 1, 1), (1, 4, 5, 17)]
SIZES += [(3, 5, 9, 33), (8, 6, 6, 4), (7, 7, 5, 8), (2, 13, 4, 18)]


def operands(kind: str, sizes: tuple[int, int, int, int], directions: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(sum(sizes))
    types = KINDS[OPS[kind]].problem_types(*sizes, directions)
    return {name: torch.randn(type_.dims, generator=drawn) / 2 for name, type_ in types.items()}


def blocked(tensor: torch.Tensor, axis: int, isa: Isa) -> torch.Tensor:
    """Return a tensor as the kernel reads it: blocks of states come before the axes from `axis` on."""
    states = tensor.shape[-1]
    tensor = torch.nn.functional.pad(tensor, (0, -states % isa.lanes))
    return tensor.unflatten(-1, (-1, isa.lanes)).movedim(-2, axis).contiguous()


def groups(sequences: int, several: bool) -> int:
    """Return as few groups as there can be, or one more."""
    return min(sequences, -(-sequences // STEPS) + several)


def run(
    kind: str, given: dict[str, torch.Tensor], isa: Isa, *, wide: bool = False, threads: int = 2
) -> list[torch.Tensor]:
    src, states = given["src_layer"], given["weights_iter"].shape[-1]
    times, sequences, channels = src.shape
    directions = given["weights_iter"].shape[1]
    dst = torch.full((times, sequences, directions * states), 77.0)
    if wide:  # sequences first, between other numbers
        src = torch.cat([src.transpose(0, 1), torch.full_like(src.transpose(0, 1), torch.nan)], 2)[..., :channels]
        src = src.transpose(0, 1)
        dst = torch.full((sequences, times, directions * states + 3), 77.0)[..., : directions * states].transpose(0, 1)
    strides = src.stride()[:2], dst.stride()[:2]
    kernel = RecurrentKernel(kind, times, sequences, channels, states, directions, groups(sequences, wide), *strides)
    results = {"dst_layer": dst}
    results |= {f"dst_{name}": torch.full_like(given[f"src_{name}"], 77.0) for name in KINDS[OPS[kind]].states}
    weights = {name: blocked(given[name], 2, isa) for name in ("weights_layer", "weights_iter", "bias")}
    work = kernel.work(threads)
    for name, tensor in {**given, "src_layer": src, **weights, **results}.items():
        work.point[name](tensor.data_ptr())
    for _ in range(2):  # the second run begins anew
        assert statuses(work) == [0]
    return list(results.values())


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layers_are_pytorchs(kind: str, sizes: tuple[int, int, int, int], directions: int, isa: Isa) -> None:
    given = operands(kind, sizes, directions)
    wanted = opdef(OPS[kind]).reference(Recurrent(bidirectional=directions == 2), given)
    for wide in (False, True):
        for got, want in zip(run(kind, given, isa, wide=wide), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("name", ["src_layer", "src_iter"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_spread_as_in_pytorch(kind: str, name: str, value: float, isa: Isa) -> None:
    given = operands(kind, (3, 2, 5, 6), 2)
    given[name].view(-1)[5] = value
    wanted = opdef(OPS[kind]).reference(Recurrent(bidirectional=True), given)
    for got, want in zip(run(kind, given, isa), wanted, strict=True):
        assert torch.equal(got.isnan(), want.isnan())


def test_nan_is_not_kept_for_the_next_run(isa: Isa) -> None:
    given = operands("lstm", (3, 1, 5, 6), 1)
    kernel = RecurrentKernel("lstm", 3, 1, 5, 6, 1, 1, (5, 5), (6, 6))
    work = kernel.work(1)
    results = [torch.empty(3, 1, 6), torch.empty(1, 1, 1, 6), torch.empty(1, 1, 1, 6)]
    weights = {name: blocked(given[name], 2, isa) for name in ("weights_layer", "weights_iter", "bias")}
    named = dict(zip(("dst_layer", "dst_iter", "dst_iter_c"), results, strict=True))
    for name, tensor in {**given, **weights, **named}.items():
        work.point[name](tensor.data_ptr())
    right = given["src_layer"].clone()
    given["src_layer"].fill_(torch.nan)
    statuses(work)
    assert results[0].isnan().all()
    given["src_layer"].copy_(right)
    statuses(work)
    assert not any(result.isnan().any() for result in results)


def test_offers_layers_that_onednn_computes_slower() -> None:
    def is_offered(kind: str, sequences: int, states: int) -> bool:
        return RecurrentKernel(kind, 8, sequences, 16, states, 1, 1, (16, 16), (states, states)).is_offered

    assert is_offered("lstm", 6, 512) and is_offered("gru", 12, 256) and is_offered("lstm", 18, 128)
    assert not is_offered("lstm", 1, 513) and not is_offered("lstm", 7, 257) and not is_offered("gru", 19, 8)
