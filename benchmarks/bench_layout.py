"""Speed of the layout room, each figure after a correctness check in the same run.

``python benchmarks/bench_layout.py`` prints: unpack and pack of a 64×256×56×56 f32 buffer against numpy's own
transpose-copy of the same bytes (target: within 3 times), creating a descriptor from a tag (target: under 20 µs), and
using descriptors as dictionary keys. It exits with 1 where a target is missed.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable

import numpy as np

from fmtprop.layout import MemoryDesc, convert, pack, unpack
from fmtprop.system.machine import cpu_model

DIMS = (64, 256, 56, 56)


def seconds(call: Callable[[], object], repeat: int = 5, number: int = 1) -> float:
    """Return the best time of one call: other work on the machine only ever adds, so batches are short."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, (time.perf_counter() - start) / number)
    return best


def bench_buffers() -> bool:
    """Time pack and unpack of nChw16c against numpy's transpose-copy."""
    md = MemoryDesc(DIMS, "f32", tag="nChw16c")
    buffer = np.random.default_rng(0).random(md.nbytes // 4, np.float32)
    n, c, h, w = DIMS
    blocks = buffer.reshape(n, c // 16, h, w, 16)

    def numpy_copy() -> np.ndarray:
        return np.ascontiguousarray(blocks.transpose(0, 1, 4, 2, 3))

    array = unpack(buffer, md)
    if not np.array_equal(array, numpy_copy().reshape(DIMS)) or not np.array_equal(pack(array, md), buffer):
        raise SystemExit("pack or unpack is wrong: no figures")
    base = seconds(numpy_copy)
    print(f"numpy transpose-copy of {md.nbytes / 2**20:.0f} MiB: {base * 1e3:.0f} ms")
    ratios = {}
    for name, call in {
        "unpack": lambda: unpack(buffer, md),
        "pack": lambda: pack(array, md),
        "convert to nhwc": lambda: convert(buffer, md, MemoryDesc(DIMS, "f32", tag="nhwc")),
    }.items():
        ratios[name] = seconds(call) / base
        print(f"  {name}: {ratios[name]:.2f} × numpy")
    return ratios["unpack"] <= 3


def bench_descriptors() -> bool:
    """Time creation, hashing and equality of descriptors."""
    worst = 0.0
    for tag in ("nchw", "nhwc", "nChw16c", "OIhw4i16o4i"):
        dims = iter(range(1, 10**9))
        # Other dims each time: no cache of equal descriptors can help.
        one = seconds(
            lambda tag=tag, dims=dims: MemoryDesc((next(dims), 17, 5, 7), "f32", tag=tag), repeat=200, number=100
        )
        worst = max(worst, one)
        print(f"descriptor from {tag}: {one * 1e6:.1f} µs")
    keys = [MemoryDesc((n, 17, 5, 7), tag="nChw16c") for n in range(1, 1001)]
    table = {key: n for n, key in enumerate(keys)}
    twins = [MemoryDesc((n, 17, 5, 7), tag="nChw16c") for n in range(1, 1001)]
    if [table[twin] for twin in twins] != list(range(1000)):
        raise SystemExit("equal descriptors are different keys: no figures")
    lookup = seconds(lambda: [table[twin] for twin in twins], repeat=50) / 1000
    print(f"look-up in a dict of 1000 descriptors: {lookup * 1e6:.2f} µs")
    return worst < 20e-6


def main() -> int:
    """Run all and tell whether the targets are met."""
    print(f"{cpu_model()}; Python {platform.python_version()}, numpy {np.__version__}")
    met = [bench_buffers(), bench_descriptors()]
    print("targets met" if all(met) else "targets MISSED")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
