from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forks import forked_contenders as forked_contenders
from tests.threads import torch_threads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands set the threads of the whole process."""
    with torch_threads():
        yield
