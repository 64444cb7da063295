"""Train one model in several processes: ``torchrun --nproc-per-node 2 examples/train_ddp.py``.

Each process has its share of every batch; DistributedDataParallel averages the gradients, on gloo. The module is
compiled first, by either door, and the result is wrapped.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fmtprop as fp


def network() -> nn.Module:
    """Return a small classifier of images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images whose brightest quarter is their label."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, size, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 4, (count, size), generator=generator)
    for quarter in range(4):
        rows, columns = divmod(quarter, 2)
        bright = torch.zeros(16, 16)
        bright[8 * rows : 8 * rows + 8, 8 * columns : 8 * columns + 8] = 1
        images += (labels == quarter)[:, :, None, None, None] * bright
    return list(zip(images, labels, strict=True))


def train(door: str, steps: int, size: int) -> list[float]:
    """Return the sum of each parameter after some steps, the same in all processes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, share = network(), size // world
    compiled: Any = model
    if door == "fp.compile":
        compiled = fp.compile(model, torch.zeros(share, 3, 16, 16), training=True, tune="model", confirm=False)
    elif door == "torch.compile":
        compiled = torch.compile(model, backend="fmtprop", options={"tune": "model", "confirm": False})
    parallel = DistributedDataParallel(compiled)
    optimiser = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    for images, labels in batches(steps, size):
        mine = slice(rank * share, rank * share + share)
        optimiser.zero_grad()
        nn.functional.cross_entropy(parallel(images[mine]), labels[mine]).backward()
        optimiser.step()
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def compare(door: str, steps: int, size: int) -> float:
    """Train with fmtprop and with PyTorch; return the largest difference of the parameters, which must be small."""
    ours, theirs = (train(one, steps, size) for one in (door, "eager"))
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if largest > 1e-3:
        raise RuntimeError(f"the parameters are not those of PyTorch: they differ by {largest:.1e}")
    return largest


def main() -> None:
    """Train in this process, which is one of several; say how far the parameters are from PyTorch's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=8, help="images of a batch, over all processes")
    parser.add_argument("--door", default="fp.compile", choices=("fp.compile", "torch.compile"))
    given = parser.parse_args()
    dist.init_process_group("gloo")
    largest = compare(given.door, given.steps, given.size)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {given.steps} steps: parameters differ by {largest:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
