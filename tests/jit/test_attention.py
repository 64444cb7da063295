"""The kernel of attention: right for all sizes, strides, masks and numbers of threads, and for special values."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmtprop.jit import no_tiles, offered, unavailable
from fmtprop.jit.attention import AttentionKernel, Tensor, lanes_for
from fmtprop.jit.attention_tiles import AttentionTilesKernel
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType
from tests.threads import torch_threads

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SCALE = 0.3

HALF = pytest.mark.skipif(not takes(DataType.BF16), reason="this CPU has no bf16")

TILES = pytest.param(AttentionTilesKernel, marks=pytest.mark.skipif(bool(no_tiles()), reason=no_tiles()), id="tiles")

#: the kernels for bf16
NARROW = pytest.mark.parametrize("kind", [pytest.param(AttentionKernel, marks=HALF, id="vectors"), TILES])


def blocked(mask: torch.Tensor, lanes: int) -> torch.Tensor:
    """Return a mask in vectors of queries, one for each key; what is missing of the last vectors is not a number."""
    *batch, queries, keys = mask.shape
    missing = -queries % lanes
    padded = torch.nn.functional.pad(mask, (0, 0, 0, missing), value=nan)
    return padded.reshape(*batch, -1, lanes, keys).transpose(-1, -2).contiguous()


def described(tensor: torch.Tensor, row: int) -> Tensor:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    steps = [0 if size == 1 else tensor.element_size() * step for size, step in sizes]
    return Tensor(tuple(steps[:2]), row)


def run(
    src, key, value, masks=(), limit=None, threads=2, lowest=-inf, kind=AttentionKernel, scale=SCALE
) -> torch.Tensor:
    """Return the result; src, key and value are [B, H, rows, numbers] of any strides and of one data type."""
    (batch, heads, queries, depth), (keys, width) = src.shape, value.shape[2:]
    dtype, size = DataType.BF16 if src.dtype is torch.bfloat16 else DataType.F32, src.element_size()
    whole = torch.full((batch, queries, heads + 2, width), 7.0, dtype=src.dtype)
    dst = whole[:, :, 1:-1].permute(0, 2, 1, 3)
    descs, data = [], {}
    for number, mask in enumerate(masks):
        mask, is_row = mask.to(src.dtype), mask.shape[-2] == 1
        if kind is AttentionTilesKernel:
            row = 0 if is_row else size * mask.stride(2)
        else:
            row = size if is_row else 0
            mask = mask if is_row else blocked(mask, lanes_for(width, dtype))
        data[f"mask_{number}"] = mask
        descs.append(described(mask, row))
    rows = {name: described(t, size * t.stride(2)) for name, t in {"src": src, "key": key, "value": value}.items()}
    kernel = offered(
        kind(
            *((batch, heads), queries, keys, depth, width, scale, limit, lowest),
            **rows, dst=described(dst, size * dst.stride(2)), masks=tuple(descs), dtype=dtype,
        )
    )  # fmt: skip
    assert kernel is not None
    work = kernel.work(threads)
    for name, tensor in {"src": src, "key": key, "value": value, "dst": dst, **data}.items():
        work.point[name](tensor.data_ptr())
    with torch_threads(threads):
        work.run()
    assert (whole[:, :, 0] == 7.0).all() and (whole[:, :, -1] == 7.0).all()
    return dst


def expected(src, key, value, masks=(), limit=None, scale=SCALE) -> torch.Tensor:
    scores = src.double() @ key.double().transpose(-1, -2) * scale
    for mask in masks:
        scores = scores + mask.to(src.dtype).double()
    if limit is not None:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(limit), -inf)
    return (scores.softmax(-1) @ value.double()).to(src.dtype)


def heads(batch: int, heads_: int, rows: int, numbers: int) -> torch.Tensor:
    """Return rows as a linear layer gives them: the heads side by side."""
    return torch.randn(batch, rows, heads_, numbers).permute(0, 2, 1, 3)


SIZES = st.tuples(*(st.integers(1, most) for most in (2, 3)), st.integers(4, 80), st.integers(1, 70))


@settings(max_examples=60)
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


@HALF
@settings(max_examples=60)
@given(
    sizes=SIZES,
    depth=st.integers(1, 40).map(lambda half: 2 * half),
    width=st.integers(16, 80),
    masks=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=2),
    limit=st.none() | st.integers(0, 5),
    threads=st.integers(1, 3),
)
def test_every_size_in_bf16(sizes, depth, width, masks, limit, threads) -> None:
    batch, count, queries, keys = sizes
    shapes = [(batch if b else 1, count if h else 1, queries if m else 1, keys) for b, h, m in masks]
    tensors = (heads(batch, count, *size) for size in ((queries, depth), (keys, depth), (keys, width)))
    q, k, v = (tensor.bfloat16() for tensor in tensors)
    added = [torch.randn(shape) for shape in shapes]
    # weights are rounded to bf16, as a product of bf16 has them
    torch.testing.assert_close(
        run(q, k, v, added, limit, threads), expected(q, k, v, added, limit), rtol=1.6e-2, atol=1e-2
    )


@pytest.mark.skipif(bool(no_tiles()), reason=no_tiles())
@settings(max_examples=80)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 100, 100))),
    depth=st.integers(1, 140),
    width=st.integers(1, 140),
    masks=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=2),
    limit=st.none() | st.integers(0, 40),
    scale=st.sampled_from([SCALE, 2.0, -0.5, 0.0]),
    threads=st.integers(1, 3),
)
def test_every_size_by_tiles(sizes, depth, width, masks, limit, scale, threads) -> None:
    batch, count, queries, keys = sizes
    shapes = [(batch if b else 1, count if h else 1, queries if m else 1, keys) for b, h, m in masks]
    tensors = (heads(batch, count, *size) for size in ((queries, depth), (keys, depth), (keys, width)))
    q, k, v = (tensor.bfloat16() for tensor in tensors)
    added = [torch.randn(shape) for shape in shapes]
    result = run(q, k, v, added, limit, threads, kind=AttentionTilesKernel, scale=scale)
    torch.testing.assert_close(result, expected(q, k, v, added, limit, scale), rtol=1.6e-2, atol=2e-2)


@pytest.mark.skipif(bool(no_tiles()), reason=no_tiles())
def test_tiles_are_configured_after_those_of_another_kernel():
    q, k, v = heads(1, 2, 40, 64).bfloat16(), heads(1, 2, 50, 64).bfloat16(), heads(1, 2, 50, 64).bfloat16()
    linear = torch.nn.Linear(96, 17).bfloat16()  # PyTorch's oneDNN leaves its configuration
    for _ in range(3):
        linear(torch.randn(33, 96).bfloat16())
        torch.testing.assert_close(run(q, k, v, kind=AttentionTilesKernel), expected(q, k, v), rtol=1.6e-2, atol=1e-2)


@pytest.mark.skipif(bool(no_tiles()), reason=no_tiles())
def test_denormal_weights_are_nothing_by_tiles_and_the_callers_mode_stays():
    q, k, v = (heads(1, 1, rows, 32).bfloat16() for rows in (33, 40, 40))
    mask = torch.zeros(1, 1, 33, 40)
    mask[..., 1::2] = -95.0
    v[:, :, 1::2] = 1e38
    result = run(q, k, v, [mask], threads=1, kind=AttentionTilesKernel)
    assert torch.allclose(result, expected(q, k[:, :, ::2], v[:, :, ::2]), rtol=1.6e-2, atol=1e-2)
    assert torch.tensor(1e-39) * 1.0 > 0


@NARROW
def test_heads_that_share_keys_and_values_in_bf16(kind):
    q, k, v = heads(2, 4, 40, 16).bfloat16(), heads(2, 1, 33, 16).bfloat16(), heads(2, 1, 33, 24).bfloat16()
    k, v = k.expand(2, 4, 33, 16), v.expand(2, 4, 33, 24)
    torch.testing.assert_close(run(q, k, v, kind=kind), expected(q, k, v), rtol=1.6e-2, atol=1e-2)


@NARROW
def test_special_values_spread_as_in_pytorch_in_bf16(kind):
    q, k, v = (heads(1, 1, rows, 16).bfloat16() for rows in (40, 51, 51))
    q[0, 0, 3, 5], q[0, 0, 35, 0] = nan, inf
    mask = torch.zeros(1, 1, 40, 51)
    mask[..., 7, :], mask[..., 8, 20:] = -inf, -inf
    result = run(q, k, v, [mask], kind=kind)
    assert torch.equal(result.isnan(), expected(q, k, v, [mask]).isnan())
    assert torch.equal(run(q, k, v, kind=kind).isnan(), expected(q, k, v).isnan())
    lowest = torch.finfo(torch.float32).min
    bounded = run(q[:, :, 4:30], k, v, [mask[:, :, 4:30]], lowest=lowest, kind=kind)
    assert torch.allclose(bounded[0, 0, 3].float(), v[0, 0].float().mean(0), atol=1e-2)


@NARROW
@pytest.mark.parametrize("lowest", [-inf, torch.finfo(torch.bfloat16).min])
def test_forbidden_keys_have_no_weight_in_bf16(kind, lowest):
    q, k, v = heads(1, 2, 40, 16).bfloat16(), heads(1, 2, 50, 16).bfloat16(), heads(1, 2, 50, 16).bfloat16()
    mask = torch.zeros(1, 1, 1, 50)
    mask[..., 30:] = lowest
    v[:, :, 30:] = 1e30
    result = run(q, k, v, [mask], kind=kind)
    torch.testing.assert_close(result, expected(q, k[:, :, :30], v[:, :, :30]), rtol=1.6e-2, atol=1e-2)
    mask[...] = torch.finfo(torch.bfloat16).min
    v[...] = v.clamp(-1, 1)
    average = v.float().mean(2, keepdim=True).expand(1, 2, 40, 16)
    torch.testing.assert_close(run(q, k, v, [mask], kind=kind).float(), average, rtol=1.6e-2, atol=1e-2)


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
    assert offered(kernel) is None


@HALF
@pytest.mark.parametrize("changes", [{"depth": 15}, {"width": 15}])
def test_no_bf16_kernel_for_some_sizes(changes):
    tensor = Tensor((0, 0), 64)
    sizes = {"queries": 16, "keys": 16, "depth": 16, "width": 16, **changes}
    where = dict.fromkeys(("src", "key", "value", "dst"), tensor)
    kernel = AttentionKernel((1, 1), scale=1.0, limit=None, lowest=-inf, **where, **sizes)
    assert offered(kernel) is not None
    assert offered(replace(kernel, dtype=DataType.BF16)) is None


@pytest.mark.parametrize("changes", [{"keys": 4096}, {"depth": 513}, {"keys": 0}, {"dtype": DataType.F32}])
def test_no_kernel_by_tiles_for_some_sizes(changes):
    where = dict.fromkeys(("src", "key", "value", "dst"), Tensor((0, 0), 64))
    sizes = {"queries": 16, "keys": 16, "depth": 16, "width": 16, "dtype": DataType.BF16}
    kernel = AttentionTilesKernel((1, 1), scale=1.0, limit=None, lowest=-inf, **where, **sizes)
    assert (offered(kernel) is not None) == (not no_tiles())
    assert offered(replace(kernel, **changes)) is None
