"""Train one model in several workers of Ray Train: ``python examples/train_ray.py --workers 2``.

Ray starts the workers and joins them in a process group on gloo; each then trains as in ``train_ddp.py``.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from train_ddp import compare


def work(given: dict[str, Any]) -> None:
    """Train in one worker, with fmtprop and with PyTorch; report the difference of the parameters."""
    ray.train.report({"difference": compare(given["door"], given["steps"], given["size"])})


def main() -> None:
    """Start the workers; a worker that fails is an error here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=8, help="images of a batch, over all workers")
    parser.add_argument("--door", default="fp.compile", choices=("fp.compile", "torch.compile"))
    given = parser.parse_args()
    trainer = TorchTrainer(
        work,
        train_loop_config={"door": given.door, "steps": given.steps, "size": given.size},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, resources_per_worker={"CPU": 1}),
    )
    trainer.fit()
    print(f"{given.workers} workers, {given.steps} steps: parameters are PyTorch's")


if __name__ == "__main__":
    main()
