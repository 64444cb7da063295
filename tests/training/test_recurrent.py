"""Recurrent layers train by oneDNN's primitives, forward and backward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import DnnlError
from fmtprop.layout import MemoryDesc
from fmtprop.ops import recurrent_training
from fmtprop.passes.assignment.formats import plain

KINDS = {"LSTM": "lstm", "GRU": "lbr_gru", "RNN": "vanilla_rnn"}
RELU = {"nonlinearity": "relu"}
OPTIONS = {
    "plain": {},
    "deep": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without bias": {"bias": False},
    "batch first": {"batch_first": True},  # oneDNN's gradient of the weights was wrong for sequences in this order
}


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = getattr(nn, kind)(7, 32, **options)
        self.head = nn.Linear(32 * (1 + self.layer.bidirectional), 3)

    def forward(self, x, states=None):
        y, after = self.layer(x, states)
        after = after if isinstance(after, tuple) else (after,)
        return self.head(y), *after


def step(run, args):
    """Run a step; return the results, and the gradients of the tensors that need one."""
    results = run(*args)
    sum((result * (index + 1)).square().mean() for index, result in enumerate(results)).backward()
    return results


def check(net, module, args, tolerance=1e-4):
    eager = copy.deepcopy(module)
    for _ in range(2):
        module.zero_grad()
        eager.zero_grad()
        for got, want in zip(step(net, args), step(eager, args), strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for (name, mine), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None, name
            else:
                scale = theirs.grad.abs().max()
                torch.testing.assert_close(
                    mine.grad / scale, theirs.grad / scale, rtol=tolerance, atol=tolerance, msg=name
                )


def targets(net, kind):
    """Return who runs the passes of the layers."""
    names = (f"{KINDS[kind]}_training", f"{KINDS[kind]}_backward")
    steps = [step.node for plan in net.nets for step in plan.plan.steps if step.node.op in names]
    assert {node.op for node in steps} in (set(), set(names))
    return {node.choice.target for node in steps}


@pytest.mark.parametrize(
    ("kind", "options", "policy"),
    [
        *product(KINDS, ["deep"], ["optimal"]),
        *zip(KINDS, ["without bias", "plain", "batch first"], ["propagate", "naive", "optimal"], strict=True),
    ],
)
def test_a_step_is_as_in_pytorch(kind, options, policy):
    module = Net(kind, **OPTIONS[options])
    args = (torch.randn(6, 4, 7),)
    net = fp.compile(module, args, training=True, policy=policy, tune="model", confirm=False)
    check(net, module, args)
    assert targets(net, kind) == {"onednn"}


@pytest.mark.parametrize(("special_values", "target"), [("exact", "reference"), ("fast", "onednn")])
def test_relu_loses_nan(special_values, target):
    module, args = Net("RNN", **RELU), (torch.randn(6, 4, 7),)
    how = {"special_values": special_values, "tune": "model", "confirm": False}
    net = fp.compile(module, args, training=True, **how)
    check(net, module, args)
    assert targets(net, "RNN") == {target}


@pytest.mark.parametrize("kind", KINDS)
def test_states_have_gradients(kind):
    module = Net(kind)
    x, *states = (torch.randn(size, requires_grad=True) for size in ((6, 4, 7), (1, 4, 32), (1, 4, 32)))
    args = (x, tuple(states) if kind == "LSTM" else states[0])
    net = fp.compile(module, args, training=True, tune="model", confirm=False)
    step(net, args)
    mine = [t.grad for t in (x, *states[: 1 + (kind == "LSTM")])]
    for tensor in (x, *states):
        tensor.grad = None
    step(copy.deepcopy(module), args)
    for got, tensor in zip(mine, (x, *states), strict=False):
        torch.testing.assert_close(got, tensor.grad)


def test_a_frozen_layer_and_recomputation():
    module = Net("LSTM")
    module.layer.requires_grad_(False)
    args = (torch.randn(6, 4, 7),)
    check(fp.compile(module, args, training=True, tune="model", confirm=False), module, args)
    module = Net("GRU")
    net = fp.compile(module, args, training=True, memory="recompute", tune="model", confirm=False)
    check(net, module, args)


class Changed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.copies = getattr(nn, kind)(7, 16), False

    def forward(self, x):
        dst = self.layer(x)[0]
        dst = dst.clone() if self.copies else dst
        dst.select(0, 1).add_(1.0)
        return dst * 2


@pytest.mark.parametrize("kind", KINDS)
def test_results_may_be_changed_in_place(kind):
    module, x = Changed(kind), torch.randn(6, 4, 7)
    net = fp.compile(module, x, training=True, tune="model", confirm=False)
    net(x).square().sum().backward()
    eager = Changed(kind)
    eager.copies = True  # PyTorch's own LSTM refuses the change
    eager(x).square().sum().backward()
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("changed", "frozen"), [(0, "weight_ih"), (1, "weight_hh"), (0, "")])
def test_operands_that_pytorch_does_not_save_may_be_changed(kind, changed, frozen):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(())), getattr(nn, kind)(4, 6)

        def forward(self, *args):
            given = [arg * self.scale for arg in args]
            x, h, c = given
            result = self.layer(x, (h, c) if kind == "LSTM" else h)[0]
            given[changed][..., ::2] = 3.0
            return result

    torch.manual_seed(0)
    module, args = Changing(), (torch.randn(3, 5, 4), torch.randn(1, 5, 6), torch.randn(1, 5, 6))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    net = fp.compile(copy.deepcopy(module), None, training=True, tune="model")
    refused = []
    for call in (module, net):
        try:
            call(*args).square().sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "modified inplace" in str(error)
            refused.append(call)
    if refused:
        assert len(refused) == 2
    else:
        torch.testing.assert_close(net.scale.grad, module.scale.grad)


@pytest.mark.parametrize(("kind", "bidirectional"), [*zip(KINDS, (True, False, True), strict=True)])
def test_evaluation_has_no_workspace(kind, bidirectional):
    module, args = Net(kind, bidirectional=bidirectional), (torch.randn(6, 4, 7),)
    net = fp.compile(module, args, training=True, tune="model", confirm=False)
    with torch.no_grad():
        for got, want in zip(net(*args), module(*args), strict=True):
            torch.testing.assert_close(got, want)
    (evaluation,) = net.evaluations
    found = [step.node for step in evaluation.net.plan.steps if step.node.op.startswith(KINDS[kind])]
    assert [node.op for node in found] == [KINDS[kind]]
    assert {node.choice.target for node in found} <= {"onednn", "mkldnn", "jit"}


def test_both_passes_run_alike():
    """Row-major weights have another implementation than the one that a workspace is made for."""
    module = Net("LSTM")
    args = (torch.randn(6, 4, 7),)
    net = fp.compile(module, args, training=True, policy="plain", tune="model", confirm=False)
    check(net, module, args)
    assert len(targets(net, "LSTM")) == 1


def test_a_workspace_has_no_reorders():
    native = dnnl.NativeDesc.from_desc(MemoryDesc((64,), "u8"))
    one, other = native.as_workspace("a"), native.as_workspace("b")
    assert one == native.as_workspace("a") != other and one.is_workspace
    assert dnnl.NativeDesc.from_desc(one) == native
    target = fp.targets.OneDnnTarget()
    assert target.reorder_cost(one, other) is None and target.reorder_cost(one, MemoryDesc((64,), "u8")) is None


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers_without_a_primitive_train():
    module = nn.LSTM(7, 16, proj_size=4)
    args = (torch.randn(6, 4, 7),)
    net = fp.compile(module, args, training=True, tune="model", confirm=False)
    eager = copy.deepcopy(module)
    net(*args)[0].square().mean().backward()
    eager(*args)[0].square().mean().backward()
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.fixture
def no_gradients(monkeypatch):
    """oneDNN has no gradient of recurrent layers."""

    def refuse(*_):
        raise DnnlError("dnnl_rnn_backward_primitive_desc_create", "unimplemented")

    monkeypatch.setattr(recurrent_training, "_gradient", refuse)


def in_bf16(run, module, x):
    """Return results and gradients of a step, each as one vector, and the types of the results."""
    module.zero_grad()
    results = run(x)
    sum((result.float() * (index + 1)).square().mean() for index, result in enumerate(results)).backward()
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in module.parameters()])
    return [torch.cat([result.float().flatten() for result in results]), gradients], [r.dtype for r in results]


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*product(KINDS, ["dtype"]), ("GRU", "autocast"), ("LSTM", "module"), ("RNN", "reference")],
)
def test_bf16_is_as_accurate_as_pytorch(kind, way, request):
    """By ``dtype``, under autocast, of a module in bf16, and by PyTorch's operators in oneDNN's place."""
    if way == "reference":
        request.getfixturevalue("no_gradients")
    torch.manual_seed(0)
    module, x = Net(kind, **OPTIONS["deep"]), torch.randn(6, 4, 7)
    expected, wide = in_bf16(module, module, x)
    within = (lambda: torch.autocast("cpu", torch.bfloat16)) if way == "autocast" else nullcontext
    if way == "module":
        module, x = module.bfloat16(), x.bfloat16()
    with within() if way == "module" else torch.autocast("cpu", torch.bfloat16):
        rounded, types = in_bf16(module, module, x)
    how = {"dtype": "bf16" if way in ("dtype", "reference") else "f32", "tune": "model", "confirm": False}
    with within():
        net = fp.compile(module, x, training=True, **how)
        got, made = in_bf16(net, module, x)
    assert made == (types if way in ("autocast", "module") else wide)
    for mine, theirs, exact in zip(got, rounded, expected, strict=True):
        assert (mine - exact).norm() <= 1.2 * (theirs - exact).norm()
    assert targets(net, kind) == {"reference" if way == "reference" else "onednn"}


@pytest.mark.parametrize(("kind", "options"), [("LSTM", "deep"), ("GRU", "without bias"), ("RNN", "batch first")])
@pytest.mark.usefixtures("no_gradients")
def test_without_a_gradient_both_passes_run_in_pytorch(kind, options):
    module, args = Net(kind, **OPTIONS[options]), (torch.randn(6, 5, 7),)
    net = fp.compile(module, args, training=True, tune="model", confirm=False)
    check(net, module, args)
    assert targets(net, kind) == {"reference"}


@pytest.mark.usefixtures("no_gradients")
def test_results_that_pytorch_makes_are_copied_into_a_concat():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.LSTM(7, 16), nn.LSTM(7, 16)

        def forward(self, x):
            return torch.cat([self.one(x)[0], self.other(x)[0]]).relu(), self.one(x)[1][0]

    module, args = Both(), (torch.randn(6, 5, 7),)
    net = fp.compile(module, args, training=True, tune="model", confirm=False)
    check(net, module, args)
    assert targets(net, "LSTM") == {"reference"}


def test_inputs_of_a_race_are_as_small_as_weights():
    """With others, gradients would be denormal numbers, with which kernels take several times as long."""
    net = fp.compile(nn.LSTM(64, 128), torch.randn(3, 2, 64), training=True, tune="model", confirm=False).nets[0]
    sizes = {tuple(tensor.shape): float(tensor.std()) for tensor in net.random_inputs()}
    assert sizes[512, 128] < 0.1 and sizes[512, 64] < 0.2 and sizes[3, 2, 64] > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_strides_of_their_parameters(kind):
    # otherwise autograd copies each of them, number by number
    module = getattr(nn, kind)(7, 32, 2)
    net = fp.compile(module, torch.randn(6, 5, 7), training=True, tune="model", confirm=False)
    found = {}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: found.update({name: gradient.stride()}))
    net(torch.randn(6, 5, 7))[0].sum().backward()
    assert found == {name: parameter.stride() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("policy", ["optimal", "propagate"])
def test_a_gradient_gets_sequences_in_the_order_of_time(policy):
    # oneDNN's gradient of an LSTM of this size reads beyond the end of a sequence whose images come first
    module = nn.LSTM(64, 64, 2, batch_first=True)
    net = fp.compile(module, torch.randn(4, 9, 64), training=True, tune="model", policy=policy, confirm=False)
    steps = [step for step in net.nets[0].plan.steps if step.node.op in ("lstm_training", "lstm_backward")]
    layers = [access.desc for step in steps for name, access in step.operands.items() if name.endswith("_layer")]
    sequences = [desc.at_start() for desc in layers if desc.ndim == 3]
    assert len(steps) == 4
    assert len(sequences) >= 6
    assert all(desc == plain(desc) for desc in sequences)
