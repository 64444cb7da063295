from __future__ import annotations

from pathlib import Path

import pytest

from fmtprop.store import Store
from fmtprop.tuning.peaks import Peaks, peaks


@pytest.fixture(scope="session")
def measured_peaks(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    return peaks(Store(tmp_path_factory.mktemp("peaks") / "store.sqlite"))


@pytest.fixture
def store(tmp_path: Path, measured_peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, on a machine whose peaks are known."""
    monkeypatch.setattr("fmtprop.tuning.costs.peaks", lambda *_: measured_peaks)
    return Store(tmp_path / "store.sqlite")
