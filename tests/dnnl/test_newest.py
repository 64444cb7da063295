"""The extra `newest`: its wheel's oneDNN is taken beside the default one, and nothing of the wheel is imported."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from fmtprop.dnnl import doctor

diagnosis = doctor.diagnose()
others = [finding for finding in diagnosis.findings if finding.state != "chosen"]
assert [(other.state, other.reason) for other in others] == [("not tried", "v3.2.0, not newer")], others
assert diagnosis.data_types["f32"] and "paddle" not in sys.modules
print(diagnosis.version, diagnosis.runtime)
"""


@pytest.mark.slow
def test_the_newer_library_is_taken(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "paddlepaddle", "onednn-cpu-gomp", "numpy"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        pytest.skip(f"the package index does not offer the wheels here: {done.stderr[-300:]}")
    environment = {name: value for name, value in os.environ.items() if name not in ("DNNLROOT", "CONDA_PREFIX")}
    environment |= {"PYTHONPATH": str(ROOT), "FMTPROP_DNNL_LIBRARY": ""}
    command = [python, "-W", "error", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    version, runtime = result.stdout.split()
    assert tuple(map(int, version.split("."))) >= (3, 6, 2) and runtime == "OMP"
