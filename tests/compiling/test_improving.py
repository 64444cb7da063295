"""Better plans that are made in the background: their results, the moment of the change, and their end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.compiling.improving import Improvement
from fmtprop.errors import OptionError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


def test_a_lazy_model_answers_by_a_greedy_plan_first():
    model, x = network(), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
    net = fp.compile(model, x, tune="lazy")
    torch.testing.assert_close(net(x), expected)
    with torch.no_grad():
        model[0].weight.mul_(2)  # later changes have no effect on the second plan either
    assert net.settle()
    assert net.compilation.options.policy == "optimal"
    torch.testing.assert_close(net(x), expected)
    assert net.settle(0)  # there is nothing to wait for


@pytest.mark.parametrize("options", [{"deterministic": True}, {"policy": "plain"}])
def test_a_choice_that_must_not_change_is_made_at_once(options):
    net = fp.compile(network(), torch.randn(1, 3, 8, 8), tune="lazy", **options)
    assert net.settle(0)
    assert net.compilation.options.policy == options.get("policy", "optimal")


@pytest.mark.parametrize("replan", ["now", "background", "never"])
def test_a_shape_of_another_size_is_planned_as_the_option_says(replan):
    model, batch = network(), torch.export.Dim("batch", min=1, max=64)
    net = fp.compile(model, torch.randn(2, 3, 8, 8), dynamic_shapes=({0: batch},), replan=replan, tune="model")
    x = torch.randn(32, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(net(x), expected)
    planned = net.plan_for(x)
    assert planned.compilation.is_like_another_shape == (replan == "never") or replan == "background"
    assert net.settle()
    assert planned.compilation.is_like_another_shape == (replan == "never")
    torch.testing.assert_close(net(x), expected)


def test_an_unknown_way_to_plan_again_is_an_error():
    with pytest.raises(OptionError, match=r"'replan' parameter of compile must be one of 'background', 'now', 'never'"):
        fp.compile(network(), torch.randn(1, 3, 8, 8), replan="later")


def test_a_model_that_is_gone_takes_no_plan():
    net = fp.compile(network(), torch.randn(1, 3, 8, 8), tune="model")
    begun, going_on = threading.Event(), threading.Event()

    def better(stage):
        begun.set()
        going_on.wait()
        return None  # nobody reads it

    net.improve(better)
    begun.wait()
    improvement, gone = net._improvement, weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    going_on.set()
    assert improvement.wait()


def test_a_compilation_ends_between_its_stages():
    begun = threading.Event()

    def make(stage):
        begun.set()
        while True:
            stage("next")

    improvement = Improvement(make, "model")
    begun.wait()
    improvement.end()
    assert improvement.wait(0)


def test_a_process_ends_while_a_plan_is_made():
    code = (
        "import torch, fmtprop as fp\n"
        "m = torch.nn.Sequential(*[torch.nn.Conv2d(4 + i, 5 + i, 3, padding=1) for i in range(12)])\n"
        "x = torch.randn(1, 4, 16, 16)\n"
        "net = fp.compile(m, x, tune='lazy')\n"
        "print(net(x).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
