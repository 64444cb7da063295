"""The recorded environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fmtprop.bench import Environment
from fmtprop.system import machine


def test_linux_fields_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu sse4_2 avx2 amx_tile avx512f\n\n"
        "processor\t: 1\nmodel name\t: Another\n"
    )
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    environment = Environment.capture(threads=3, versions={"onnxruntime": "1.2"})
    assert environment.cpu == "Some CPU @ 2.0GHz"
    assert environment.isa == ("sse4_2", "avx2", "avx512f", "amx_tile")
    assert environment.threads == 3
    assert environment.cpus >= 1
    assert environment.versions["onnxruntime"] == "1.2"
    assert environment.versions["torch"] == torch.__version__


def test_other_systems_give_a_name_and_no_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "absent")
    environment = Environment.capture()
    assert environment.cpu and environment.isa == ()
    assert environment.threads == torch.get_num_threads()
