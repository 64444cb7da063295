from __future__ import annotations

from pathlib import Path

import pytest

from fmtprop.tuning.cache import TuningCache
from fmtprop.tuning.peaks import Peaks, peaks


@pytest.fixture(scope="session")
def measured_peaks(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    return peaks(TuningCache(tmp_path_factory.mktemp("peaks") / "tuning.txt"))


@pytest.fixture
def cache(tmp_path: Path, measured_peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> TuningCache:
    """An empty cache, on a machine whose peaks are known."""
    monkeypatch.setattr("fmtprop.tuning.costs.peaks", lambda _: measured_peaks)
    return TuningCache(tmp_path / "tuning.txt")
