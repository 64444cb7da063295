"""DistributedDataParallel on gloo, and Ray Train: parameters as without fmtprop, in 2 and in 4 processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_trains_as_pytorch_does():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}

    def trained(rank: int) -> subprocess.CompletedProcess[str]:
        return processes.run(ROOT / "examples" / "train_ddp.py", "--steps", 4, RANK=str(rank), **where)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(trained, range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-2000:]
    assert "2 processes, 4 steps" in first.stdout


@pytest.mark.slow
@pytest.mark.parametrize("door", ["fp.compile", "torch.compile"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_example_trains_under_torchrun(count, door):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_ddp.py"), "--steps", "4", "--door", door],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{count} processes, 4 steps" in done.stdout


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
