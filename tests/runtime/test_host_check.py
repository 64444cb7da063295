"""Steps that PyTorch runs get the memory formats that it is right in."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.ir import TensorType
from fmtprop.ir.facets import Reads
from fmtprop.ir.node import Value
from fmtprop.ir.op import OPSET, OpDef
from fmtprop.ir.ports import result_names
from fmtprop.layout import MemoryDesc
from fmtprop.ops import ATEN
from fmtprop.ops.host_call import host_call
from fmtprop.runtime.selfcheck import check_node
from fmtprop.targets import ReferenceTarget
from fmtprop.targets.reference import MEANING, reads_strides
from tests.targets.nodes import node_of
from tests.threads import torch_threads

DIMS = (2, 8, 6, 6)
CHANNELS_LAST = MemoryDesc(DIMS, "f32", tag="acdb")


class Unpooling(nn.Module):
    """As ENet does it: windows overlap, so that several maxima go back to one place, and the last one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        y, indices = nn.functional.max_pool2d(self.before(x), 3, 2, 1, return_indices=True)
        return nn.functional.max_unpool2d(self.after(y), indices, 2, output_size=x.shape[2:])


class Gamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


def unpooling(desc: MemoryDesc):
    """Return a formatted max-unpooling that was offered its values in a format."""
    x, indices = Value("x"), Value("i")
    attrs, _ = host_call("aten.max_unpool2d.default", {"self": x, "indices": indices, "output_size": [12, 12]})
    node = node_of("aten", attrs, {"src_0": TensorType(DIMS), "src_1": TensorType(DIMS, "s64")})
    request = {"src_0": desc, "src_1": desc.with_dtype("s64"), "dst": MemoryDesc((2, 8, 12, 12), "f32")}
    (candidate,) = ReferenceTarget().candidates(node, request)
    return node.with_(descs=candidate.results, choice=candidate.choice("test"))


@pytest.mark.parametrize("policy", ["propagate", "optimal"])
def test_unpooling_behind_channels_last_is_right(policy):
    # in channels-last, PyTorch's threads share out places, and who writes one last is chance
    torch.manual_seed(0)
    model, x = Unpooling().eval(), torch.randn(1, 3, 128, 128)
    with torch.no_grad(), torch_threads(2):
        expected = model(x)
        net = fp.compile(model, x, policy=policy, tune="model", confirm=False)
        torch.testing.assert_close(net(x), expected, atol=1e-4, rtol=0)


def test_an_operator_that_is_not_element_wise_gets_row_major_tensors():
    node = unpooling(CHANNELS_LAST)
    assert [desc.tag for desc in node.choice.operands.values()] == ["abcd", "abcd"]
    assert not reads_strides(node)


# ---------------------------------------------------------------- the check


def misreading(attrs, tensors):
    """Compute what a kernel would that takes every tensor for a row-major one."""
    rows = {name: t if t.is_contiguous() else t.permute(0, 2, 3, 1).reshape(t.shape) for name, t in tensors.items()}
    return ATEN.reference(attrs, rows)


@pytest.fixture
def _misread(monkeypatch):
    by_pytorch = replace(ATEN.pytorch, any_strides=lambda attrs: True, operator=None)
    wrong = replace(ATEN, pytorch=by_pytorch, reference=misreading)
    monkeypatch.setitem(OPSET, "aten", wrong)


@pytest.mark.usefixtures("_misread")
def test_the_check_sees_what_a_memory_format_does_to_an_operator():
    assert check_node(unpooling(CHANNELS_LAST)) is not None
    assert not reads_strides(unpooling(MemoryDesc(DIMS, "f32")))


@pytest.mark.usefixtures("_misread")
@pytest.mark.parametrize("policy", ["propagate", "optimal"])
def test_an_operator_that_fails_its_check_gets_row_major_tensors(policy):
    torch.manual_seed(0)
    model, x = Gamma(), torch.randn(DIMS)
    boundary = {"x": CHANNELS_LAST}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        net = fp.compile(model, x, policy=policy, boundary=boundary, tune="model", confirm=False)
    (told,) = {str(w.message) for w in caught if w.category is RuntimeWarning}
    assert re.match(r"node aten_1 \(aten\): torch is off by .*these formats.*; planning around it", told)
    assert torch.equal(net(x), model(x))


@pytest.mark.usefixtures("_misread")
def test_the_mkldnn_target_plans_around_an_operator_that_fails_its_check():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Hardshrink()).eval(), torch.randn(2, 3, 16, 16)
    with pytest.warns(RuntimeWarning, match=r"torch is off by .* in these formats.*; planning around it"):
        net = fp.compile(model, x, target="mkldnn", policy="propagate")
    torch.testing.assert_close(net(x), model(x), atol=1e-5, rtol=0)


