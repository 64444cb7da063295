"""Fixtures of all tests and examples: one cache for all processes of a run, and captures that no test inherits."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Other programs may run meanwhile: no example has a time within which it must end.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

# Modules that cannot be imported without their extra.
collect_ignore = [] if importlib.util.find_spec("ray") else ["fmtprop/ray/serve.py"]

# Collecting tests makes a million objects that live as long as the process. Python's collector would look through them
# again and again: a quarter of the time of collecting tests, and a fifth of that of some tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what there is before the first test to no later collection of garbage."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
    # pytest would listen, and PyTorch would write for it the text of each graph that it makes.
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests remember on disk out of the user's home, and what the user's programs remember out of tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMTPROP_CACHE_DIR", str(folder / "cache"))
        yield


def machine_figures() -> dict[str, float]:
    """Return the records of this machine's peaks: to measure them takes half a second of each new cache."""
    from fmtprop.store import Store
    from fmtprop.tuning.peaks import keys_of_peaks, peaks

    peaks(store := Store())
    return {key: figure for key in keys_of_peaks().values() if (figure := store.figure(key)) is not None}


def begin_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Begin a cache with nothing in it but this machine's peaks."""
    from fmtprop.store import Store

    figures = machine_figures()
    patch.setenv("FMTPROP_CACHE_DIR", str(folder))
    Store().add_figures(figures)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a test begin with a new cache, which no other test sees; return its folder."""
    begin_cache(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def cache_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a module check primitives for the first time, whatever this machine has checked before."""
    with pytest.MonkeyPatch.context() as patch:
        begin_cache(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(autouse=True)
def own_choices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let each test make its own choices: tests change what decides them, such as costs, races and kernels."""
    from fmtprop.store import texts

    monkeypatch.setattr(texts, "FOLDER", f"choices of {abs(hash(request.node.nodeid))}")


@pytest.fixture
def only_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a later compilation know who won, but not the choices."""
    from fmtprop.compiling import remembered

    monkeypatch.setattr(remembered, "text_of", lambda key: None)


@pytest.fixture(autouse=True)
def own_captures() -> Iterator[None]:
    """Let each test capture its own graphs: ``torch.compile`` counts them by code and gives up after eight.

    And without a figure for its log: it empties the caches to time the guards of each capture, in 20 ms.
    """
    if "torch._dynamo.guards" in sys.modules:
        vars(sys.modules["torch._dynamo.guards"])["profile_guard_manager"] = lambda *_: 0.0
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend keep plans however long they take: tests have no time of their own."""
    from fmtprop.dynamo import region

    monkeypatch.setattr(region, "compare", lambda ours, theirs: (ours(), (True, (1.0, 2.0)))[1])


@pytest.fixture
def usual_peaks(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """Let costs be modelled as on an idle machine, whatever else runs now: equal questions have equal answers.

    The cache is the test's own: what other tests' runs have taught of this machine's pace would decide, too.
    """
    from fmtprop.layout import DataType
    from fmtprop.tuning import costs
    from fmtprop.tuning.peaks import FOOTPRINTS, Peaks

    reading = dict(zip(FOOTPRINTS, (3e10, 2.5e10, 2e10, 2e10), strict=True))
    streaming = {footprint: 1.4 * rate for footprint, rate in reading.items()}
    peaks = Peaks({DataType.F32: 1.8e11, DataType.BF16: 3e11}, reading, 5e10, 3e-6, streaming)
    monkeypatch.setattr(costs, "peaks", lambda *_: peaks)
