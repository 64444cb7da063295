"""Architectures by both doors: what is compared, and the table."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from torch import nn

from benchmarks import doors
from benchmarks.sweep_transformers import TRANSFORMERS
from fmtprop.dynamo import region


@pytest.fixture(autouse=True)
def _alone(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(region, "compare", region.compare)  # doors sets it
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Tokens(nn.Module):
    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 4)
        self.wrong = wrong

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.words(input_ids))
        return {"y": y + 1 if self.wrong and torch.compiler.is_compiling() else y}


def tried(monkeypatch, model: nn.Module) -> doors.Row:
    monkeypatch.setattr(doors, "NETWORKS", {"tokens": lambda: (model, (), {"input_ids": torch.ones(1, 5).long()})})
    return doors.tried("tokens", lengths=(7, 3), dtypes=("f32",))


def test_both_doors_are_compared_in_all_ways(monkeypatch):
    row = tried(monkeypatch, Tokens())
    assert set(row.errors) == {"fp.compile f32", "torch.compile f32", "fp.compile lengths", "torch.compile lengths"}
    assert row.verdict == "right"
    assert (row.graphs, row.breaks, row.plans) == (1, 0, 1)


def test_a_wrong_result_is_no_success(monkeypatch):
    row = tried(monkeypatch, Tokens(wrong=True))
    assert row.errors["torch.compile f32"] > doors.TOLERANCES["f32"]
    assert row.verdict == "wrong"


def test_the_table_has_figures_and_reasons():
    rows = [doors.Row("b", {"fp.compile f32": 1e-6}, {}, 1, 0, 1, 0.5, 2), doors.Row("a", {"crash": "no | memory"})]
    text = doors.table([doors.Row(**json.loads(json.dumps(asdict(row)))) for row in rows])
    assert text.startswith("1 of 2 architectures are right in all comparisons. 0 others")
    assert "| `b` | 1e-06 |" in text
    assert "| `a` | crash | no / memory |" in text
    assert text.index("`a`") < text.index("`b`")


@pytest.mark.parametrize(
    ("errors", "exact", "verdict"),
    [
        ({"fp.compile bf16": 0.3}, {"fp.compile bf16": 0.3, doors.EAGER: 0.0, doors.PYTORCH: 0.01}, "wrong"),
        ({"fp.compile bf16": 0.3}, {"fp.compile bf16": 0.3, doors.EAGER: 0.0, doors.PYTORCH: 0.2}, "right"),
        ({"fp.compile bf16": 0.3}, {"fp.compile bf16": 0.3, doors.EAGER: 0.01}, "right"),  # bf16 has no meaning
        ({"fp.compile f32": 0.3}, {"fp.compile f32": 0.3, doors.EAGER: 0.1, doors.PYTORCH: 0.2}, "wrong"),
        ({"fp.compile f32": 0.3}, {"fp.compile f32": 0.3, doors.EAGER: 0.2}, "right"),  # PyTorch's own is as unstable
        ({"fp.compile lengths": 0.3}, {"fp.compile f32": 0.3, doors.EAGER: 0.2}, "wrong"),
        ({"fp.compile f32": float("nan")}, {"fp.compile f32": float("nan"), doors.EAGER: 0.2}, "wrong"),
        ({"fp.compile f32": 1e-6, "fp.compile lengths": "7 tokens: InputError: input x axis 1: got 7"}, {}, "refused"),
        ({"fp.compile f32": "InternalTorchDynamoError: KeyError"}, {}, "wrong"),
        ({"fp.compile f32": "1 results instead of 2"}, {}, "wrong"),
    ],
)
def test_verdicts(errors, exact, verdict):
    assert doors.Row("a", errors, exact).verdict == verdict


def test_what_pytorch_itself_rounds_away_is_listed():
    row = doors.Row("a", {"fp.compile f32": 0.3}, {"fp.compile f32": 0.25, doors.EAGER: 0.2, doors.PYTORCH: 0.5})
    assert "| `a` | fp.compile f32 | 2e-01 | 2e-01 | 5e-01 |" in doors.table([row])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*run-time check.*:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_each_architecture_is_right_by_both_doors(name):
    pytest.importorskip("transformers")
    row = doors.tried(name)
    assert row.verdict != "wrong", row.errors


def test_architectures_behind_one_that_ends_the_process_are_tried(monkeypatch, tmp_path):
    results = tmp_path / "doors.jsonl"

    def run(command, **how):
        tried = [name for name in command if name in ("a", "c")][:1]
        for name in tried:
            doors._write(doors.Row(name), results)
        return subprocess.CompletedProcess(command, 1, stderr="no memory")

    monkeypatch.setattr(doors, "TRANSFORMERS", {"a": None, "b": None, "c": None})
    monkeypatch.setattr(doors.subprocess, "run", run)
    doors.main(["--results", str(results)])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["name"], row["errors"]) for row in rows] == [("a", {}), ("b", {"crash": "no memory"}), ("c", {})]
