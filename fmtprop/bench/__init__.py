"""Benchmarks: other runtimes as peers, and interleaved timing after a check of the outputs.

The extra ``fmtprop[bench]`` installs the other runtimes. They are imported only when their peer is prepared.
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
