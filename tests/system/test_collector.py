"""The cycle collector waits while a model is compiled, and nothing large waits for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import fmtprop as fp
from fmtprop.ir.graph import Graph
from fmtprop.ir.types import TensorType
from fmtprop.system import collector
from tests import processes


@pytest.fixture(autouse=True)
def _restored():
    yield
    gc.enable()


def test_paused_leaves_things_as_they_were():
    with pytest.raises(KeyError), collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with collector.paused():
        pass
    assert not gc.isenabled()


class Node:
    pass


def test_what_was_made_while_it_paused_is_collected():
    gc.collect()
    with collector.paused():
        node = Node()
        node.itself, dead = node, weakref.ref(node)
        del node
        assert dead() is not None
        collector.collect_young()
        assert dead() is None


#: in a process of its own, which has few objects and has frozen none
OLDER = """
import gc, weakref
from fmtprop.system import collector

class Node:
    pass

gc.collect()
node = Node()
node.itself, dead = node, weakref.ref(node)
del node
with collector.paused():
    younger = Node()
    younger.itself, young = younger, weakref.ref(younger)
    del younger
assert young() is None and dead() is not None and gc.get_freeze_count() == 0
gc.collect()
assert dead() is None
"""


def test_older_objects_are_left_to_python():
    """Garbage of an export is not looked for: a pass over all its objects takes as long as many a compilation."""
    done = processes.run("-c", OLDER)
    assert done.returncode == 0, done.stderr


def test_frozen_objects_of_the_caller_stay_frozen(monkeypatch):
    monkeypatch.setattr(collector, "_has_frozen", False)
    gc.freeze()
    with collector.paused():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0 and gc.isenabled()
    monkeypatch.setattr(gc, "get_freeze_count", None)  # they are counted once: calling it now fails
    with collector.paused():
        pass


def test_a_compilation_switches_it_on_again():
    net = fp.compile("chain")
    assert gc.isenabled() and net.plan.steps
    with pytest.raises(fp.errors.FmtpropError):
        fp.compile("chain", policy="no such policy")
    assert gc.isenabled()


def test_a_loaded_graph_frees_its_weights_without_it(tmp_path):
    graph = Graph("small")
    weights = graph.constant("weights", TensorType((4, 4)), torch.ones(4, 4))
    graph.output(weights)
    fp.save(graph, tmp_path / "small.json")
    gc.collect()
    gc.disable()
    loaded = fp.load(tmp_path / "small.json")
    tensor = weakref.ref(loaded.constants["weights"])
    assert tensor() is not None
    loaded.constants.clear()
    assert tensor() is None


@pytest.mark.usefixtures("own_cache")
def test_planning_leaves_nothing_to_it():
    """Graphs and candidates in cycles would add up to more memory than they need at once."""
    layers = [torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.PReLU()]
    # a reshape of what lies in blocks is refused, and that is told as a reason
    graph = fp.from_torch(
        torch.nn.Sequential(*layers, torch.nn.Flatten(2), torch.nn.Softmax(2)), torch.ones(1, 8, 9, 9)
    )
    fp.compile(graph)  # what is made once is made now
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with collector.paused():
            fp.compile(graph, tune="model", winograd=True)
            gc.collect()
        left = {type(one) for one in gc.garbage if type(one).__module__.startswith("fmtprop")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left
