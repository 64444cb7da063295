"""Attention of a step: in parts where that is faster, with gradients at least as exact as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fmtprop as fp
from fmtprop import dnnl

pytestmark = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")

FLASH = "_scaled_dot_product_flash_attention"


class Heads(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.projected, self.how = nn.Linear(32, 96), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.projected(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, **self.how).transpose(1, 2).flatten(2)


def is_whole(module: nn.Module, x: Tensor, dtype: str, autocast: bool) -> bool:
    """Return whether PyTorch's operator runs the attention of a planned step."""
    net = fp.compile(module, training=True, tune="model", dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        dst = net(x)
    dst.sum().backward()
    return any(FLASH in getattr(step.node.attrs, "target", "") for step in net.nets[0].plan.steps)


@pytest.mark.parametrize(
    ("dtype", "autocast", "length", "how", "expected"),
    [
        ("bf16", False, 24, {}, False),
        ("f32", True, 24, {}, False),
        ("bf16", False, 96, {}, True),  # more weights than queries, keys, values and results have numbers
        ("bf16", False, 24, {"is_causal": True}, True),
        ("f32", False, 24, {}, True),
    ],
)
def test_short_attention_in_bf16_runs_in_parts(
    dtype: str, autocast: bool, length: int, how: dict[str, bool], expected: bool
) -> None:
    torch.manual_seed(0)
    assert is_whole(Heads(**how), torch.randn(2, length, 32), dtype, autocast) is expected


def test_heads_of_pytorchs_module_run_in_parts() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    assert not is_whole(layer, torch.randn(2, 24, 32), "bf16", autocast=False)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_gradients_are_as_exact_as_under_autocast(factor: float) -> None:
    torch.manual_seed(0)
    module, x = Heads(), torch.randn(4, 24, 32)
    module.projected.weight.data *= factor
    tangent = torch.randn(4, 24, 32)

    def gradients(call: nn.Module, x: Tensor = x) -> list[Tensor]:
        dst = call(x)
        return [dst, *torch.autograd.grad(dst, list(module.parameters()), tangent.to(dst.dtype))]

    found = gradients(fp.compile(module, x, training=True, tune="model", dtype="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = gradients(module)
    exact = gradients(module.double(), x.double())
    for one, other, true in zip(found, theirs, exact, strict=True):
        ours, autocast = ((given.double() - true).norm() / true.norm() for given in (one, other))
        assert ours <= 1.5 * autocast, (float(ours), float(autocast))
