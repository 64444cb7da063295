"""What no machine can do is refused by every command, before anything is drawn or measured."""

from __future__ import annotations

import json

import pytest
import torch

from fmtprop.capture import load
from tests.cli.command import fmtprop


def _graph(*rows, inputs=((1, 8),)):
    nodes = [{"name": f"x{i}", "op": "input", "results": [_type(*dims)]} for i, dims in enumerate(inputs)]
    head = {"format": "fmtprop-graph", "version": 1, "name": "huge", "structure": ""}
    return json.dumps({**head, "nodes": [*nodes, *rows]})


def _type(*dims):
    return {"dims": dims, "dtype": "f32"}


def _output(src):
    return {"name": f"out_{src}", "op": "output", "inputs": {"src": src}, "results": []}


def _node(name, op, src, attrs, *dims):
    return {"name": name, "op": op, "inputs": {"src": src}, "attrs": attrs, "results": [_type(*dims)]}


def _relu(src, *dims):
    return _node("r", "eltwise", src, {"alg": "relu"}, *dims)


def _constant(name, *dims, mean=0.0):
    init = {"kind": "normal", "seed": 1, "mean": mean, "std": 1.0}
    return {"name": name, "op": "constant", "results": [_type(*dims)], "data": {"init": init}}


HUGE = {
    "one input": _graph(_relu("x0", 2**20, 2**20), _output("r"), inputs=[(2**20, 2**20)]),
    # each fits, all together do not
    "weights": _graph(
        *(_constant(f"w{i}", 2**16, 2**17, mean=i) for i in range(12)), *(_output(f"w{i}") for i in range(12))
    ),
    "one node": _graph(
        _node("e", "expand", "x0", {"shape": [2**40, 8]}, 2**40, 8),
        _relu("e", 2**40, 8),
        _node("s", "slice", "r", {"starts": [0, 0], "sizes": [1, 1], "steps": [1, 1]}, 1, 1),
        _output("s"),
    ),
}


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("words", [["run"], ["report"], ["bench"], ["tune"], ["tune", "--again"]], ids=" ".join)
def test_a_model_that_no_memory_holds(capsys, tmp_path, monkeypatch, words, what):
    def draw(*_: object, **__: object) -> None:
        raise AssertionError("drawn, although there is no room")

    path = tmp_path / "huge.json"
    path.write_text(HUGE[what])
    load(path)
    for name in ("randn", "randint"):
        monkeypatch.setattr(torch, name, draw)
    monkeypatch.setattr("fmtprop.ir.initialiser.Initialiser.materialise", draw)
    command, *options = words
    code, out, err = fmtprop(capsys, command, path, *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: model huge needs ") and err.count("\n") == 1
    assert "GB of memory at once, this machine has" in err


def test_show_needs_no_memory(capsys, tmp_path):
    path = tmp_path / "huge.json"
    path.write_text(HUGE["one input"])
    assert fmtprop(capsys, "show", path, "-s", "imported").code == 0


@pytest.mark.parametrize("command", ["run", "report", "bench"])
def test_more_runs_than_anyone_waits_for(capsys, command):
    code, out, err = fmtprop(capsys, command, "chain", "-n", 100_000_000)
    assert (code, out) == (2, "") and "'-n'" in err and "100000" in err
