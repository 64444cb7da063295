"""Packed weights outlive a plan, as long as another one uses them, and are in memory once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.dynamo import region
from fmtprop.dynamo.backend import options_of, regions_by
from fmtprop.ir.node import Value
from fmtprop.runtime import Plan
from fmtprop.runtime.weights import WeightStore

OPTIONS = {"tune": "model", "policy": "propagate", "verify": "off"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).eval()


def image(size: int) -> torch.Tensor:
    return torch.randn(1, 16, size, size, generator=torch.Generator().manual_seed(size))


def nbytes(plans: Iterable[Plan]) -> int:
    """Return the bytes that all of them take together."""
    return sum({constant.data_ptr(): constant.nbytes for plan in plans for constant in plan.constants}.values())


def formats(plan: Plan) -> set[object]:
    """Return how the plan's convolutions read their weights."""
    return {desc for step in plan.steps for name, desc in step.node.choice.operands.items() if name == "weights"}


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_plans_of_two_shapes_hold_one_copy(policy: str) -> None:
    model = network()
    nets = [fp.compile(model, image(size), **OPTIONS | {"policy": policy}, winograd=False) for size in (16, 24)]
    plans = [net.plan for net in nets]
    if formats(plans[0]) == formats(plans[1]):
        assert nbytes(plans) == nbytes(plans[:1]) > 0
    for net, size in zip(nets, (16, 24), strict=True):
        torch.testing.assert_close(net(image(size)), model(image(size)), rtol=1e-4, atol=1e-5)


def test_regions_of_torch_compile_hold_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "compare", lambda ours, theirs: (True, (1.0, 2.0)))
    made: list[region.Region] = []
    model = network()[:3]  # a batch normalization becomes part of the weights where shapes are numbers alone
    options = options_of(None, {**OPTIONS, "policy": "plain"})
    run = torch.compile(model, backend=regions_by(options, made.append), dynamic=True)
    with torch.no_grad():
        for size in (16, 24, 32):
            torch.testing.assert_close(run(image(size)), model(image(size)), rtol=1e-4, atol=1e-5)
    plans = [outcome.net.plan for one in made for outcome in one.outcomes]
    assert len(plans) == 3
    assert nbytes(plans) == nbytes(plans[:1]) > 0


def test_plans_for_two_numbers_of_threads_hold_one_copy() -> None:
    model = network()
    nets = [fp.compile(model, image(size), **OPTIONS) for size in (16, 24)]
    others = [net.compilation.plan_for(net.plan.threads + 1) for net in nets]
    if formats(others[0]) == formats(others[1]):
        assert nbytes(others) == nbytes(others[:1])


@pytest.mark.parametrize("policy", ["plain", "propagate", "optimal"])
def test_constants_are_read_back_from_the_formats_that_plans_have_them_in(policy: str) -> None:
    model = network()[:3]
    net = fp.compile(model, image(16), **OPTIONS | {"policy": policy}, winograd=False)
    graph, weights = net.graph, net.compilation.weights
    assert not graph.constants
    read = [weights.reader(Value(node.name))().reshape(-1) for node in graph.nodes() if node.op == "constant"]
    for parameter in model.parameters():
        assert any(torch.equal(one, parameter.reshape(-1)) for one in read)
    net.close()
    del net
    gc.collect()
    with pytest.raises(fp.PlanError, match="is in no format that can be read back"):
        weights.reader(Value(next(node.name for node in graph.nodes() if node.op == "constant")))()


def test_other_weights_are_others() -> None:
    model = network()
    first = fp.compile(model, image(16), **OPTIONS)
    with torch.no_grad():
        model[0].weight.view(-1)[-1] += 1
    second = fp.compile(model, image(16), **OPTIONS)
    assert nbytes([first.plan, second.plan]) > nbytes([first.plan])
    torch.testing.assert_close(second(image(16)), model(image(16)), rtol=1e-4, atol=1e-5)
    assert not torch.equal(first(image(16)), second(image(16)))


def test_they_go_with_the_last_plan() -> None:
    model = network()
    first, second = (fp.compile(model, image(size), **OPTIONS | {"policy": "plain"}) for size in (16, 24))
    packed = weakref.ref(max(first.plan.constants, key=torch.Tensor.numel))
    first.close()
    del first
    gc.collect()
    assert packed() is not None
    torch.testing.assert_close(second(image(24)), model(image(24)), rtol=1e-4, atol=1e-5)
    second.close()
    del second
    gc.collect()
    assert packed() is None


def test_bytes_that_differ_where_no_sample_is_taken_are_not_shared() -> None:
    store, size = WeightStore(), 1 << 16
    first, second = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    second[1] = 1
    assert store.share(first) is first
    assert store.share(second) is second
    assert store.share(torch.zeros(size, dtype=torch.uint8)) is first


def test_threads_that_pack_at_once_share() -> None:
    store = WeightStore()
    found: list[torch.Tensor] = []

    def pack() -> None:
        found.extend(store.share(torch.full((4096,), number, dtype=torch.uint8)) for number in range(50))

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in found}) == 50
