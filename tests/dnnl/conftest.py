from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fmtprop import dnnl

KINDS = ("primitive", "primitive_desc", "memory", "stream", "post_ops", "engine", "primitive_attr")


def leaked(before: dict[str, int]) -> list[str]:
    after = dnnl.live_handles()
    # The default attributes are made once and shared.
    kept = {"primitive_attr": max(1, before.get("primitive_attr", 0))}
    return [kind for kind in KINDS if after.get(kind, 0) > kept.get(kind, before.get(kind, 0))]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Whatever a test creates is destroyed when it ends; shared descriptors and attributes are cached for good."""
    dnnl.Engine.cpu()
    before = dnnl.live_handles()
    yield
    # Collecting with PyTorch loaded takes long: only where something seems to be left.
    if leaked(before):
        gc.collect()
    assert not leaked(before), f"{before} -> {dnnl.live_handles()}"
    assert gc.garbage == []
