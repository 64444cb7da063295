from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is remembered on disk stays out of the user's home; one cache for all tests of commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMTPROP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands set the threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
