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
from tests.models.fuzz import Program, Step, check, differ, draw, minimise, without_ties


@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", range(24))
def test_random_model(seed):
    program = draw(seed)
    wrong = check(program, runs=1, fast=seed % 6 != 0)
    assert wrong is None, f"{program}\n{wrong}"


@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", [0, 1, 17, 277])  # of two, a step was wrong once, or raised
def test_random_steps_of_training(seed):
    program = draw(seed, training=True)
    wrong = check(program)
    assert wrong is None, f"{program}\n{wrong}"


@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", range(100, 115))
def test_random_model_by_random_costs(seed):
    program = draw(seed, calls=8)
    wrong = check(program, [f"odd-{seed}", f"pins-{seed}"], fast=True)
    assert wrong is None, f"{program}\n{wrong}"


@pytest.mark.parametrize("seed", [47, 1014])  # each of them was wrong once, or raised
def test_random_model_behind_torch_compile(seed):
    program = draw(seed)
    wrong = check(program, [f"dynamo-{seed}"])
    assert wrong is None, f"{program}\n{wrong}"


@pytest.mark.parametrize("seed", [1])  # more of them are slow
def test_random_model_with_five_shapes(seed):
    program = draw(seed, calls=6)
    before = fuzz.CHOSEN["shapes, exported"]
    wrong = check(program, [f"shapes-{seed}"])
    assert wrong is None, f"{program}\n{wrong}"
    assert fuzz.CHOSEN["shapes, exported"] > before


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("seed", [38, 42, 152, 155])  # each of them was wrong once, or raised
def test_random_network_of_real_sizes(seed):
    program = draw(seed, blocks=True)
    wrong = check(program, ["optimal", f"odd-{seed}"], runs=1, fast=True)
    assert wrong is None, f"{program}\n{wrong}"
    assert {"other post-ops", "concat in place"} <= set(fuzz.CHOSEN)


def test_another_place_of_as_large_a_number_is_no_error():
    numbers = torch.tensor([[1.0, 3.0, 3.0 + 1e-6], [0.0, 2.0, 1.0]])
    step = Step("argmax(-1)", lambda x: x.argmax(-1), ("x0",), ("v0",))
    program = Program({"x0": numbers}, {}, (step,), ("v0",), "one")

    def differs(*places: int) -> str | None:
        got, expected = torch.tensor(places), numbers.argmax(-1)
        return differ(without_ties(program, [numbers], got, expected), expected)

    assert differs(2, 1) is None and differs(1, 1) is None
    assert differs(0, 1) and differs(1, 2), "of a smaller number"
    assert differs(3, 1) and differs(-1, 1), "of none"
    two = Step("topk(2)", lambda x: x.topk(2), ("x0",), ("v0", "v1"))
    program = Program({"x0": numbers}, {}, (two,), ("v1",), "one")
    expected = numbers.topk(2).indices
    twice = torch.tensor([[1, 1], [1, 2]])
    assert differ(without_ties(program, [numbers], twice, expected), expected), "one place twice"
    other = torch.tensor([[1, 2], [1, 2]])
    assert differ(without_ties(program, [numbers], other, expected), expected) is None


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
@pytest.mark.parametrize(
    "options",
    [
        *(["--fast"], [], ["--fast", "--blocks"], ["--train"], ["--train", "--blocks"]),
        ["--policies", "dynamo-{seed}", "--calls", "5"],
        ["--policies", "shapes-{seed}", "--calls", "6"],
    ],
)
def test_many_random_models(options):
    command = [sys.executable, "-m", "tests.models.fuzz", "--seeds", "1000:1300", *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=3000, check=True)
    assert "done to 1300" in done.stdout
    assert "FAILED" not in done.stdout and "CRASHED" not in done.stdout, done.stdout
