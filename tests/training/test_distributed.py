"""DistributedDataParallel on gloo: parameters as without fmtprop, in 2 and in 4 processes."""

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
