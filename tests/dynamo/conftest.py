"""What all tests of the backend need: no graph of another test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
