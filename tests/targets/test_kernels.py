"""Nodes that kernels of our own compute: in which formats, and which not."""

from __future__ import annotations

import pytest
import torch

import fmtprop as fp
from fmtprop.ir.node import Attrs, Node, PostOp
from fmtprop.ir.op import opdef
from fmtprop.ir.types import TensorType
from fmtprop.jit import unavailable
from fmtprop.jit.kernel import takes
from fmtprop.layout import DataType, MemoryDesc
from fmtprop.ops import Binary, Eltwise, Pooling, Reduction
from fmtprop.ops.normalization import BatchNorm
from fmtprop.passes.assignment.formats import channels_last, dense
from fmtprop.passes.target import Candidate
from fmtprop.runtime import selfcheck
from fmtprop.targets.kernels import kernel_candidates
from tests.targets.nodes import node_of, request

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

IMAGE = (2, 48, 9, 17)

#: half of the channels of a wider tensor
HALF = MemoryDesc((2, 64, 5, 7), tag="nhwc").submemory((2, 32, 5, 7), (0, 32, 0, 0))


def asked(op: str, attrs: Attrs, **descs: MemoryDesc) -> list[Candidate]:
    """Return the candidates for operands of these formats; the result's is free."""
    types = {name: TensorType(desc.dims, desc.dtype) for name, desc in descs.items()}
    (dst,) = opdef(op).infer(attrs, types)
    return list(
        kernel_candidates(Node("node", op, attrs, (dst,)), {**descs, "dst": MemoryDesc.any(dst.dims, dst.dtype)})
    )