def overwriting(attrs, tensors, places):
    """Bind an operator that resizes what it is given, as binary_cross_entropy does."""

    def call():
        places[0].resize_(2 * places[0].numel()).fill_(1.0)
        places[0].resize_(tensors["src_0"].shape).copy_(torch.lgamma(tensors["src_0"]))

    return call


def negating(attrs, tensors, places):
    return lambda: torch.neg(ATEN.reference(attrs, tensors)[0], out=places[0])


@pytest.mark.parametrize("operator", [overwriting, negating])
@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_an_operator_that_fails_its_check_on_row_major_tensors_is_left_out(monkeypatch, policy, operator):
    monkeypatch.setitem(OPSET, "aten", replace(ATEN, pytorch=replace(ATEN.pytorch, operator=operator)))
    model, x = Gamma(), torch.randn(DIMS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        net = fp.compile(model, x, policy=policy, tune="model", confirm=False)
    (told,) = {str(w.message) for w in caught if w.category is RuntimeWarning}
    assert re.match(
        r"node aten_1 \(aten\): torch is off by .*the op's reference .* row-major; planning around it", told
    )
    assert torch.equal(net(x), model(x))
    (node,) = (node for node in net.graph.nodes() if node.op == "aten")
    assert node.choice.impl == MEANING


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_are_right(reduction):
    class Loss(nn.Module):
        def forward(self, x, y):
            return nn.functional.binary_cross_entropy(x, y, reduction=reduction)

    x, y = torch.rand(5, 5), torch.rand(5, 5)
    torch.testing.assert_close(fp.compile(Loss(), (x, y), tune="model", confirm=False)(x, y), Loss()(x, y))


def test_what_refuses_all_numbers_of_the_check_is_compiled():
    class Cholesky(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x @ x.mT + torch.eye(4))

    x = torch.randn(4, 4)
    torch.testing.assert_close(fp.compile(Cholesky(), x, tune="model", confirm=False)(x), Cholesky()(x))


def test_memory_that_nobody_has_written_is_not_compared():
    class Scattered(nn.Module):
        def forward(self, x):
            order = x.argsort()
            return torch.empty_like(order).scatter_(0, order, torch.arange(5))  # as Mixtral inverts a permutation

    x = torch.randn(5)
    assert torch.equal(fp.compile(Scattered(), x, tune="model", confirm=False)(x), Scattered()(x))


def test_indices_of_the_check_are_in_range():
    class Rows(nn.Module):
        def forward(self, x, i):
            return torch.gather(x, 0, i)

    x, i = torch.randn(2, 3), torch.tensor([[1, 0, 1]])
    assert torch.equal(fp.compile(Rows(), (x, i), tune="model", confirm=False)(x, i), Rows()(x, i))


# ---------------------------------------------------------------- which operators take any strides


def samples():
    for declaration in OPSET.values():
        for sample in declaration.samples():
            if declaration.pytorch.any_strides(sample.attrs):
                yield pytest.param(declaration, sample, id=f"{declaration.name}-{sample.name}")


@pytest.mark.parametrize(("declaration", "sample"), list(samples()))
def test_what_takes_any_strides_is_right_with_them(declaration: OpDef, sample):
    node = node_of(declaration.name, sample.attrs, sample.types)
    for lie in (last_axis_outermost, channels_last, with_gaps):
        operands = {name: lie(type_) for name, type_ in sample.types.items()}
        descs = tuple(MemoryDesc(type_.dims, type_.dtype) for type_ in node.results)
        request = {**operands, **dict(zip(result_names(node), descs, strict=True))}
        (candidate,) = ReferenceTarget().candidates(node, request)
        if declaration.pytorch.reads is Reads.ANY:
            assert dict(candidate.operands) == operands
        formatted = node.with_(descs=descs, choice=candidate.choice("test"))
        assert check_node(formatted) is None


def last_axis_outermost(type_: TensorType) -> MemoryDesc:
    strides, step = [], 1
    for size in type_.dims:
        strides.append(step)
        step *= size
    return MemoryDesc(type_.dims, type_.dtype, strides=tuple(strides))


def channels_last(type_: TensorType) -> MemoryDesc:
    letters = "abcdef"[: type_.ndim]
    return (
        MemoryDesc(type_.dims, type_.dtype, tag=letters[0] + letters[2:] + letters[1])
        if type_.ndim > 2
        else (last_axis_outermost(type_))
    )


def with_gaps(type_: TensorType) -> MemoryDesc:
    row_major = MemoryDesc(type_.dims, type_.dtype)
    return MemoryDesc(type_.dims, type_.dtype, strides=tuple(3 * stride for stride in row_major.strides))
