"""The examples in the documentation may say ``fp`` without importing it."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _names(doctest_namespace: dict[str, Any]) -> None:
    import fmtprop

    doctest_namespace["fp"] = fmtprop
