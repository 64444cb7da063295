"""Random products and convolutions, forward and backward, in every data type: each implementation is right.

The self-check of a plan takes sizes with equal tails for alike. Here every implementation runs in sizes of its own, so
a kernel that is wrong for some of them is found before a model has them. Operands lie between forbidden pages, so one
that reads or writes outside of them ends the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal

import pytest

from fmtprop.ir import opdef
from fmtprop.ir.node import Node, PostOp
from fmtprop.ir.types import TensorType
from fmtprop.layout import DataType
from fmtprop.ops import Eltwise, InnerProduct, MatMul
from fmtprop.ops.convolution_backward import ConvGradient
from fmtprop.passes.target import all_requests
from fmtprop.runtime import selfcheck
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import OneDnnTarget
from tests.targets.nodes import node_of
from tests.targets.test_random_bytes import SPATIAL, windowed

pytestmark = pytest.mark.usefixtures("guarded")

CHANNELS = [1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96]
ROWS = [1, 2, 3, 7, 16, 27, 33, 48, 64, 65]
POST_OPS = [(), (), (PostOp("eltwise", Eltwise("relu")),), (PostOp("eltwise", Eltwise("swish", 1.0)),)]


def drawn(seed: int) -> tuple[Node, dict[str, TensorType]] | None:
    """Return a random node and its operands; None if its window is larger than its image."""
    pick = random.Random(seed)
    kind, dtype = (
        pick.choice([*SPATIAL, "image", "image", "inner product", "matmul"]),
        pick.choice(["f32", "bf16", "f16"]),
    )
    channels, outputs = pick.choice(CHANNELS), pick.choice(CHANNELS)
    if kind == "inner product":
        rest = pick.choice([(), (1, 1), (3, 3), (2, 5), (7,)])
        op, attrs = "inner_product", InnerProduct()
        dims, weights = (pick.choice(ROWS), channels, *rest), (outputs, channels, *rest)
    elif kind == "matmul":
        lead, depth = pick.choice([(), (), (2,), (2, 3)]), pick.choice([1, 2, 3, 16, 31, 33, 64, 100, 257])
        own = lead if pick.random() < 0.4 else ()
        op, attrs, dims, weights = "matmul", MatMul(), (*lead, pick.randint(1, 70), depth), (*own, depth, outputs)
    else:
        made = windowed(pick, kind, pick.choice([1, 2, 3, 5]), channels, outputs)
        if made is None:
            return None
        op, attrs, dims, weights = made
    types = {"src": TensorType(dims, dtype), "weights": TensorType(weights, dtype)}
    way = pick.choice(["forward", "by source", "by weights"])
    if op == "convolution" and way != "forward":
        window = attrs.strides, attrs.dilates, attrs.pad_l, attrs.pad_r, attrs.groups
        (types["diff_dst"],) = opdef(op).infer(attrs, types)
        if way == "by source":
            gradient, op = ConvGradient(*window, types.pop("src").dims), "convolution_backward_data"
        else:
            gradient = ConvGradient(*window, types.pop("weights").dims, pick.random() < 0.5)
            op = "convolution_backward_weights"
        return node_of(op, gradient, types), types
    if op in ("convolution", "inner_product") and pick.random() < 0.5:
        count = weights[0] * weights[1] if len(weights) > len(dims) else weights[0]
        types["bias"] = TensorType((count,))
    return node_of(op, attrs, types, pick.choice(POST_OPS)), types


def check(seeds: range) -> int:
    """Check all ways to run some random nodes, and return their number."""
    target, count = OneDnnTarget(), 0
    for seed in seeds:
        made = drawn(seed)
        if made is None or not target.computes_in(DataType(next(iter(made[1].values())).dtype)):
            continue
        node, types = made
        seen = set()
        for request in all_requests(node, types):
            for one in target.candidates(node, request):
                how = one.impl, *one.operands.values(), *one.results
                if one.is_ref or how in seen:
                    continue
                seen.add(how)
                way = node.with_(descs=one.results, choice=one.choice("tried"))
                assert check_node(way) is None, f"seed {seed}: {one.impl} {way}"
        count += len(seen)
    return count


@pytest.mark.parametrize("side", ["before", "behind"])
def test_who_leaves_an_operand_ends_the_process(side: str) -> None:
    memory = selfcheck._Room().take(4096)
    outside = memory.data_ptr() + (memory.nbytes if side == "behind" else -1)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(outside, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_random_nodes_are_right() -> None:
    assert check(range(60)) > 60


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 250))
def test_more_random_nodes_are_right(first: int) -> None:
    check(range(first, first + 250))
