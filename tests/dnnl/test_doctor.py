from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fmtprop import dnnl
from fmtprop.dnnl import doctor
from fmtprop.errors import ShapeError


def test_diagnosis_of_this_machine() -> None:
    diagnosis = doctor.diagnose()
    library = dnnl.lib()
    assert diagnosis.ok and diagnosis.version == ".".join(map(str, library.version))
    assert [finding.path for finding in diagnosis.findings if finding.state == "chosen"] == [library.path]
    assert diagnosis.data_types["f32"] is True
    assert diagnosis.cpus == len(os.sched_getaffinity(0)) and diagnosis.cpu
    assert diagnosis.isa == library.isa and diagnosis.threads == library.threads
    text = diagnosis.to_text()
    for expected in (library.path, library.isa, f"v{diagnosis.version}", "data types", "PyTorch"):
        assert expected in text
    assert json.loads(json.dumps(diagnosis.to_dict()))["runtime"] == library.runtime


def test_nothing_usable_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom fmtprop.dnnl.doctor import diagnose as d\nprint(d().to_text())"
    )
    environment = {**os.environ, "FMTPROP_DNNL_LIBRARY": "/nowhere/libdnnl.so", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr
    assert "oneDNN           not usable" in result.stdout
    assert "/nowhere/libdnnl.so [environment variable FMTPROP_DNNL_LIBRARY]" in result.stdout
    assert "pip install onednn-cpu-gomp" in result.stdout
    assert "OMP_NUM_THREADS=1" in result.stdout
    assert "not installed" in result.stdout


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)

    class Fake:
        runtime, threads, isa, torch, version = "OMP", 8, "avx2", "not installed", (3, 2, 0)

    types = {"f32": True, "bf16": False}
    advice = "\n".join(doctor.advice_for(Fake(), 0, types, ("a/libgomp.so.1", "b/libiomp5.so"), 2))  # type: ignore[arg-type]
    for expected in (
        "pip install torch",
        'dtype="bf16" needs AVX512-BF16',
        "more than one OpenMP runtime",
        "set OMP_NUM_THREADS=2",
        "OMP_WAIT_POLICY=passive",
    ):
        assert expected in advice
    Fake.runtime = "SYCL"
    assert "submits through SYCL" in "\n".join(doctor.advice_for(Fake(), 2, types, (), 2))  # type: ignore[arg-type]
    Fake.runtime, Fake.threads = "OMP", 2
    assert "share one OpenMP runtime" in "\n".join(doctor.advice_for(Fake(), 1, types, (), 2))  # type: ignore[arg-type]


def test_supports() -> None:
    assert dnnl.supports("f32") and not dnnl.supports("f64")
    # kernels of avx512_core compute in bf16 by instructions for f32: not faster than f32
    has_instruction = dnnl.lib().includes("avx512_core_bf16") or "2_vnni_2" in dnnl.lib().isa
    assert dnnl.supports("bf16") == has_instruction
    with pytest.raises(ShapeError, match=r"unknown data type 'f31'"):
        dnnl.supports("f31")
