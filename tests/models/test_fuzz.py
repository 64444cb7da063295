"""Random models agree with PyTorch under every policy. ``python -m tests.models.fuzz`` tries other seeds than these."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.models import fuzz
from tests.models.fuzz import Program, Step, check, differ, draw, minimise


@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", range(24))
def test_random_model(seed):
    program = draw(seed)
    wrong = check(program, runs=1, fast=seed % 6 != 0)
    assert wrong is None, f"{program}\n{wrong}"


@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", range(100, 115))
def test_random_model_by_random_costs(seed):
    program = draw(seed, calls=8)
    wrong = check(program, [f"odd-{seed}", f"pins-{seed}"], fast=True)
    assert wrong is None, f"{program}\n{wrong}"


def test_a_wrong_answer_is_noticed_and_cut_down(monkeypatch):
    honest = fuzz.compile_graph

    def wrong(graph, options):
        net = honest(graph, options)
        algorithms = {getattr(node.attrs, "alg", "") for node in graph.nodes()}
        return (lambda *inputs: tree_map(lambda t: t * 1.5, net(*inputs))) if "tanh" in algorithms else net

    monkeypatch.setattr(fuzz, "compile_graph", wrong)
    steps = (
        Step("relu", torch.relu, ("x0",), ("v0",)),
        Step("tanh", torch.tanh, ("v0",), ("v1",)),
        Step("neg", torch.neg, ("v1",), ("v2",)),
    )
    program = Program({"x0": torch.ones(2, 3)}, {}, steps, ("v2", "v0"))
    assert "off by" in check(program)
    small = minimise(program, lambda p: check(p) is not None)
    assert [step.text for step in small.steps] == ["tanh"]
    assert check(replace(program, outputs=("v0",), form="one", steps=steps[:1])) is None


def test_comparison():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    assert differ((x,), (x.clone(),)) is None
    assert "structure" in differ([x], (x,))
    assert "not finite" in differ((x.nan_to_num(),), (x,))
    assert "off by" in differ((x * 1.001,), (x,))
    assert "differs in 1 of 2" in differ(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert "not torch.float32 (3,)" in differ(x.double(), x)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--fast"], []])
def test_many_random_models(options):
    command = [sys.executable, "-m", "tests.models.fuzz", "--seeds", "1000:1300", *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=3000, check=True)
    assert "done to 1300" in done.stdout
    assert "FAILED" not in done.stdout and "CRASHED" not in done.stdout, done.stdout
