"""`fmtprop bench`."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest

from fmtprop.bench import contenders, peers
from fmtprop.capture import save
from fmtprop.errors import FmtpropError
from tests.cli.command import fmtprop
from tests.compiling.test_bytes import residual_network


def test_bench_against_torch(capsys, tmp_path, monkeypatch):
    honest, results = contenders.race, []

    def once(*args, **how):
        results[:] = results or [honest(*args, **how)]
        return results[0]

    monkeypatch.setattr(contenders, "race", once)
    path, words = tmp_path / "race.json", ("bench", "chain", "--rounds", 1, "--vs", "torch,torch-channels-last")
    code, out, err = fmtprop(capsys, *words, "--report", path)
    assert (code, err) == (0, f"wrote {path}\n")
    assert "speed-up over torch" in out and "│ fmtprop" in out
    data = json.loads(path.read_text())
    assert data["reference"] == "torch"
    assert [entry["name"] for entry in data["entries"]] == ["fmtprop", "torch", "torch-channels-last"]
    assert all(entry["agreement"]["passed"] and entry["latency"]["median"] > 0 for entry in data["entries"])
    assert set(data["environment"]) >= {"cpu", "isa", "threads", "versions"}
    code, out, err = fmtprop(capsys, *words, "--json")
    assert (code, err) == (0, "") and json.loads(out) == data


@pytest.mark.peers
def test_bench_of_a_quantized_file(capsys, tmp_path):
    for name in ("onnxruntime", "openvino"):
        pytest.importorskip(name)
    path, race = tmp_path / "quantized.onnx", tmp_path / "race.json"
    save(residual_network(zero=40), path)
    words = ("bench", path, "--rounds", 1, "--vs", "onnxruntime,openvino", "--report", race)
    assert fmtprop(capsys, *words)[0] == 0
    # each rounds elsewhere, by a step of the result
    assert all(entry["agreement"]["passed"] for entry in json.loads(race.read_text())["entries"])


def test_special_values_reach_the_race(capsys, monkeypatch):
    def stopped(graph, entrants, **how):
        raise FmtpropError(f"special values: {entrants[0].how.special_values}")

    monkeypatch.setattr(contenders, "race", stopped)
    monkeypatch.setitem(sys.modules, "fmtprop.bench.training", None)  # which loads slowly: nothing trains here
    assert "special values: exact" in fmtprop(capsys, "bench", "chain", "--special-values", "exact").err


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_missing_peer_names_the_extra(capsys, monkeypatch, name):
    def gone(package: str) -> object:
        if package == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(package)

    monkeypatch.setattr(peers, "import_module", gone)
    code, out, err = fmtprop(capsys, "bench", "chain", "--vs", f"torch,{name}")
    assert (code, out) == (2, "")
    assert err == f"error: peer {name}: package {name!r} is not installed; pip install 'fmtprop[bench]'\n"


def test_unknown_peer(capsys):
    code, _, err = fmtprop(capsys, "bench", "chain", "--vs", "tflite")
    assert code == 2
    assert err.startswith("error: unknown contender 'tflite'; known: fmtprop, fmtprop-VALUE")


class Wrong:
    name = "wrong"

    def prepare(self, module, example_inputs, threads):
        return lambda *inputs: module(*inputs) + 1

    def versions(self):
        return {"wrong": "1.0"}


def test_a_runtime_that_disagrees_is_not_timed(capsys, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "wrong", Wrong)
    code, out, err = fmtprop(capsys, "bench", "chain", "--vs", "torch,wrong", "--rounds", 1)
    assert code == 1
    assert err.startswith("error: wrong disagrees with the oracle and was not timed: output 0: largest relative error")
    assert "not timed" in out
