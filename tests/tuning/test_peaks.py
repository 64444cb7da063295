from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import pytest

from fmtprop import dnnl
from fmtprop.layout import DataType
from fmtprop.store import Store
from fmtprop.tuning import peaks as module
from fmtprop.tuning.peaks import FOOTPRINTS, MOVED, Peaks, peaks


def recorded(peaks: Peaks, footprints: Sequence[int] = FOOTPRINTS) -> dict[str, float]:
    """Return figures under the names by which they are measured."""
    found = {f"flops {dtype}": figure for dtype, figure in peaks.flops.items()}
    found |= {f"reading {size}": peaks.reading[size] for size in footprints}
    found |= {f"streaming {size}": peaks.streaming[size] for size in footprints}
    found |= {f"moving {size}": figure for size, figure in peaks.moving.items()}
    return found | {"copying": peaks.copying, "call": peaks.call, "functions": peaks.functions}


def test_figures_are_possible(measured_peaks: Peaks) -> None:
    figures = [figure for name, figure in recorded(measured_peaks).items() if name != "call"]
    assert all(isfinite(figure) and 1e6 < figure < 1e16 for figure in figures)
    assert 0 < measured_peaks.call < 1e-1
    assert (DataType.BF16 in measured_peaks.flops) == dnnl.supports("bf16")


def test_what_is_farther_away_is_not_read_faster(measured_peaks: Peaks) -> None:
    sizes = range(1 << 20, 300 << 20, 3 << 20)
    for rate in (measured_peaks.rate, partial(measured_peaks.rate, by_kernel=True), measured_peaks.moves):
        rates = [rate(size) for size in sizes]
        assert all(near >= far * (1 - 1e-12) for near, far in pairwise(rates))
    assert measured_peaks.rate(sizes[-1]) == measured_peaks.memory == measured_peaks.reading[FOOTPRINTS[-1]]
    assert measured_peaks.moves(sizes[-1]) == measured_peaks.moving[MOVED[-1]]
    assert measured_peaks.moves(1) == measured_peaks.copying


