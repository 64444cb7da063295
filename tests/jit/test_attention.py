"""The kernel of attention: right for all sizes, strides, masks and numbers of threads, and for special values."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import unavailable
from fmtprop.jit.attention import AttentionKernel, Tensor, attention_kernel_for, lanes_for
from fmtprop.layout import DataType
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SCALE = 0.3


def blocked(mask: torch.Tensor, lanes: int) -> torch.Tensor:
    """Return a mask in vectors of queries, one for each key; what is missing of the last vectors is not a number."""
    *batch, queries, keys = mask.shape
    missing = -queries % lanes
    padded = torch.nn.functional.pad(mask, (0, 0, 0, missing), value=nan)
    return padded.reshape(*batch, -1, lanes, keys).transpose(-1, -2).contiguous()


def described(tensor: torch.Tensor, row: int) -> Tensor:
    steps = [0 if size == 1 else 4 * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return Tensor(tuple(steps[:2]), row)


def run(src, key, value, masks=(), limit=None, threads=2, lowest=-inf) -> torch.Tensor:
    """Return the result; src, key and value are [B, H, rows, numbers] of any strides."""
    (batch, heads, queries, depth), (keys, width) = src.shape, value.shape[2:]
    whole = torch.full((batch, queries, heads + 2, width), 7.0)
    dst = whole[:, :, 1:-1].permute(0, 2, 1, 3)
    descs, data = [], {}
    for number, mask in enumerate(masks):
        data[f"mask_{number}"] = mask if mask.shape[-2] == 1 else blocked(mask, lanes_for(width))
        descs.append(described(data[f"mask_{number}"], 4 if mask.shape[-2] == 1 else 0))
    rows = {name: described(t, 4 * t.stride(2)) for name, t in {"src": src, "key": key, "value": value}.items()}
    kernel = attention_kernel_for(
        AttentionKernel(
            *((batch, heads), queries, keys, depth, width, SCALE, limit, lowest),
            **rows, dst=described(dst, 4 * dst.stride(2)), masks=tuple(descs),
        ),
        DataType.F32,
    )  # fmt: skip
    assert kernel is not None
    work = kernel.work(threads)
    for name, tensor in {"src": src, "key": key, "value": value, "dst": dst, **data}.items():
        work.point[name](tensor.data_ptr())
    with torch_threads(threads):
        work.run()
    assert (whole[:, :, 0] == 7.0).all() and (whole[:, :, -1] == 7.0).all()
    return dst


def expected(src, key, value, masks=(), limit=None) -> torch.Tensor:
    scores = src.double() @ key.double().transpose(-1, -2) * SCALE
    for mask in masks:
        scores = scores + mask.double()
    if limit is not None:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(limit), -inf)
    return (scores.softmax(-1) @ value.double()).float()


def heads(batch: int, heads_: int, rows: int, numbers: int) -> torch.Tensor:
    """Return rows as a linear layer gives them: the heads side by side."""
    return torch.randn(batch, rows, heads_, numbers).permute(0, 2, 1, 3)


SIZES = st.tuples(*(st.integers(1, most) for most in (2, 3)), st.integers(4, 80), st.integers(1, 70))


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    depth=st.integers(1, 40),
    width=st.integers(8, 80),
    masks=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=2),
    limit=st.none() | st.integers(0, 5),
    threads=st.integers(1, 3),
)
def check(sizes, depth, width, masks, limit, threads) -> None:
    batch, count, queries, keys = sizes
    q, k, v = heads(batch, count, queries, depth), heads(batch, count, keys, depth), heads(batch, count, keys, width)
    shapes = [(batch if b else 1, count if h else 1, queries if m else 1, keys) for b, h, m in masks]
    added = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(
        run(q, k, v, added, limit, threads), expected(q, k, v, added, limit), rtol=2e-5, atol=1e-5
    )


def test_every_size(isa):
    check()


@pytest.mark.parametrize("lowest", [-inf, torch.finfo(torch.float32).min])
def test_forbidden_keys_have_no_weight(isa, lowest):
    q, k, v = heads(1, 2, 40, 16), heads(1, 2, 50, 16), heads(1, 2, 50, 16)
    mask = torch.zeros(1, 1, 1, 50)
    mask[..., 30:] = lowest
    v[:, :, 30:] = 1e30
    assert torch.allclose(run(q, k, v, [mask]), expected(q, k[:, :, :30], v[:, :, :30]), atol=1e-5)


def test_special_values_spread_as_in_pytorch(isa):
    q, k, v = heads(1, 1, 40, 16), heads(1, 1, 50, 16), heads(1, 1, 50, 16)
    q[0, 0, 3, 5], q[0, 0, 35, 0] = nan, inf
    mask = torch.zeros(1, 1, 40, 50)
    mask[..., 7, :] = -inf
    result = run(q, k, v, [mask])
    assert torch.equal(result.isnan(), expected(q, k, v, [mask]).isnan())
    assert result.isnan().any(-1).nonzero()[:, -1].tolist() == [3, 7, 35]


def test_a_query_that_may_look_at_nothing_gets_an_average_where_scores_have_a_bound(isa):
    q, k, v = heads(1, 1, 40, 16), heads(1, 1, 50, 16), heads(1, 1, 50, 16)
    mask = torch.zeros(1, 1, 40, 50)
    mask[..., 7, :], mask[..., 8, 20:] = -inf, -inf
    lowest = torch.finfo(torch.float32).min
    bounded = [mask.clamp_min(lowest)]
    torch.testing.assert_close(run(q, k, v, [mask], lowest=lowest), expected(q, k, v, bounded), rtol=1e-4, atol=1e-5)


def test_scores_far_apart_are_no_trouble(isa):
    torch.manual_seed(0)
    q, k, v = (scale * heads(1, 1, rows, 16).round() for scale, rows in ((16, 20), (16, 30), (1, 30)))
    torch.testing.assert_close(run(q, k, v), expected(q, k, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"queries": 1}, {"width": 7}, {"keys": 1 << 16}, {"depth": 513}, {"masks": (Tensor((0, 0), 4),) * 3}]
)
def test_no_kernel_for_some_sizes(changes):
    tensor = Tensor((0, 0), 64)
    sizes = {"queries": 16, "keys": 16, "depth": 16, "width": 16, **changes}
    kernel = AttentionKernel(
        (1, 1), scale=1.0, limit=None, lowest=-inf, src=tensor, key=tensor, value=tensor, dst=tensor, **sizes
    )
    assert attention_kernel_for(kernel, DataType.F32) is None
