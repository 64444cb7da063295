"""What all tests and examples share: one cache for all processes of a run, so that the machine is measured once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests remember on disk out of the user's home, and what the user's programs remember out of tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMTPROP_CACHE_DIR", str(folder / "cache"))
        yield
