from __future__ import annotations

import math

import pytest
import torch

from fmtprop.errors import ShapeError
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.ops import Reduction, emit
from fmtprop.ops.reduction import REDUCTION
from tests.ops.fake_call import FakeCall, check_import

X = TensorType((2, 6, 4, 5))
NARROW = X.with_dtype("bf16")
INTS = TensorType((2, 3), "s64")


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "ops"),
    [
        ("aten.sum.dim_IntList", (X, [-1, 2], True), {}, ["reduction"]),
        ("aten.sum.dim_IntList", (X, [1]), {}, ["reduction", "reshape"]),
        ("aten.sum.dim_IntList", (X, None, True), {}, ["reduction"]),
        ("aten.sum.dim_IntList", (NARROW, [1]), {"dtype": torch.float32}, ["reorder", "reduction", "reshape"]),
        ("aten.sum.default", (X,), {}, ["reduction", "reshape"]),
        ("aten.mean.default", (X,), {}, ["reduction", "reshape"]),
        ("aten.prod.dim_int", (X, 1), {}, ["reduction", "reshape"]),
        ("aten.prod.default", (TensorType((3, 4)),), {}, ["reduction", "reshape"]),
        ("aten.amax.default", (X, [0, 3]), {}, ["reduction", "reshape"]),
        ("aten.amax.default", (X,), {}, ["reduction", "reshape"]),
        ("aten.amin.default", (X, [1], True), {}, ["reduction"]),
        ("aten.max.default", (X,), {}, ["reduction", "reshape"]),
        ("aten.min.default", (X,), {}, ["reduction", "reshape"]),
        ("aten.max.dim", (X, 1), {}, ["reduction", "reshape"]),
        ("aten.min.dim", (X, -1, True), {}, ["reduction"]),
        ("aten.linalg_vector_norm.default", (X, 2, [1], True), {}, ["reduction"]),
        ("aten.linalg_vector_norm.default", (X, 3, [1, 2]), {}, ["reduction", "reshape"]),
        ("aten.norm.ScalarOpt_dim", (X, None, [1], True), {}, ["reduction"]),
        ("aten.norm.Scalar", (X, 1), {}, ["reduction", "reshape"]),
    ],
)  # fmt: skip
def test_importers_agree_with_torch(target, args, kwargs, ops):
    assert check_import(target, *args, low=0.5, **kwargs).ops() == ops


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.sum.default", (INTS,)),
        ("aten.sum.default", (TensorType(()),)),
        ("aten.sum.dim_IntList", (TensorType((0, 3)), [0])),
        ("aten.amax.default", (INTS, [1])),
        ("aten.linalg_vector_norm.default", (X, math.inf, [1])),
        ("aten.linalg_vector_norm.default", (X, 0, [1])),
        ("aten.linalg_vector_norm.default", (X, 0.5, [1])),
    ],
)
def test_importers_decline(target, args):
    assert FakeCall(target, *args).run() is None


def test_indices_of_maxima_are_not_claimed():
    value, indices = FakeCall("aten.max.dim", X, 1).run()
    assert value is not None and indices is None


def test_low_precision_accumulates_in_f32():
    (dst,) = REDUCTION.reference(Reduction("sum", (0,)), {"src": torch.ones(1000, dtype=torch.bfloat16)})
    assert dst.item() == 1000
    assert dst.dtype == torch.bfloat16


def test_norms_keep_away_from_zero_by_eps():
    zero = {"src": torch.zeros(1, 4)}
    for alg in ("norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum"):
        (dst,) = REDUCTION.reference(Reduction(alg, (1,), 2.0, 0.25), zero)
        assert dst.item() == (0.25 if "power" in alg else 0.5)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        (lambda: Reduction("sum", (4,)), "src has 4 dimensions, so there is no axis 4 to reduce"),
        (lambda: Reduction("sum", ()), "must be distinct, ascending, from 0, and at least one"),
        (lambda: Reduction("sum", (2, 1)), "must be distinct, ascending"),
        (lambda: Reduction("sum", (-1,)), "must be distinct, ascending, from 0"),
        (lambda: Reduction("median", (1,)), "reduction has no algorithm 'median'; it has max, min"),
        (lambda: Reduction("norm_lp_sum", (1,), 0.5), "p is 0.5; a norm needs a finite p of at least 1"),
    ],
)
def test_errors(attrs, message):
    graph = Graph()
    x = graph.input("x", X)
    with pytest.raises(ShapeError, match=message):
        emit(graph, "reduction", {"src": x}, attrs())
