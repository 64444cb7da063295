"""Large gradients take the place of saved tensors, and nobody sees a difference."""

import copy

import pytest
import torch
from torch import nn

import fmtprop as fp


def _nets(width=2048):
    """Return a network, a copy that PyTorch trains, and the compiled one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    net = fp.compile(module, (torch.randn(4, width),), training=True, tune="model", confirm=False)
    return module, copy.deepcopy(module), net


@pytest.fixture
def nets():
    return _nets()


def _halves(net):
    return net.steps[0]._made[1]


def _is_inside(net, gradient):
    """Return whether a gradient lies in the memory of a forward run that its step keeps."""
    arenas = [lease.context.arena.memory for lease in _halves(net)._leased.values()]
    starts = [(arena.data_ptr(), arena.data_ptr() + arena.numel()) for arena in arenas]
    return any(start <= gradient.data_ptr() < end for start, end in starts)


def _learn(module, net, x, **how):
    """Add the gradients of one batch."""
    (net(x) * module[0].in_features).square().sum().backward(**how)


def _forget(*modules):
    for module in modules:
        module.zero_grad()


def _assert_equal(module, reference):
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(one.grad / scale, other.grad / scale, rtol=1e-4, atol=1e-5)


def test_a_loop_that_frees_its_gradients_needs_no_memory_for_them(nets):
    module, reference, net = nets
    places = set()
    for seed in range(3):
        _forget(module, reference)
        x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(seed))
        _learn(module, net, x)
        _learn(reference, reference, x)
        _assert_equal(module, reference)
        assert _is_inside(net, module[0].weight.grad)
        assert len(_halves(net)._leased) == 1
        places.add(module[0].weight.grad.data_ptr())
    assert len(places) == 1, "another forward run had other memory"
    _forget(module)
    assert not _halves(net)._leased, "the memory is free when the gradients are"


def test_gradients_that_live_on_are_never_overwritten(nets):
    module, reference, net = nets
    first = None
    for seed in range(4):  # they add up
        x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(seed))
        _learn(module, net, x)
        _learn(reference, reference, x)
        _assert_equal(module, reference)
        first = module[0].weight.grad if first is None else first
    assert len(_halves(net)._leased) == 1, "the first gradients are where they were"
    _forget(module, reference)
    _learn(module, net, x)
    _learn(reference, reference, x)
    _assert_equal(module, reference)
    assert not _is_inside(net, module[0].weight.grad), "this loop keeps gradients"
    del first
    assert not _halves(net)._leased


def test_zeroed_gradients_keep_their_memory(nets):
    module, reference, net = nets
    for seed in range(3):
        x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(seed))
        results = [network(x).square().sum() for network in (net, reference)]
        for network in (module, reference):  # as many loops do: after the forward pass
            network.zero_grad(set_to_none=False)
        for result in results:
            result.backward()
        _assert_equal(module, reference)


def test_a_graph_that_is_kept_has_its_saved_tensors(nets):
    module, reference, net = nets
    x = torch.randn(4, 2048)
    for network in (net, reference):
        loss = network(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    _assert_equal(module, reference)


def test_one_gradient_keeps_all_of_the_memory(nets):
    module, _, net = nets
    _learn(module, net, torch.randn(4, 2048))
    kept = module[0].bias.grad
    before = kept.clone()
    _forget(module)
    _learn(module, net, torch.randn(4, 2048))
    assert torch.equal(kept, before)


def test_pages_without_gradients_are_given_back(nets):
    module, reference, net = nets
    x = torch.randn(4, 2048)
    _learn(module, net, x)
    _learn(reference, reference, x)
    (lease,) = _halves(net)._leased.values()
    lease.end()
    _assert_equal(module, reference)


def test_small_gradients_have_memory_of_their_own():
    module, _, net = _nets(width=64)
    _learn(module, net, torch.randn(4, 64))
    assert not _halves(net).plan.inside
    assert not _halves(net)._leased


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3, 5) - 0.5)

    def forward(self, x):
        return nn.functional.softplus(self.scale / (self.scale.abs() + 0.5)) * x


def test_a_small_gradient_takes_the_place_of_a_saved_tensor():
    """The forward half writes the saved tensor before the backward half has a tensor for the gradient."""
    module, x = Scaled(), torch.randn(3, 5)
    reference = copy.deepcopy(module)
    net = fp.compile(module, x, training=True, tune="model", confirm=False, memory="recompute")
    for call in (net, reference):
        call(x).sum().backward()
    torch.testing.assert_close(module.scale.grad, reference.scale.grad)
