from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fmtprop import dnnl


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Whatever a test creates is destroyed when it ends; shared descriptors and attributes are cached for good."""
    dnnl.Engine.cpu()
    gc.collect()
    before = dnnl.live_handles()
    yield
    gc.collect()
    after = dnnl.live_handles()
    assert gc.garbage == []
    for kind in ("primitive", "primitive_desc", "memory", "stream", "post_ops", "engine"):
        assert after.get(kind, 0) <= before.get(kind, 0), f"leaked {kind}: {before} -> {after}"
    # One shared default PrimitiveAttr.
    assert after.get("primitive_attr", 0) <= max(1, before.get("primitive_attr", 0))