def test_they_are_measured_once(tmp_path: Path, measured_peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(types: list[DataType], footprints: tuple[int, ...]) -> dict[str, float]:
        calls.append(types)
        return recorded(measured_peaks)

    monkeypatch.setattr(module, "measure", measure)
    path = tmp_path / "store.sqlite"
    assert peaks(Store(path)) == measured_peaks == peaks(Store(path))
    assert len(calls) == 1


def test_only_as_much_memory_is_read_as_matters(
    tmp_path: Path, measured_peaks: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def measure(types: list[DataType], footprints: tuple[int, ...]) -> dict[str, float]:
        calls.append(footprints)
        return {
            name: figure * len(calls) if name.startswith(("flops", "reading")) else figure
            for name, figure in recorded(measured_peaks, footprints).items()
        }

    monkeypatch.setattr(module, "measure", measure)
    path, (near, middle, far, farthest) = tmp_path / "store.sqlite", FOOTPRINTS
    small = peaks(Store(path), near + 1)
    assert calls == [(near, middle)] and small.reading.keys() == {near, middle}
    assert small.memory == small.rate(far) == measured_peaks.reading[middle]
    assert peaks(Store(path), 1) == small and len(calls) == 1
    large = peaks(Store(path))
    assert calls[1:] == [(far, farthest)], "what was known is not measured again"
    assert large.flops == small.flops, "what was known stays as it was"
    beyond = (min(2 * measured_peaks.reading[size], small.reading[middle]) for size in (far, farthest))
    assert large.reading == small.reading | dict(zip((far, farthest), beyond, strict=True))
    assert peaks(Store(path), 1) == large and len(calls) == 2


def test_what_no_machine_has_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(types: list[DataType], footprints: tuple[int, ...]) -> dict[str, float]:
        busy = {f"flops {dtype}": 1e6 for dtype in types} | {f"moving {size}": 1e6 for size in MOVED}
        busy |= {f"{kind} {size}": 1e6 for kind in ("reading", "streaming") for size in FOOTPRINTS}
        return busy | {"copying": 1e6, "call": 0.1, "functions": 1e6}

    monkeypatch.setattr(module, "measure", measure)
    store = Store(tmp_path / "store.sqlite")
    found = peaks(store)
    assert found.flops[DataType.F32] > 1e9 and found.memory >= 1e9 and found.copying >= 1e9 and found.call < 0.01
    assert len(store) == 0


def test_a_machine_that_cannot_keep_them_gets_them_with_a_warning(
    tmp_path: Path, measured_peaks: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = recorded(measured_peaks)
    monkeypatch.setattr(module, "measure", lambda types, footprints: known)
    blocker = tmp_path / "file"
    blocker.touch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert peaks(Store(blocker / "store.sqlite")) == measured_peaks
    assert len(caught) == 1


class Clock:
    """A machine that is disturbed at first: arithmetic is slower by a factor until a time. An attempt takes 20 ms."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, until: float, factor: float, rates: Sequence[float] = ()
    ) -> None:
        self.seconds, self.until, self.factor = 0.0, until, factor
        self.rates = chain(rates, repeat(3e10))
        measured = partial(module.measure, attempt=self.attempt, now=lambda: self.seconds, pause=self.wait)
        monkeypatch.setattr(module, "measure", measured)

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def attempt(self, types: list[DataType], footprints: tuple[int, ...], memory: object) -> dict[str, float]:
        slower = self.factor if self.seconds < self.until else 1.0
        self.seconds += 0.02
        found = {f"flops {dtype}": 2e11 / slower for dtype in types} | {f"moving {size}": 3e10 for size in MOVED}
        found |= {f"{kind} {size}": 3e10 for kind in ("reading", "streaming") for size in footprints}
        found |= {"copying": 6e10, "call": 2e-6 * slower, "functions": 2e9}
        return found | {f"reading {FOOTPRINTS[1]}": next(self.rates)}


def test_one_disturbed_moment_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, until=0.1, factor=3.0)
    found = peaks(Store(tmp_path / "store.sqlite"))
    assert found.flops[DataType.F32] == 2e11 and found.call == 2e-6
    assert clock.seconds < 0.5


def test_one_figure_that_no_other_attempt_reaches_is_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, until=0.01, factor=0.1)  # the first attempt is ten times as fast as all others
    found = peaks(Store(tmp_path / "store.sqlite"))
    assert found.flops[DataType.F32] == 2e11 and found.call == 2e-6
    assert clock.seconds < 0.8


def test_footprints_that_only_sometimes_fit_into_the_cache_take_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, until=60.0, factor=1.0, rates=(3.0e10, 4.2e10, 3.3e10))
    assert peaks(Store(tmp_path / "store.sqlite")).reading[FOOTPRINTS[1]] == 3e10, "limited by the smaller footprint"
    assert clock.seconds < 0.2


def test_a_long_disturbance_is_not_remembered_where_no_machine_is_so_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = Clock(monkeypatch, until=60.0, factor=16.0), Store(tmp_path / "store.sqlite")
    assert peaks(store).flops[DataType.F32] >= 16e9 and len(store) == 0
    clock.wait(60.0)
    assert peaks(store).flops[DataType.F32] == 2e11 and len(store) > 0


def test_figures_that_a_run_disproved_are_replaced_by_better_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = Clock(monkeypatch, until=60.0, factor=3.0), Store(tmp_path / "store.sqlite")
    assert not module.improve(store), "there is nothing to improve"
    assert peaks(store).flops[DataType.F32] == 2e11 / 3
    assert not module.improve(store)
    clock.wait(60.0)
    assert module.improve(store) and not module.improve(store)
    clock.until = clock.seconds + 60.0
    assert not module.improve(store), "what is worse is noise"
    assert peaks(store).flops[DataType.F32] == 2e11 and peaks(store).call == 2e-6


def test_arithmetic_of_a_type_is_measured_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measure(types: list[DataType], footprints: tuple[int, ...]) -> dict[str, float]:
        calls.append((types, footprints))
        found = {f"flops {dtype}": 1e11 * len(calls) for dtype in types} | {f"moving {n}": 2e10 for n in MOVED}
        found |= {f"{kind} {n}": 2e10 for kind in ("reading", "streaming") for n in footprints}
        return found | {"copying": 4e10, "call": 3e-6, "functions": 2e9}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module.dnnl, "supports", lambda dtype: dtype is DataType.BF16)
    store = Store(tmp_path / "store.sqlite")
    found = peaks(store)
    assert calls == [([DataType.F32], FOOTPRINTS)] and list(found.flops) == [DataType.F32, DataType.BF16]
    assert [found.flops[DataType.BF16], found.flops.get(DataType.F16), found.flops[DataType.F32]] == [2e11, None, 1e11]
    assert calls[1:] == [([DataType.BF16], ())], "once, and arithmetic alone"
    assert peaks(store).flops[DataType.BF16] == 2e11 and len(calls) == 2


@pytest.mark.parametrize(
    ("isa", "parts", "times"),
    [("avx2", (), 2), ("avx512_core_vnni", ("avx512_core_vnni",), 4), ("avx512_core_amx", ("avx512_core_vnni",), 16)],
)
def test_bytes_are_multiplied_faster_than_f32(
    monkeypatch: pytest.MonkeyPatch, isa: str, parts: tuple[str, ...], times: int
) -> None:
    library = SimpleNamespace(lanes=8, threads=1, has_tiles=isa.endswith("amx"), includes=parts.__contains__)
    monkeypatch.setattr(module.dnnl, "lib", lambda: library)
    monkeypatch.setattr(module.dnnl, "supports", lambda dtype: True)
    found = module.nominal_peaks().flops
    assert found[DataType.U8] == times * found[DataType.F32]
