"""What the project aims at, and whether a measurement reaches it. Measures nothing.

A measurement is the time of others in multiples of fmtprop's, or a share of the machine's peak: more is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.models import TEN
from benchmarks.peak import PEAK, PEAK_FLOPS
from fmtprop.bench import Benchmark, Entry, Quartiles
from fmtprop.bench.contenders import REFERENCE, contender

__all__ = ["Result", "Verdict", "geometric_mean", "judge", "judge_all"]

#: (model, batch, dtype, peer) -> (at least this many times fmtprop's time, wording)
_PEERS = {
    ("resnet50", 1, "f32", "openvino"): (1 / 1.15, "at most 1.15 × OpenVINO"),
    ("resnet50", 1, "f32", "onnxruntime"): (1 / 1.1, "at most 1.1 × ONNX Runtime"),
    ("resnet50", 1, "f32", "torch"): (1.4, "at least 1.4 × faster than torch eager"),
}
#: where the peers lose time between the convolutions
_EASY = ("efficientnet_b0", "shufflenet_v2")
_PEAK_SHARE = 0.8


@dataclass(frozen=True)
class Result:
    """A benchmark of one model."""

    model: str
    batch: int
    dtype: str
    flops: int
    #: figures, fmtprop's under the name ``"fmtprop"``
    benchmark: Benchmark

    def times_ours(self, entry: Entry) -> Quartiles | None:
        """Return a contender's time in multiples of fmtprop's, round by round; ``None`` unless both were timed."""
        ours = self.benchmark[REFERENCE]
        if not (ours.milliseconds and entry.milliseconds):
            return None
        return Quartiles.of([theirs / own for theirs, own in zip(entry.milliseconds, ours.milliseconds, strict=True)])

    @property
    def best_peer(self) -> Entry | None:
        """The fastest other runtime that computes at least as exactly as fmtprop; ``None`` if none was timed."""
        peers = [
            entry
            for entry in self.benchmark.entries
            if entry.latency is not None
            and entry.name != PEAK
            and not entry.name.startswith(REFERENCE)
            and (self.dtype == "bf16" or contender(entry.name).precision == "f32")
        ]
        return min(peers, key=lambda entry: entry.latency.median if entry.latency else math.inf, default=None)

    @property
    def share_of_peak(self) -> Quartiles | None:
        """Fmtprop's operations per second over the peak's, round by round; ``None`` without a peak."""
        names = {entry.name for entry in self.benchmark.entries}
        ratio = self.times_ours(self.benchmark[PEAK]) if PEAK in names else None
        if ratio is None:
            return None
        scale = self.flops / PEAK_FLOPS
        return Quartiles(ratio.low * scale, ratio.median * scale, ratio.high * scale)

    @property
    def peak(self) -> float | None:
        """Operations per second of oneDNN's best kernel, the median of the rounds."""
        found = [entry.latency for entry in self.benchmark.entries if entry.name == PEAK]
        return PEAK_FLOPS / found[0].median * 1e3 if found and found[0] else None


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met."""

    wording: str
    least: float
    #: the measurement; ``None`` if there is none
    measured: Quartiles | None

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the target; ``None`` if nothing was measured."""
        # the last digits of a quotient are no reason to miss
        return None if self.measured is None else self.measured.median >= self.least * (1 - 1e-9)

    def __str__(self) -> str:
        if self.measured is None:
            return f"target {self.wording}: not measured"
        word = "met" if self.met else "MISSED"
        spread = f"{self.measured.median:.3f} [{self.measured.low:.3f}, {self.measured.high:.3f}]"
        return f"target {self.wording}: {word}, {spread} where {self.least:.3f} is enough"


def judge(result: Result) -> list[Verdict]:
    """Compare the figures of one model with its targets.

    Result: one for each target whose peer, or the peak, took part.
    """
    verdicts = []
    for entry in result.benchmark.entries:
        target = _PEERS.get((result.model, result.batch, result.dtype, entry.name))
        if target:
            verdicts.append(Verdict(target[1], target[0], result.times_ours(entry)))
    best = result.best_peer
    if best is not None and result.model in TEN:
        ratio = result.times_ours(best)
        verdicts.append(Verdict(f"at most 1.02 × the best peer ({best.name})", 1 / 1.02, ratio))
        if result.model in _EASY:
            verdicts.append(Verdict(f"at least 1.15 × faster than the best peer ({best.name})", 1.15, ratio))
    if result.peak is not None and (result.model, result.batch, result.dtype) == ("resnet50", 1, "f32"):
        verdicts.append(Verdict(f"at least {_PEAK_SHARE:.0%} of the peak", _PEAK_SHARE, result.share_of_peak))
    return verdicts


def judge_all(results: Sequence[Result]) -> Verdict | None:
    """Compare the geometric mean over the best peers with its target.

    Result: ``None`` unless all ten models were measured, or if there is no target for the batch.
    """
    least = {(1, "f32"): 1.05, (1, "bf16"): 1.08, (16, "f32"): 1.05, (16, "bf16"): 1.05}
    kind = {(result.batch, result.dtype) for result in results}
    if len(kind) != 1 or not kind <= set(least) or {result.model for result in results} < set(TEN):
        return None
    wanted = least[kind.pop()]
    return Verdict(f"geometric mean at least {wanted} × faster than the best peers", wanted, geometric_mean(results))


def geometric_mean(results: Sequence[Result], name: str = "") -> Quartiles | None:
    """Return the geometric mean over the models of a contender's time in multiples of fmtprop's.

    `name`: the contender; each model's best peer if not given. Result: of the medians, and of the lower and the upper
    quartiles. ``None`` unless all were timed.
    """
    ratios = []
    for result in results:
        entry = result.benchmark[name] if name else result.best_peer
        ratio = result.times_ours(entry) if entry is not None else None
        if ratio is None:
            return None
        ratios.append(ratio)
    if not ratios:
        return None
    return Quartiles(*(_mean([getattr(ratio, part) for ratio in ratios]) for part in ("low", "median", "high")))


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
