"""Recurrent layers of PyTorch run by oneDNN's primitives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import ShapeError
from fmtprop.ir.node import Node
from fmtprop.ir.types import TensorType
from fmtprop.layout import MemoryDesc
from fmtprop.ops import Recurrent
from fmtprop.ops.recurrent import LBR_GRU, LSTM, VANILLA_RNN
from fmtprop.runtime.agreement import TOLERANCE, relative_error, small_numbers

NEEDS_BF16 = pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
OPS = {"LSTM": LSTM, "GRU": LBR_GRU, "RNN": VANILLA_RNN}
OPTIONS = {
    "plain": {},
    "deep": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without bias": {"bias": False},
    "three layers": {"num_layers": 3, "dropout": 0.5},
}


def layer(kind, **options):
    torch.manual_seed(0)
    return getattr(nn, kind)(7, 16, **options).eval()


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for part in value for leaf in leaves(part)]


def states(kind, module, batch):
    count = module.num_layers * (1 + module.bidirectional)
    h, c = (torch.randn(count, batch, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    return (h, c) if kind == "LSTM" else h


def check(module, args, tolerance=1e-5, **options):
    net = fp.compile(module, args, tune="model", confirm=False, **options)
    with torch.no_grad():
        expected = module(*args)
    for got, want in zip(leaves(net(*args)), leaves(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return net


def how(net):
    """Return the targets that run layers: natively by oneDNN, PyTorch's own oneDNN or a kernel, as costs choose."""
    names = {declaration.name for declaration in OPS.values()}
    found = {step.node.choice.target for step in net.plan.steps if step.node.op in names}
    return {"native" if target in ("onednn", "mkldnn", "jit") else target for target in found}


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize(
    ("options", "policy"), [(one, ("optimal", "propagate")[i % 2]) for i, one in enumerate(OPTIONS)]
)
def test_layers_run_natively(kind, options, policy):
    module = layer(kind, **OPTIONS[options])
    net = check(module, (torch.randn(5, 3, 7),), policy=policy)
    assert how(net) == {"native"}
    assert len([step for step in net.plan.steps if step.node.op == OPS[kind].name]) == module.num_layers


@pytest.mark.parametrize("kind", OPS)
def test_states_are_given_and_returned(kind):
    module = layer(kind, num_layers=2, bidirectional=True)
    assert how(check(module, (torch.randn(5, 3, 7), states(kind, module, 3)))) == {"native"}


def test_a_sequence_without_a_batch():
    assert how(check(layer("GRU"), (torch.randn(5, 7),))) == {"native"}


def test_relu_keeps_nan_where_that_is_wanted():
    x = torch.randn(5, 3, 7)
    x[2, 1, 3] = torch.nan
    module = layer("RNN", nonlinearity="relu")
    assert how(fp.compile(module, (x,), tune="model", confirm=False)) == {"native"}
    net = fp.compile(module, (x,), tune="model", confirm=False, special_values="exact")
    assert how(net) == {"reference"} and torch.equal(net(x)[0].isnan(), module(x)[0].isnan())
    assert how(fp.compile(layer("RNN"), (x,), tune="model", confirm=False, special_values="exact")) == {"native"}


@pytest.mark.parametrize("module", [layer("LSTM", proj_size=4), layer("GRU").double()])
def test_other_layers_run_in_pytorch(module):
    x = torch.randn(5, 3, 7, dtype=next(module.parameters()).dtype)
    assert how(check(module, (x,))) == set()


def test_a_factor_behind_a_layer_stays_there():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer("LSTM")

        def forward(self, x):
            return self.layer(x)[0] * 3.0

    assert how(check(Scaled(), (torch.randn(5, 3, 7),))) == {"native"}


@NEEDS_BF16
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", OPS)
def test_bf16_is_as_accurate_as_pytorch(kind, options):
    """Of a module in f32 and of one in bf16; cell states stay f32 in the first."""
    module, x = layer(kind, **OPTIONS[options]), torch.randn(5, 3, 7)
    narrow = copy.deepcopy(module).bfloat16()
    with torch.no_grad():
        expected, rounded = (torch.cat([leaf.float().flatten() for leaf in leaves(y)]) for y in (
            module(x), narrow(x.bfloat16())
        ))  # fmt: skip
    for net, src in (
        (fp.compile(module, (x,), dtype="bf16", tune="model", confirm=False), x),
        (fp.compile(narrow, (x.bfloat16(),), tune="model", confirm=False), x.bfloat16()),
    ):
        got = torch.cat([leaf.float().flatten() for leaf in leaves(net(src))])
        assert 0 < (got - expected).norm() <= 1.2 * (rounded - expected).norm()
        assert how(net) == {"native"}


@pytest.mark.parametrize("kind", OPS)
def test_a_check_sees_every_operand(kind):
    """The numbers of a check neither saturate the layer nor hide the state."""
    declaration = OPS[kind]
    sample = declaration.samples()
    attrs, types = next((one.attrs, one.types) for one in sample if one.name == "both_directions")
    types = {**types, "weights_layer": TensorType((1, 2, 512, *types["weights_layer"].dims[3:]))}
    types["src_layer"] = TensorType((4, 3, 512))
    node = Node("layer", declaration.name, attrs, declaration.infer(attrs, types))
    numbers = {name: small_numbers(node, name, MemoryDesc(t.dims, "f32")) for name, t in types.items()}
    expected = declaration.reference(attrs, numbers)[0]
    for name, tensor in numbers.items():
        other = declaration.reference(attrs, {**numbers, name: tensor.roll(1, -1)})[0]
        assert relative_error(other, expected) > 100 * TOLERANCE[MemoryDesc((1,), "f32").dtype], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src_iter": (1, 1, 9, 16)}, r"src_iter has dims \(1, 1, 9, 16\) but this lstm needs \(1, 1, 1, 16\)"),
        ({"weights_layer": (1, 1, 8, 3, 16)}, r"weights_layer has dims .* needs \(1, 1, 8, 4, 16\)"),
        ({"src_layer": (5, 8)}, r"src_layer has 2 axes and weights_iter 5"),
    ],
)
def test_sizes_are_checked(changes, message):
    types = dict(next(iter(LSTM.samples())).types)
    types |= {name: TensorType(dims) for name, dims in changes.items()}
    with pytest.raises(ShapeError, match=message):
        LSTM.infer(Recurrent(), types)
    with pytest.raises(ShapeError, match="activation of a recurrent layer is 'gelu'"):
        Recurrent(activation="gelu")


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("policy", ["naive", "propagate", "optimal"])
def test_sources_that_repeat_elements_are_copied(kind, policy):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(kind)

        def forward(self, x):
            return self.layer(x.expand(3, 2, 7))[0]

    check(Repeated().eval(), (torch.randn(2, 7),), policy=policy)
