"""The sweep over many networks: what is asked of each, what ends it early, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import sweep, sweep_network, sweep_table
from benchmarks.sweep_models import NETWORKS
from benchmarks.sweep_network import Record, Variant
from fmtprop import dnnl
from fmtprop.errors import FmtpropError, PlanError

X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def small() -> sweep_network.Network:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (X,), {}


def tried(
    monkeypatch: pytest.MonkeyPatch, *variants: str, make: Any = small, timed: bool = False
) -> list[dict[str, Any]]:
    """Return the complete records of a network of our own."""
    monkeypatch.setattr(sweep_network, "NETWORKS", {"net": make})
    said: list[dict[str, Any]] = []
    ways = [Variant(*variant.split("/")) for variant in variants]
    sweep_network.run("net", ways, torch.get_num_threads(), timed, said.append)
    assert [record["stage"] for record in said][:3] == ["build", "eager", "export"]
    return [record for record in said if record["stage"] == "done"]


def test_a_network_is_compiled_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = tried(monkeypatch, "f32/optimal", "f32/again", "f32/plain", timed=True)
    assert [record["variant"] for record in (one, two, three)] == ["f32/optimal", "f32/again", "f32/plain"]
    for record in (one, two, three):
        assert (record["status"], record["precision"], record["host"]) == ("right", "f32", 0.0)
        assert 0 < record["error"] < 1e-5 and 0 < record["eager_error"] < 1e-5 and record["compile_seconds"] > 0
    assert one["ratio"] > 0 and one["seconds"] > 0 and two["ratio"] is None
    assert "onednn" in one["where"]


def test_statistics_are_settled_before() -> None:
    module, args, kwargs = small()
    sweep_network.settle(module, args, kwargs)
    with torch.no_grad():
        y = module(*args)
    assert not module.training and module[1].momentum == 0.1
    assert 0.3 < y.std() < 1.0, "activations have lost their size"


def test_another_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sweep_network.compile_graph

    def wrong(*args: Any) -> Any:
        net = honest(*args)
        run = type(net).__call__
        monkeypatch.setattr(type(net), "__call__", lambda self, *args: run(self, *args) * 1.01)
        return net

    monkeypatch.setattr(sweep_network, "compile_graph", wrong)
    (record,) = tried(monkeypatch, "f32/optimal", timed=True)
    assert record["status"] == "wrong" and record["reason"].startswith("off by 1.0e-02, eager by ")
    assert record["ratio"] is None, "what is wrong has no figures"


def test_an_error_is_a_crash_of_this_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sweep_network.compile_graph

    def fails(graph: Any, options: Any) -> Any:
        if options.policy == "naive":
            raise PlanError("no way\nat all")
        return honest(graph, options)

    monkeypatch.setattr(sweep_network, "compile_graph", fails)
    one, two = tried(monkeypatch, "f32/naive", "f32/plain")
    assert (one["status"], one["reason"]) == ("crash", "compile: PlanError: no way at all")
    assert two["status"] == "right"


def test_what_the_import_refuses_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dynamic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    found = tried(monkeypatch, "f32/optimal", "bf16/optimal", make=lambda: (Dynamic(), (X,), {}))
    assert [record["status"] for record in found] == ["unsupported", "unsupported"]
    assert found[0]["reason"]


@pytest.mark.skipif(dnnl.supports("bf16"), reason="oneDNN has bf16 on this CPU")
def test_bf16_is_unsupported_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = tried(monkeypatch, "bf16/optimal")
    assert (record["status"], record["reason"]) == ("unsupported", "no bf16 on this CPU")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_network_has_a_process_and_what_is_known_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "new" / "results.jsonl"
    command = ["--only", "deep_cr*", "--untimed", "--policy", "plain", "--threads", "1", "--results", str(results)]
    assert sweep.main(command) == 0
    (row,) = rows(results)
    assert (row["name"], row["variant"], row["status"], row["isa"]) == ("deep_cross", "f32/plain", "right", "")
    assert "deep_cross" in capsys.readouterr().out
    assert sweep.main(command) == 0
    assert len(rows(results)) == 1
    assert sweep.main([*command, "--policy", "naive", "--memory", "1"]) == 1
    assert [row["status"] for row in rows(results)] == ["right", "memory"]


def test_a_process_that_dies_leaves_a_record() -> None:
    arguments = sweep.parsed_arguments(["--threads", "1"])
    (record,) = sweep.Process("no such network", [Variant("f32", "optimal")], arguments).records()
    assert (record["status"], record["stage"]) == ("crash", "done")
    assert "KeyError: 'no such network'" in record["reason"]


def test_there_are_enough_networks() -> None:
    assert len(NETWORKS) >= 150


# ---------------------------------------------------------------- the table


def row(name: str, **fields: Any) -> dict[str, Any]:
    figures = {"error": 1e-6, "eager_error": 5e-7, "compile_seconds": 5.2, "eager_seconds": 0.1, "reorders": 3}
    figures |= {"host": 0.25, "ref": 0.0, "seconds": 0.08, "ratio": 0.8, "where": "a CPU; torch 2.13", "isa": ""}
    return {**asdict(Record(name, "f32/optimal", stage="done")), **figures, **fields}


def test_the_table() -> None:
    missing = dict.fromkeys(["error", "eager_error", "compile_seconds", "reorders", "ratio", "host", "ref"])
    text = sweep_table.render(
        [
            row("alpha"),
            row("beta", ratio=1.25, compile_seconds=9.0),
            row("gamma", **missing, status="crash", reason="compile: a|b"),
            row("alpha", variant="bf16/optimal", ratio=None),
        ]
    )
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    summary = dict(zip(lines[0], lines[2], strict=True))
    assert summary == {
        "pass": "all of the CPU, f32, optimal", "networks": "3", "right": "2", "wrong": "0", "unsupported": "0",
        "crash, timeout, memory": "1", "error ≤ 2 × eager's": "100 %", "compiled in time": "50 %",
        "time over eager": "1.00", "≤ 0.9": "50 %", "> 1.0": "1",
    }  # fmt: skip
    assert ["`gamma`", "crash", "compile: a\\|b", "all of the CPU, f32, optimal"] in lines
    order = [line[0] for line in lines if line[0] in ("`alpha`", "`beta`")]
    assert order == ["`beta`", "`alpha`"], "the slowest one comes first, what was not timed has no table"
    assert ["`beta`", "right", "2.0", "9.0", "5.6", "3", "25%", "0%", "100.00", "1.25"] in lines
    assert text.startswith("Measured on a CPU; torch 2.13.")


def test_the_last_record_counts_and_goes_between_the_marks(tmp_path: Path) -> None:
    results, document = tmp_path / "results.jsonl", tmp_path / "coverage.md"
    results.write_text("\n".join(json.dumps(row("alpha", ratio=ratio)) for ratio in (1.5, 0.5)))
    document.write_text(f"before\n{sweep_table.BEGIN}\nold\n{sweep_table.END}\nafter\n")
    for _ in range(2):
        sweep_table.write_table([results], document)
        text = document.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert text.count("`alpha`") == 1 and "0.50" in text and "1.50" not in text
    document.write_text("nothing")
    with pytest.raises(FmtpropError, match=r"coverage\.md must have the lines .* the table goes between them"):
        sweep_table.write_table([results], document)


def test_the_document_has_the_marks() -> None:
    text = sweep_table.DOCUMENT.read_text(encoding="utf-8")
    assert text.index(sweep_table.BEGIN) < text.index(sweep_table.END)
