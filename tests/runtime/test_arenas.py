"""Memory of activations: plans of several shapes take turns in it, and runs at the same time never share it."""

from __future__ import annotations

import copy
import mmap
from threading import Barrier, Thread

import pytest
import torch
from torch import nn
from torch.export import Dim

import fmtprop as fp
from fmtprop.errors import InputError, PlanError
from fmtprop.runtime import arenas as arenas_module
from fmtprop.runtime.arenas import GROWTH, Arenas
from fmtprop.targets.memory import HugePages


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Softmax(1)).eval()


@pytest.fixture
def net(model) -> fp.DynamicModel:
    sizes = {2: Dim("height", max=400), 3: Dim("width", max=400)}
    return fp.compile(model, torch.randn(1, 3, 16, 16), dynamic_shapes=(sizes,), tune="model")


def _image(height: int, width: int) -> torch.Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(height))


def _arenas(net: fp.DynamicModel) -> set[int]:
    contexts = [one for plan in net.plans for one in plan._executor._runners[plan.plan.threads].contexts]
    return {id(one.arena) for one in contexts}


def test_shapes_take_turns_in_one_arena(net, model):
    for _ in range(2):
        for height, width in ((16, 16), (24, 9), (40, 33), (7, 5)):
            x = _image(height, width)
            torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(net.plans) == 4
    assert len(_arenas(net)) == 1


def test_a_shape_that_needs_more_than_was_reserved_has_another_arena(net, model):
    net(_image(16, 16))
    large = _image(16 * GROWTH, 16 * GROWTH)
    torch.testing.assert_close(net(large), model(large), rtol=1e-5, atol=1e-6)
    assert net.plan_for(large).plan.arena_nbytes > GROWTH * net.plan_for(_image(16, 16)).plan.arena_nbytes
    assert len(_arenas(net)) == 2
    x = _image(16, 16)
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-6)


def test_runs_of_several_shapes_at_the_same_time(net, model):
    images = [_image(height, 64) for height in (48, 56, 64, 72)]
    expected = [model(x) for x in images]
    for x in images:
        net.plan_for(x)
    start, wrong = Barrier(len(images)), []

    def run(place: int) -> None:
        torch.set_num_threads(1)
        start.wait()
        for _ in range(60):
            try:
                torch.testing.assert_close(net(images[place]), expected[place], rtol=1e-5, atol=1e-6)
            except Exception as error:  # whatever it is, the test must say it
                wrong.append(error)

    threads = [Thread(target=run, args=(place,)) for place in range(len(images))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(_arenas(net)) <= len(images)


def test_a_run_that_fails_leaves_the_arena_to_the_next(model):
    table = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.ReLU()).eval()
    net = fp.compile(table, torch.zeros(2, 4, dtype=torch.long), dynamic_shapes=({0: Dim("n", max=9)},), tune="model")
    for count in (2, 5):
        with pytest.raises(InputError, match="11"):
            net(torch.full((count, 4), 11))
        right = torch.full((count, 4), 3)
        torch.testing.assert_close(net(right), table(right))
    assert len(_arenas(net)) == 1


def test_a_copy_has_an_arena_of_its_own(net, model):
    x = _image(20, 20)
    net(x)
    other = copy.copy(net)
    torch.testing.assert_close(other(x), model(x), rtol=1e-5, atol=1e-6)
    assert not _arenas(net) & _arenas(other)


def test_a_model_runs_after_it_was_closed(net, model):
    x = _image(20, 20)
    net(x)
    net.close()
    assert not _arenas(net)
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-6)


def test_an_arena_ends_with_its_last_context(net):
    net(_image(20, 20))
    shared = net.plans[0]._arenas
    assert len(shared._all) == 1
    net.close()
    assert len(shared._all) == 0


def test_without_addresses_to_reserve_an_arena_is_as_large_as_its_plan(monkeypatch):
    def refusing(most: int) -> HugePages:
        if most > 1 << 20:
            raise OSError(12, "Cannot allocate memory")
        return HugePages(most)

    monkeypatch.setattr(arenas_module, "HugePages", refusing)
    arena = Arenas(growth=4).take(1 << 20)
    assert arena.nbytes == 1 << 20


def test_pages_are_written_once_and_only_as_far_as_needed():
    pages = HugePages(64 * mmap.PAGESIZE)
    pages.write(3 * mmap.PAGESIZE + 5)
    pages.memory.fill_(7)
    pages.write(2 * mmap.PAGESIZE)  # less than before
    assert (pages.memory == 7).all()
    pages.write(6 * mmap.PAGESIZE)
    assert (pages.memory[: 4 * mmap.PAGESIZE] == 7).all()
    assert [int(pages.memory[page * mmap.PAGESIZE]) for page in (4, 5, 6)] == [0, 0, 7]


def test_a_plan_without_activations_needs_no_arena():
    net = fp.compile(nn.Identity(), torch.ones(3))
    assert torch.equal(net(torch.arange(3.0)), torch.arange(3.0))


def test_what_cannot_be_made_leaves_its_arena_to_others(net, model, monkeypatch):
    x = _image(20, 20)
    plan = net.plan_for(x)

    def failing(*_, **__):
        raise PlanError("no context")

    with monkeypatch.context() as patch:
        patch.setattr("fmtprop.runtime.executor.Context", failing)
        with pytest.raises(PlanError, match="no context"):
            plan(x)
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(_arenas(net)) == 1
