"""Random sums of products of bytes, by every implementation: exact, or no candidate.

Full-range integers, padding, zero points at the ends, odd channels. On a CPU without VNNI, whatever saturates is none.
Operands lie between forbidden pages.
"""

from __future__ import annotations

import random

import pytest

from fmtprop.ir.grid import Grid
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.ops import Conv, Deconv, Eltwise, FakeQuantize, InnerProduct, MatMul
from fmtprop.runtime.selfcheck import check_node
from tests.targets.nodes import node_of
from tests.targets.test_bytes import ways, weights_grid

pytestmark = pytest.mark.usefixtures("guarded")

SOURCES = [(0, 255), (-128, 127), (-117, 138), (-255, 0), (-1, 254)]
CHANNELS = [1, 2, 3, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64]
SPATIAL = {"row": 1, "image": 2, "image grouped": 2, "image depthwise": 2, "transposed": 2, "volume": 3}


def drawn(seed: int) -> tuple[Node, dict[str, TensorType]] | None:
    """Return a random node on bytes; None if its window is larger than its image."""
    pick = random.Random(seed)
    kind = pick.choice([*SPATIAL, "image", "inner product", "matmul"])
    channels, outputs, batch = pick.choice(CHANNELS), pick.choice(CHANNELS), pick.choice([1, 2, 5])
    axes: tuple[int, ...] = (0,)
    if kind == "inner product":
        rest = (pick.choice([1, 3]), pick.choice([1, 3]))
        op, attrs, dims, weights = "inner_product", InnerProduct(), (batch, channels, *rest), (outputs, channels, *rest)
    elif kind == "matmul":
        lead, depth = pick.choice([(), (2,), (2, 3)]), pick.choice([1, 3, 33, 64, 300])
        own = lead if pick.random() < 0.3 else ()
        op, attrs, dims, weights = "matmul", MatMul(), (*lead, pick.choice([1, 2, 33]), depth), (*own, depth, outputs)
        axes = () if own else (1,)
    else:
        made = windowed(pick, kind, batch, channels, outputs)
        if made is None:
            return None
        op, attrs, dims, weights = made
        axes = (0, 1) if len(weights) > len(dims) else (0,)
        outputs = weights[0] * weights[1] if len(weights) > len(dims) else weights[0]
    types = {"src": TensorType(dims), "weights": TensorType(weights)}
    if op in ("convolution", "inner_product"):
        types["bias"] = TensorType((outputs,))
    grid = Grid((10 ** pick.uniform(-1, 1.5),), *pick.choice(SOURCES))
    rounded = PostOp("fake_quantize", FakeQuantize(grid.scale, grid.low, grid.high))
    post_ops = pick.choice([(), (rounded,), (PostOp("eltwise", Eltwise("relu")), rounded)])
    grids = {"src": Grid((0.02,), *pick.choice(SOURCES)), "weights": weights_grid(weights, axes)}
    node = node_of(op, attrs, types, post_ops)
    return node.with_(grids={**grids, "dst": grid} if post_ops else grids), types


def windowed(pick: random.Random, kind: str, batch: int, channels: int, outputs: int) -> tuple | None:
    """Return op, attributes and sizes of a random convolution; None if its window is larger than its image."""
    ndim, groups = SPATIAL[kind], 1
    if kind == "image depthwise":
        groups = outputs = channels
    elif kind == "image grouped":
        groups = pick.choice([2, 4])
        channels, outputs = groups * pick.choice([3, 4, 8, 16]), groups * pick.choice([3, 4, 8, 16])
    kernel, stride = pick.choice([1, 2, 3, 5, 7] if ndim < 3 else [1, 3]), pick.choice([1, 1, 2, 3])
    dilate, pad = pick.choice([0, 0, 1]), pick.choice([0, kernel // 2, kernel - 1])
    size = pick.choice([7, 9, 14, 20])
    if size + 2 * pad < (kernel - 1) * (dilate + 1) + 1:
        return None
    dims, window = (batch, channels, *[size] * ndim), [kernel] * ndim
    if kind == "transposed":
        attrs = Deconv.make(2, strides=stride, pad_l=kernel // 2)
        return "deconvolution", attrs, dims, (outputs, channels, *window)
    each = (channels // groups, *window)
    weights = (outputs, *each) if groups == 1 else (groups, outputs // groups, *each)
    return "convolution", Conv.make(ndim, stride, dilate, pad_l=pad, groups=groups), dims, weights


def check(seeds: range) -> int:
    """Check all ways to run some random nodes, and return their number."""
    count = 0
    for seed in seeds:
        made = drawn(seed)
        for formatted in () if made is None else ways(*made):
            if not formatted.choice.impl.startswith("ref"):
                count += 1
                assert check_node(formatted) is None, f"seed {seed}: {formatted.choice} {formatted}"
    return count


def test_random_sums_of_bytes_are_exact() -> None:
    assert check(range(60)) > 10  # depthwise ones alone where the CPU has no VNNI


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 250))
def test_more_random_sums_of_bytes_are_exact(first: int) -> None:
    check(range(first, first + 250))
