"""Contenders by name, and a race of a graph in processes."""

from __future__ import annotations

import pytest
import torch

from fmtprop import dnnl
from fmtprop.bench import PEERS
from fmtprop.bench.contenders import OURS, contender, race_in_processes
from fmtprop.errors import FmtpropError
from fmtprop.frontends import load


def test_every_contender_has_a_name_and_a_precision() -> None:
    precisions = {name: contender(name).precision for name in [*OURS, *PEERS]}
    assert precisions.pop("fmtprop-bf16") == precisions.pop("openvino-bf16") == "bf16"
    assert set(precisions.values()) == {"f32"}


def test_unknown_contender() -> None:
    with pytest.raises(FmtpropError, match=r"^unknown contender 'tvm'; known: fmtprop, .*openvino-bf16$"):
        contender("tvm")


def test_bf16_is_refused_where_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another precision must not be timed under bf16's name."""
    monkeypatch.setattr(dnnl, "supports", lambda dtype: dtype != "bf16")
    graph = load("chain")
    with pytest.raises(FmtpropError, match=r"^fmtprop-bf16: oneDNN has no bf16 on this CPU"):
        contender("fmtprop-bf16").prepare(graph, [], torch.get_num_threads())


def test_race() -> None:
    result = race_in_processes(load("chain"), ["torch", "fmtprop"], threads=1, rounds=2, repeats=1)
    assert [entry.name for entry in result.entries] == ["fmtprop", "torch"]
    assert all(entry.agreement.passed and len(entry.milliseconds) == 2 for entry in result.entries)
    assert result["torch"].agreement.error == 0.0, "torch is its own oracle"
    assert {"fmtprop", "onednn", "torch"} <= set(result.environment.versions)
