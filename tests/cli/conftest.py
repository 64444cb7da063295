from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands set the threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