@pytest.mark.parametrize(
    "other", [(2, 1, 1, 1), (1, 1, 9, 17), (2, 1, 9, 17), (1, 1, 9, 1), (2, 48, 9, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("tag", ["abcd", "acdb"])
def test_every_pattern_of_broadcast_of_a_packed_tensor(tag, other):
    src = MemoryDesc(IMAGE, "f32", tag=tag)
    found = asked("binary", Binary("mul"), src_0=src, src_1=MemoryDesc(other, "f32", tag=tag))
    assert [(c.target, c.results) for c in found] == [("jit", (src,))]


@pytest.mark.parametrize(
    ("alg", "src", "other"),
    [
        ("mul", MemoryDesc((2, 32, 9, 7), tag="nhwc").submemory((2, 32, 5, 7), (0, 0, 2, 0)), HALF),  # uneven rows
        ("mul", HALF, MemoryDesc((2, 32, 5, 7))),
        ("mul", MemoryDesc((2, 32, 5, 7), tag="nhwc"), MemoryDesc((1, 32, 1, 1), strides=(64, 2, 1, 1))),
        ("max", MemoryDesc(IMAGE), MemoryDesc((2, 1, 1, 1))),
        ("mul", MemoryDesc(IMAGE), MemoryDesc(IMAGE)),
        ("mul", MemoryDesc((2, 1, 1, 1)), MemoryDesc(IMAGE)),
        ("mul", MemoryDesc(IMAGE, tag="aBcd16b"), MemoryDesc((2, 1, 1, 1))),
        ("mul", MemoryDesc((2, 48, 9, 7)), MemoryDesc((1, 1, 9, 1))),
        ("mul", MemoryDesc(IMAGE, "f16"), MemoryDesc((2, 1, 1, 1), "f16")),
    ],
)
def test_broadcasts_that_are_not_its(alg, src, other):
    assert asked("binary", Binary(alg), src_0=src, src_1=other) == []


@pytest.mark.parametrize(
    ("src", "other"),
    [
        (HALF, HALF),
        (HALF, MemoryDesc(HALF.dims, tag="nhwc")),
        (MemoryDesc(HALF.dims, tag="nhwc"), HALF),
        (HALF, MemoryDesc((1, 32, 1, 1))),
        (HALF, MemoryDesc((2, 1, 5, 7))),
        (MemoryDesc((2, 64, 5, 7)).submemory((2, 32, 5, 7), (0, 32, 0, 0)), MemoryDesc((2, 32, 5, 7))),
        (MemoryDesc((9, 64)).submemory((9, 32), (0, 32)), MemoryDesc((9, 64)).submemory((9, 32), (0, 0))),
    ],
)
def test_slices_of_channels_are_rows_with_gaps(src, other):
    (found,) = asked("binary", Binary("mul"), src_0=src, src_1=other)
    assert (found.target, found.results) == ("jit", (dense(src).at_start(),))


@pytest.mark.parametrize("axes", [(1,), (2, 3), (1, 2, 3), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("alg", ["sum", "mean", "max", "min"])
def test_reductions_keep_the_order_of_axes(alg, axes):
    for tag in ("abcd", "acdb"):
        (found,) = asked("reduction", Reduction(alg, axes), src=MemoryDesc(IMAGE, tag=tag))
        dims = tuple(1 if axis in axes else size for axis, size in enumerate(IMAGE))
        assert found.results == (MemoryDesc(dims, tag=tag),)


@pytest.mark.parametrize(
    ("attrs", "src"),
    [
        (Reduction("mul", (1,)), MemoryDesc(IMAGE)),
        (Reduction("norm_lp_sum", (1,), 3.0), MemoryDesc(IMAGE)),
        (Reduction("norm_lp_sum", (1,), 2.0, 0.1), MemoryDesc(IMAGE)),
        (Reduction("sum", (1, 3)), MemoryDesc(IMAGE)),  # two runs of axes
        (Reduction("sum", (0, 2)), MemoryDesc(IMAGE)),
        (Reduction("sum", (1,)), MemoryDesc((2, 48, 7))),  # fewer columns than a vector has
        (Reduction("sum", (1,)), MemoryDesc((2, 20_000, 16))),  # too many summands one after the other
        (Reduction("sum", (1,)), MemoryDesc(IMAGE, tag="aBcd16b")),
    ],
)
def test_reductions_that_are_not_its(attrs, src):
    assert asked("reduction", attrs, src=src) == []


@pytest.mark.parametrize("alg", ["max", "avg_include_padding", "avg_exclude_padding"])
def test_a_global_pooling_is_a_reduction(alg):
    (found,) = asked("pooling", Pooling.make(alg, IMAGE[2:]), src=MemoryDesc(IMAGE))
    assert found.impl.startswith("fold_max" if alg == "max" else "fold_mean")
    assert asked("pooling", Pooling.make(alg, (9, 16)), src=MemoryDesc(IMAGE)) == []
    assert asked("pooling", Pooling.make(alg, IMAGE[2:], pad_l=1), src=MemoryDesc(IMAGE)) == []


@pytest.mark.parametrize("dims", [(2, 32, 5, 7), (1, 48, 40), (1, 16, 2, 3, 4)])
def test_an_average_of_whole_vectors_of_channels_has_a_kernel_of_its_own(dims):
    src = channels_last(MemoryDesc(dims))
    (found,) = asked("pooling", Pooling.make("avg_include_padding", dims[2:]), src=src)
    assert found.impl.startswith("average") and found.results == (
        channels_last(MemoryDesc((*dims[:2], *(1,) * len(dims[2:])))),
    )


@pytest.mark.parametrize(
    "src",
    [
        MemoryDesc((2, 33, 5, 7), tag="nhwc"),
        MemoryDesc((2, 32, 5, 7)),
        MemoryDesc((2, 32, 5, 7), tag="nChw16c"),
        HALF,
        MemoryDesc((1, 16, 129, 128), tag="nhwc"),  # too many summands
    ],
)
def test_other_averages_are_left_to_folds_and_onednn(src):
    found = asked("pooling", Pooling.make("avg_include_padding", src.dims[2:]), src=src)
    assert all(candidate.impl.startswith("fold") for candidate in found)


def test_two_data_types_are_left_to_onednn():
    src, factors = MemoryDesc(IMAGE, tag="nhwc"), MemoryDesc((1, 48, 1, 1), "bf16")
    assert asked("binary", Binary("mul"), src_0=src, src_1=factors) == []


def test_with_a_post_op_it_is_not():
    src = MemoryDesc(IMAGE)
    dst = MemoryDesc((2, 1, 9, 17))
    tail = (PostOp("eltwise", Eltwise("relu")),)
    node = Node("node", "reduction", Reduction("sum", (1,)), (TensorType(dst.dims),), post_ops=tail)
    assert list(kernel_candidates(node, {"src": src, "dst": MemoryDesc.any(dst.dims, dst.dtype)})) == []


class Attention(torch.nn.Module):
    """Spatial attention by the mean and the maximum of channels, and rows scaled by their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = torch.nn.Conv2d(3, 17, 3, padding=1), torch.nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x):
        x = self.before(x)
        gate = torch.sigmoid(self.gate(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)))
        y = x * gate
        return y / torch.linalg.vector_norm(y, dim=(1, 2, 3), keepdim=True) + y.sum((0, 3), keepdim=True)


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_a_network_of_these_runs_none_of_them_by_reference_loops(policy):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 3, 13, 19)
    net = fp.compile(model, x, policy=policy)
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x), rtol=1e-4, atol=1e-5)
    impls = [node.choice.impl for node in net.graph.nodes() if node.choice is not None]
    assert any(impl.startswith("fold_") for impl in impls)


NORM = {"src": (2, 48, 5, 7), "mean": (48,), "variance": (48,), "scale": (48,), "shift": (48,)}


@pytest.mark.parametrize("names", [tuple(NORM), ("src", "mean", "variance"), ("src", "mean", "variance", "shift")])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_normalization_with_given_statistics_has_its_channels_innermost(dtype, names):
    if not takes(DataType(dtype)):
        pytest.skip("kernels in bf16 need AVX-512 with bf16")
    types = {name: TensorType(NORM[name], dtype if name == "src" else "f32") for name in names}
    node = node_of("batch_normalization", BatchNorm(), types, (PostOp("eltwise", Eltwise("relu")),))
    descs = {name: MemoryDesc(type_.dims, type_.dtype) for name, type_ in types.items()}
    descs["src"] = channels_last(descs["src"])
    (offer,) = kernel_candidates(node, request(node, descs))
    assert (offer.impl.partition(":")[0], offer.results) == ("given_norm", (descs["src"],))
    assert selfcheck.check_node(node.with_(descs=offer.results, choice=offer.choice("offered"))) is None
    blocked = {**descs, "src": MemoryDesc(NORM["src"], dtype, tag="aBcd16b")}
    assert not list(kernel_candidates(node, request(node, blocked)))


@pytest.mark.parametrize(
    ("attrs", "desc", "named"),
    [
        (Eltwise("tanh"), MemoryDesc(IMAGE), "tanh"),
        (Eltwise("swish", 1.0), channels_last(MemoryDesc(IMAGE)), "swish"),
        (Eltwise("tanh"), HALF, None),  # has gaps
        (Eltwise("tanh"), MemoryDesc((5, 3)), None),  # no whole vectors
        (Eltwise("relu"), MemoryDesc(IMAGE), None),  # oneDNN is as fast
        (Eltwise("logistic"), MemoryDesc(IMAGE), None),
    ],
)
def test_functions_that_take_onednn_longer_run_alone(attrs: Eltwise, desc: MemoryDesc, named: str | None) -> None:
    found = asked("eltwise", attrs, src=desc)
    assert [one.impl.partition(":")[0] for one in found] == ([] if named is None else [named])
    assert all(one.results == (desc,) for one in found)


def test_a_plan_takes_the_faster_function() -> None:
    src = torch.randn(48, 64)
    net = fp.compile(torch.nn.Tanh(), (src,), deterministic=True)
    assert torch.allclose(net(src), src.tanh(), atol=1e-6)
    (node,) = (node for node in net.compilation.formatted.nodes() if node.op == "eltwise")
    assert node.choice is not None and node.choice.impl.startswith("tanh:")
