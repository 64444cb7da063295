"""A system that forbids machine code of our own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fmtprop.jit import memory, no_code, unavailable


@pytest.fixture
def no_executable_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(code: bytes) -> int:
        raise OSError(13, "mprotect refuses")

    monkeypatch.setattr(memory, "place_code", refuse)
    for asked in (no_code, unavailable):
        asked.cache_clear()
    yield
    for asked in (no_code, unavailable):
        asked.cache_clear()
