"""Models that train in eager PyTorch though the backend was asked for: a warning says so."""

from __future__ import annotations

import pytest

from tests import processes

#: in a process of its own: the warning comes once
PROGRAM = """
import sys, warnings, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("error", message=".*no graph has reached fmtprop.*")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
how = {"backend": "fmtprop", "options": {"tune": "model", "confirm": False}}
parallel = {
    "wrapped": lambda: torch.compile(DistributedDataParallel(module), **how),
    "inside": lambda: DistributedDataParallel(torch.compile(module, **how)),
    "not called": lambda: (torch.compile(module, **how), DistributedDataParallel(module))[1],
}[sys.argv[1]]()
optimiser = torch.optim.SGD(parallel.parameters(), 0.1)
for _ in range(5):
    parallel(torch.randn(3, 4)).sum().backward()
    optimiser.step()
print("quiet")
"""


@pytest.mark.parametrize(("way", "warns"), [("wrapped", True), ("inside", False), ("not called", False)])
def test_parallel_modules_that_dynamo_skips_are_told(way, warns, tmp_path):
    done = processes.run("-c", PROGRAM, way, tmp_path / "store")
    assert ("no graph has reached fmtprop" in done.stderr) == warns, done.stderr[-2000:]
    assert ("quiet" in done.stdout) != warns, done.stderr[-2000:]
