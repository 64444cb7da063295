"""Modules of transformers that PyTorch runs by one call a layer: plans have what such a call computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp

OPTIONS = {"deterministic": True}
ROWS, WIDTH, HEADS = 9, 64, 4

PADDING = torch.arange(ROWS)[None] >= torch.tensor([[ROWS], [5]])
CAUSAL = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "a batch without keys": {"src_key_padding_mask": PADDING | torch.tensor([[False], [True]])},
    "causal": {"src_mask": CAUSAL},
    "a row without keys": {"src_mask": CAUSAL | (torch.arange(ROWS) == 3)[:, None]},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    "of -inf": {"src_mask": nn.Transformer.generate_square_subsequent_mask(ROWS), "is_causal": True},
}


def ways(module: nn.Module, *args: torch.Tensor, **kwargs: object) -> tuple[object, object, fp.Explanation]:
    """Return results of the plan and of eager PyTorch, and who runs which call."""
    with torch.no_grad():
        expected = module(*args, **kwargs)
        made = torch.compile(module, backend="fmtprop", options=OPTIONS)(*args, **kwargs)
        torch._dynamo.reset()
        return made, expected, fp.explain(module, *args, **kwargs, options=OPTIONS)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
def test_a_layer_is_its_operators(norm_first: bool, activation: str, mask: str) -> None:
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, norm_first=norm_first, activation=activation, batch_first=True
    )
    made, expected, explained = ways(layer.eval(), torch.randn(2, ROWS, WIDTH), **MASKS[mask])
    torch.testing.assert_close(made, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert any("matmul" in one or "inner_product" in one for one in operators(explained))
    assert not any("_transformer_encoder_layer_fwd" in one for one in operators(explained))


def operators(explained: fp.Explanation) -> list[str]:
    return [line.strip() for line in str(explained).splitlines()[2:]]


@pytest.mark.parametrize("how", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_heads_are_their_operators(how: dict[str, bool]) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self.heads(x, x, x, **how)

    made, expected, explained = ways(Attention().eval(), torch.randn(2, ROWS, WIDTH))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    assert not any("aten" in one for one in operators(explained))
