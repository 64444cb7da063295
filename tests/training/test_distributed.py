"""DistributedDataParallel on gloo, and Ray Train: parameters as without fmtprop, in 2 and in 4 processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("door", ["fp.compile", pytest.param("torch.compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_example_trains_as_pytorch_does(processes, door):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_ddp.py"), "--steps", "4", "--door", door],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{processes} processes, 4 steps" in done.stdout


@pytest.mark.slow
def test_the_example_trains_under_ray():
    pytest.importorskip("ray.train.torch", reason="Ray is not installed")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_ray.py"), "--workers", "2", "--steps", "4"],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 workers, 4 steps" in done.stdout
