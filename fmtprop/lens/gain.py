"""A gain that is measured in turns, with an interval for the noise of the machine. Its results need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: ways to run a module, except eager
WAYS = ("channels_last", "mkldnn", "inductor", "fmtprop")
#: turns before an interval is believed, and time for further turns until it is narrow
LEAST_TURNS, LONGEST_SECONDS = 10, 10.0
#: half the width of a narrow interval, as a share of the gain or of a run
_SHARE_OF_GAIN, _SHARE_OF_RUN = 0.1, 0.01
#: share of the turns that is left out at either end: stalls. Medians leave out too much: on two busy cores the delays
#: that each whole run has were in less than half of the turns of an operator, and a third of SqueezeNet's gain was lost
_TRIMMED_SHARE = 0.1
#: samples of the turns from which the interval is computed
_SAMPLES = 200


@dataclass(frozen=True)
class Gain:
    """Seconds that a run saves."""

    #: the mean over the turns, without the tenth at either end; negative for a loss
    seconds: float
    #: `low_seconds`, `high_seconds`: an interval of 95 %
    low_seconds: float
    high_seconds: float

    def __str__(self) -> str:
        """Return milliseconds, for a terminal."""
        low, middle, high = (f"{one * 1e3:.3f}" for one in (self.low_seconds, self.seconds, self.high_seconds))
        return f"{middle} ms [{low}, {high}]"

    def is_narrow(self, run_seconds: float) -> bool:
        """Return whether more turns would tell little more."""
        return self.high_seconds - self.low_seconds <= 2 * max(
            _SHARE_OF_GAIN * abs(self.seconds), _SHARE_OF_RUN * run_seconds
        )


@dataclass(frozen=True)
class Measurement:
    """A way to run a model."""

    #: ``eager``, ``channels_last``, ``mkldnn``, ``inductor`` or ``fmtprop``
    name: str
    #: mean time of a run, without the tenth of the turns at either end; 0 if it failed
    seconds: float = 0.0
    #: seconds that a run saves, which is eager's time less its own; None for eager, and if it failed
    gain: Gain | None = None
    #: reorders that oneDNN executed in a run
    reorders: int = 0
    reorder_seconds: float = 0.0
    error: float = 0.0
    #: the reason why the model cannot run in this way; empty if it can
    failure: str = ""


def gain_of(turns: Sequence[Sequence[float]]) -> Gain:
    """Return the sum of the parts' trimmed means, with the interval of sums over random samples of the turns.

    >>> gain_of([[1.0, 3.0], [1.0, 5.0], [1.0, 4.0]]).seconds
    5.0
    """
    import torch

    parts = min(map(len, turns))
    if not parts:
        return Gain(0.0, 0.0, 0.0)
    seconds = torch.tensor([turn[:parts] for turn in turns], dtype=torch.float64).reshape(len(turns), parts)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(turns), (_SAMPLES, len(turns)), generator=generator)
    sums = torch.stack([_sum_of_means(seconds[pick]) for pick in picks])
    low, high = sums.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Gain(_sum_of_means(seconds).item(), low, high)


def mean_of(times: Sequence[float]) -> float:
    """Return the mean time of a run, without the tenth of the turns at either end.

    >>> mean_of([1.0] * 9 + [9.0])
    1.0
    """
    import torch

    return _sum_of_means(torch.tensor([[one] for one in times], dtype=torch.float64)).item()


def _sum_of_means(seconds: torch.Tensor) -> torch.Tensor:
    trimmed = int(_TRIMMED_SHARE * len(seconds))
    return seconds.sort(dim=0).values[trimmed : len(seconds) - trimmed].mean(dim=0).sum()
