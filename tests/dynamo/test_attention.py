"""Attention of other than four axes is one operator of the captured graph, with PyTorch's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from tests.dynamo.test_backend import compiled


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        ((2, 9, 4, 16), (4, 9, 9)),
        ((6, 9, 16), None),
        ((6, 9, 16), (6, 9, 9)),
        ((2, 3, 9, 4, 16), None),  # heads are innermost in memory
        ((2, 3, 9, 4, 16), (4, 9, 9)),
        ((2, 3, 9, 4, 16), (2, 1, 1, 1, 9)),
        ((2, 3, 2, 5, 4, 8), (3, 1, 1, 5, 5)),
    ],
)
def test_attention_of_other_axes_is_one_operator(
    sizes: tuple[int, ...], mask: tuple[int, ...] | None, boolean: bool
) -> None:
    torch.manual_seed(0)
    given = [torch.randn(sizes) for _ in range(3)]
    given = [one.transpose(-2, -3) if one.ndim > 3 else one for one in given]
    masks = []
    if mask is not None:
        masks.append(torch.randn(mask) > -0.5 if boolean else torch.randn(mask))
        masks[0].flatten()[: mask[-1]] = False if boolean else -torch.inf  # a query without visible keys
    model, regions = compiled(lambda *args: attend(*args[:3], *args[3:], is_causal=boolean and not masks))
    with torch.no_grad():
        got, expected = model(*given, *masks), attend(*given, *masks, is_causal=boolean and not masks)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()  # or the caller's next view would fail
    calls = [str(node.target) for node in regions[0].module.graph.nodes]
    assert any("flash_attention" in call for call in calls) and not any("softmax" in call for call in calls)


@pytest.mark.parametrize("masked", [False, True])
def test_values_may_be_narrower_than_keys(masked: bool) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 9, width) for width in (24, 24, 16)]
    if masked:
        given.append(torch.randn(4, 9, 9))
    model, regions = compiled(lambda *args: attend(*args, scale=0.3))
    with torch.no_grad():
        got, expected = model(*given), attend(*given, scale=0.3)
    torch.testing.assert_close(got, expected)
    assert got.stride() == expected.stride()
    assert not any("softmax" in str(node.target) for node in regions[0].module.graph.nodes)


def test_gradients_of_attention_of_other_axes() -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 9, 4, 16).transpose(-2, -3).requires_grad_() for _ in range(3)]
    model, _ = compiled(lambda *args: attend(*args))

    def gradients(function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*given).square().sum(), given)

    for got, expected in zip(gradients(model), gradients(attend), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sizes", [(6, 9, 16), (2, 3, 4, 9, 16), (2, 4, 9, 16)])
def test_the_model_may_view_the_result(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(sizes).transpose(-2, -3).contiguous().transpose(-2, -3) for _ in range(3))
    if len(sizes) == 4:
        value = value[..., :8]
    expected = attend(query, key, value)
    if not expected.is_contiguous():
        pytest.skip("this PyTorch gives the result in its query's order, of which no model can have this view")
    model, _ = compiled(lambda *args: attend(*args).view(-1))
    torch.testing.assert_close(model(query, key, value), expected.view(-1))
