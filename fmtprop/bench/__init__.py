"""Side-by-side benchmarks: other runtimes as peers, and interleaved timing that checks answers first.

This room measures callables on torch tensors; it knows neither graphs nor plans. The other runtimes come with the
extra ``fmtprop[bench]`` and are imported only when their peer is prepared. The measurement itself is
``fmtprop.bench.interleave.interleave``: it is not lifted to this level because its name is its module's.
"""

from __future__ import annotations

from fmtprop.bench.compare import Agreement, compare_outputs
from fmtprop.bench.environment import Environment
from fmtprop.bench.interleave import Benchmark, Entry, Quartiles
from fmtprop.bench.peers import PEERS, Inductor, OnnxRuntime, OpenVINO, Peer, TorchEager, export_onnx, peer

__all__ = [
    "PEERS",
    "Agreement",
    "Benchmark",
    "Entry",
    "Environment",
    "Inductor",
    "OnnxRuntime",
    "OpenVINO",
    "Peer",
    "Quartiles",
    "TorchEager",
    "compare_outputs",
    "export_onnx",
    "peer",
]
